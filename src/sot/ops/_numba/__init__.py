"""What the numba kernels share. Imported by the backends named numba only, and they only where it is installed."""
