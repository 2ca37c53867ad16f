"""DeepSeek V4.1 Flash in MLX."""

from importlib import import_module as _import_module
from pathlib import Path as _Path

__version__ = "0.1.0"

# In a checkout `custom_kernels` and `convert` lie beside this package; in a wheel they lie inside it.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "custom_kernels").is_dir():
    __path__.append(str(_root))

# Imported at first use, so that `import mlx_ds4` costs nothing. `generate` is the command module and is
# therefore not among them: the function is `mlx_ds4.api.generate`.
_exports = {
    "load": "api",
    "load_drafter": "drafter_files",
    "stream_generate": "api",
    "GenerationResponse": "api",
    "generate_step": "generation",
    "Cache": "cache",
    "ModelConfig": "config",
}
__all__ = sorted(_exports)


def __getattr__(name: str):
    if name in _exports:
        return getattr(_import_module(f"{__name__}.{_exports[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_exports})
