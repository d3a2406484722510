"""The Triton kernels, one family a file. Imported only where they run: see megatron_fp8/ops/__init__.py."""
