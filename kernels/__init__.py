"""Triton kernels, each beside its plain-torch reference; nothing here imports asyncrl."""
