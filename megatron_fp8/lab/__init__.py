"""The stability lab: is my FP8 run sound, and how would I know early?"""
