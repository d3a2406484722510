"""Collectives for gradients, weights and activations, in FP8 or not, on NCCL and on gloo."""
