"""Verbs that run a training command a few times: bisect, probe, invariants, sharpness of a checkpoint."""
