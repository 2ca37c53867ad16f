"""Run every kernel case on this machine's GPU and print one table, to paste into a report.

    python -m tools.mac_check

Each line compares a kernel with its reference in plain MLX operations on the same device. No result of this project
comes from a Mac yet, so a table from one is news whether it is all "ok" or not. `MLX_DS4_KERNELS=emulate` runs the
small cases through the emulator instead.
"""

from __future__ import annotations

import sys
import time

from mlx_ds4.custom_kernels._case import Case, all_cases, check
from mlx_ds4.custom_kernels._count import count_launches
from mlx_ds4.custom_kernels._switches import backend, enabled
from mlx_ds4.machine import machine


def run(case: Case) -> tuple[str, str, str, str]:
    """(name, "ok" or the fault, largest error, seconds with compilation) of one case."""
    if not enabled(case.family):
        return case.name, "off: family disabled", "", ""
    start = time.perf_counter()
    try:
        with count_launches() as launches:
            fault, error = check(case)
    except Exception as e:  # one refused kernel must not hide the others
        return case.name, f"FAILED: {str(e).splitlines()[0][:300]}", "", f"{time.perf_counter() - start:.2f}"
    if fault is None and not launches:
        fault = "no kernel was launched"
    return case.name, f"WRONG: {fault}" if fault else "ok", f"{error:.1e}", f"{time.perf_counter() - start:.2f}"


def main() -> int:
    if backend() is None:
        print("No GPU is the default device here, so there is nothing to check; run this on a Mac.", file=sys.stderr)
        return 2
    print("  ".join(f"{key} {value}" for key, value in machine().items()))
    cases = [c for c in all_cases() if not (c.large and backend() == "emulate")]
    width = max([len(case.name) for case in cases], default=0)
    bad = 0
    for case in cases:
        name, result, error, seconds = run(case)
        bad += result.startswith(("WRONG", "FAILED"))
        print(f"{name:{width}}  {error:>8}  {seconds:>7} s  {result}", flush=True)
    print(f"{len(cases)} cases, {bad} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
