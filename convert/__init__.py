"""Making model files: official release, GGUF and MLX folders."""
