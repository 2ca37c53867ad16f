"""Long headers of CUDA kernels, which lie in files that processes share."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from mlx_ds4.custom_kernels import _cuda_cache, _kernel


def test_two_processes_include_the_same_file(tmp_path):
    code = "from mlx_ds4.custom_kernels._kernel import included; print(included('// long'), end='')"
    environment = {**os.environ, "MLX_PTX_CACHE_DIR": str(tmp_path)}
    run = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    name = f"{hashlib.sha256(b'// long').hexdigest()[:16]}.h"
    assert run[0] == run[1] == f'#include "{tmp_path / "mlx_ds4" / name}"\n'
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [name] and (
        tmp_path / "mlx_ds4" / name
    ).read_text() == "// long"


def test_a_header_file_of_other_content_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(_kernel, "_header_folder", lambda: tmp_path)
    path = Path(_kernel.included.__wrapped__("// long").split('"')[1])
    path.write_text("// not this")
    before = _kernel.included.__wrapped__("// long")
    assert before == f'#include "{path}"\n' and path.read_text() == "// long"
    changed = path.stat().st_mtime_ns, path.stat().st_ino
    _kernel.included.__wrapped__("// long")
    assert changed == (path.stat().st_mtime_ns, path.stat().st_ino)  # a right one stays as it is


def test_the_header_folder_is_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    assert _cuda_cache.header_folder() == tmp_path / "mlx_ds4"
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert _cuda_cache.header_folder() is None
    folder = _kernel._header_folder.__wrapped__()
    assert folder.is_dir() and tmp_path not in folder.parents  # for this process alone
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "file"))
    assert _cuda_cache.header_folder() is None
