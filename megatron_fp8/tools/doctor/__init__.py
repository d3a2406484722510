"""`megatron-fp8 doctor`: checks that a machine and its cluster have what a run needs."""
