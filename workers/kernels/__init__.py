"""Kernels in torch and in Triton with the same signatures; `select.py` selects a set."""
