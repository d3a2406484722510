"""The stability lab: is my FP8 run sound, and how would I notice early if not?

Three rooms: report and trial import sweep, for its stores, plans and runs. They do not import each other, and sweep
imports neither.
"""
