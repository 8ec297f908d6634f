"""Triton kernels: one file a kernel, each with its launcher and its torch reference."""
