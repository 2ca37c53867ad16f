"""What a figure needs beside it: device, back end, operating system, MLX's version, commit."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import mlx.core as mx

from mlx_ds4.custom_kernels._switches import backend

_ROOT = Path(__file__).resolve().parent.parent


def machine() -> dict[str, str]:
    """Names of the default device, the kernels' back end, the system, MLX's version and the checkout's commit."""
    device = mx.device_info(mx.default_device()).get("device_name", "unknown")
    system = f"macOS {platform.mac_ver()[0]}" if platform.system() == "Darwin" else platform.platform()
    return {
        "device": str(device),
        "backend": backend() or "reference",
        "os": system,
        "mlx": mx.__version__,
        "commit": commit(),
    }


def free_memory() -> int | None:
    """Bytes that the default device can still give, as MLX reports it, or None where it reports none (a CPU).

    On Metal that is the machine's memory, less what MLX has in use; on CUDA what is free, and what MLX keeps of freed
    arrays.
    """
    info = mx.device_info(mx.default_device())
    if "free_memory" in info:
        return int(info["free_memory"]) + mx.get_cache_memory()
    if "memory_size" in info:
        return max(0, int(info["memory_size"]) - mx.get_active_memory())
    return None


def commit() -> str:
    """The checkout's commit, with "+" when files differ from it; "unknown" for an installed package."""
    if not (_ROOT / "pyproject.toml").is_file():
        return "unknown"  # git would answer for whatever repository lies around the installation
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
