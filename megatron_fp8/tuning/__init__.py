"""Tuning by preferences: the loss, the pairs of answers, the reference beside the policy."""
