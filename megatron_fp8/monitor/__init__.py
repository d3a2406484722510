"""Statistics of what FP8 does to a run: collect.py counts on the device, writers.py names and writes the results."""
