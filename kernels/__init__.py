"""Kernels and their plain-torch references. Nothing here imports asyncrl."""
