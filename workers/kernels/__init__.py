"""Device kernels; every kernel has a torch twin of the same signature in ``reference.py``."""
