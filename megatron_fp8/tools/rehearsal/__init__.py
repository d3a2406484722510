"""`megatron-fp8 rehearse`: a cluster job's command, tried on one machine without a GPU."""
