"""Write every kernel instance of every case as a `.metal` file, as MLX would hand it to Apple's compiler.

    python -m tools.dump_metal FOLDER             on any machine
    python -m tools.dump_metal FOLDER --compile   on a Mac with Xcode's Metal toolchain: also compiles each file

The text is MLX's own: its prelude (from the installed MLX) and the function that it generates. By hand, a file is
compiled with `xcrun metal -std=metal3.1 -c FILE -o /dev/null`.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_ds4.custom_kernels._case import all_cases
from mlx_ds4.custom_kernels._kernel import Launch, watch_launches
from mlx_ds4.custom_kernels._switches import trace

LANGUAGES = ("metal3.1", "metal3.2")  # macOS 14 and 15; both are C++14 with extensions
_INCLUDE = re.compile(r'^\s*#include "(mlx/[^"]+)"\s*$', re.M)


def prelude() -> str:
    """MLX's Metal prelude with its own includes written out once each."""
    root, seen = Path(mx.__file__).parent / "include", set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (root / name).read_text(encoding="utf-8").replace("#pragma once", "")
        return _INCLUDE.sub(lambda match: expand(match.group(1)), text)

    return expand("mlx/backend/metal/kernels/utils.h")


def instances() -> dict[str, str]:
    """Text by file stem, one for each different function that the cases need."""
    launches: list[Launch] = []
    with watch_launches(launches.append):
        for case in all_cases():
            arrays = case.inputs(np.random.default_rng(0))
            trace(lambda case=case, arrays=arrays: case.fn(*arrays))
    found = {}
    for launch in launches:
        _, text = launch.metal_text()
        found[f"{launch.kernel.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"] = text
    return found


def compile_file(path: Path, language: str) -> str:
    """What Apple's compiler says against a file, or ""."""
    command = ["xcrun", "metal", f"-std={language}", "-c", str(path), "-o", "/dev/null"]
    result = subprocess.run(command, capture_output=True, text=True)
    return "" if result.returncode == 0 else result.stderr.strip()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the files go; made if missing")
    parser.add_argument("--compile", action="store_true", help="compile each with xcrun metal and print a table")
    options = parser.parse_args(arguments)
    if options.compile and shutil.which("xcrun") is None:
        print("--compile found no xcrun; run it on a Mac with Xcode's Metal toolchain.", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    before, faults = prelude(), 0
    for stem, text in instances().items():
        path = options.folder / f"{stem}.metal"
        path.write_text(f"// MLX {mx.__version__}\n{before}\n{text}", encoding="utf-8")
        if not options.compile:
            print(path)
            continue
        for language in LANGUAGES:
            fault = compile_file(path, language)
            faults += bool(fault)
            print(f"{stem:50} {language:10} {'ok' if not fault else 'REFUSED'}")
            if fault:
                print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
