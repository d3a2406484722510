"""The stability lab: is my FP8 run sound, and how would I know early?

Three rooms: report and trial import sweep, for its stores, plans and runs, and not each other; sweep imports neither.
"""
