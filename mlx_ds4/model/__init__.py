"""The model as mlx.nn modules, in the order in which data meets them."""
