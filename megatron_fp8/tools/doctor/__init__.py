"""`megatron-fp8 doctor`: what a machine and its cluster have of what a run needs."""
