"""The command line: levels, our flags, what becomes of stock Megatron's, and the one-line errors."""
