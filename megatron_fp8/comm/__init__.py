"""What goes over the wire: gradient collectives in FP8, on NCCL and gloo alike."""
