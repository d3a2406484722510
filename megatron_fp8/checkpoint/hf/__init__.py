"""The Hugging Face side of `megatron-fp8 convert`: names and layouts of tensors, and config.json."""
