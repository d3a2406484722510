"""The stress suite: which recipes of FP8 are fragile, and at which plant? `megatron-fp8 lab stress`.

Each stress plants one trouble, from small learning rates to outliers, and measures every recipe under it in seconds.
"""
