"""The Triton kernels, one family a file, which is imported when one of its operations gets a CUDA tensor."""
