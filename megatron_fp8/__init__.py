"""Stock Megatron-LM trains in FP8 with one more flag, --fp8-level. To import it changes nothing."""
