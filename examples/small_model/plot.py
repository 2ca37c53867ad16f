"""Loss curves of a run as PNG (needs matplotlib)."""

from __future__ import annotations

import json
from pathlib import Path


def plot(run: Path, out: Path) -> None:
    """Draws the model's losses and the drafter's loss and accepted length over the steps of `run`."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("loss curves need matplotlib: install it with pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axes, part, keys in ((left, "model", ("loss", "index", "held")), (right, "draft", ("draft", "accepted"))):
        for key in keys:
            points = [(r["step"], r[key]) for r in records if r.get("part") == part and key in r]
            axes.plot(*zip(*points, strict=True), label=key, marker="o" if key == "held" else None)
        axes.set(title=part, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
    left.set(ylabel="nats per token")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
