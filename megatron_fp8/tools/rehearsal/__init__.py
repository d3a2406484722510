"""`megatron-fp8 rehearse`: try a cluster job's command on one machine without a GPU."""
