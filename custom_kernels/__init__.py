"""Custom Metal and CUDA kernels, each beside its reference in plain MLX operations."""
