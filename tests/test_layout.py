"""The house's rules that a machine can check: floors of imports, packages, cheap import, the package bridge."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A file may import from its own floor and lower ones. The longest matching prefix counts.
FLOORS = {
    "mlx_ds4.custom_kernels": 0,
    "mlx_ds4.formats": 0,
    "mlx_ds4.config": 1,
    "mlx_ds4.cache": 1,
    "mlx_ds4.memory": 1,
    "mlx_ds4.model": 2,
    "mlx_ds4": 3,
    "mlx_ds4.convert": 3,
    "mlx_ds4.api": 4,
    "mlx_ds4.generate": 5,
    "mlx_ds4.bench": 5,
    "mlx_ds4.perplexity": 5,
}
COMMANDS = ("mlx_ds4.bench", "mlx_ds4.generate", "mlx_ds4.perplexity")
# Text knows no tensors.
WITHOUT_MLX = ("tokenizer", "chat", "tool_calls", "dsml", "engram_map", "config", "spm")


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in (
        ("mlx_ds4", "mlx_ds4"),
        ("custom_kernels", "mlx_ds4.custom_kernels"),
        ("convert", "mlx_ds4.convert"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *(p for p in parts if p != "__init__")))] = path
    return found


def imports(name: str, path: Path) -> set[str]:
    """Absolute names of the modules that a file imports anywhere."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    out = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base]).rstrip(".")
            out |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return out


def floor(name: str) -> int:
    best = max((prefix for prefix in FLOORS if name == prefix or name.startswith(prefix + ".")), key=len)
    return FLOORS[best]


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_stay_on_their_floor(name):
    if name == "mlx_ds4":
        return  # the package itself only names what api.py offers, lazily
    everything = modules()
    for target in imports(name, everything[name]):
        assert not re.match(r"(custom_kernels|convert|tests)(\.|$)", target), (
            f"{name} imports {target} as a top-level name"
        )
        if target in everything and target != "mlx_ds4":
            assert floor(target) <= floor(name), (
                f"{name} (floor {floor(name)}) imports {target} (floor {floor(target)})"
            )
            assert target not in COMMANDS, "nothing imports a command"


@pytest.mark.parametrize("name", WITHOUT_MLX)
def test_text_modules_know_no_tensors(name):
    path = ROOT / "mlx_ds4" / f"{name}.py"
    if path.exists():
        assert not any(target.split(".")[0] == "mlx" for target in imports(f"mlx_ds4.{name}", path))
    assert any((ROOT / "mlx_ds4" / f"{n}.py").exists() for n in WITHOUT_MLX)


def test_packages_are_the_folders():
    declared = re.search(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M).group(1)
    folders = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert set(re.findall(r'"([^"]+)"', declared)) == folders


def test_import_is_cheap_and_silent():
    """`import mlx_ds4` and the text modules stay far below half a second beyond Python's own start."""
    code = "import sys, mlx_ds4, mlx_ds4.config, mlx_ds4.tokenizer; assert 'mlx.core' not in sys.modules"
    best = 9.0
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        best = min(best, time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
    assert best < 1.5


def test_files_stay_small():
    for path in modules().values():
        assert len(path.read_text().splitlines()) <= 450, path
