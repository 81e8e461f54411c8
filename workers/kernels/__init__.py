"""Device kernels in two sets of the same signatures, torch and Triton; `choose.py` says which runs."""
