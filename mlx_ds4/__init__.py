"""DeepSeek V4.1 Flash in MLX."""

from pathlib import Path as _Path

__version__ = "0.1.0"

# In a checkout `custom_kernels` and `convert` lie beside this package; in a wheel they lie inside it.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "custom_kernels").is_dir():
    __path__.append(str(_root))
