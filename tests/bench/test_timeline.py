"""What the timeline says of recorded kernels; recording them takes an NVIDIA GPU."""

from __future__ import annotations

from benchmarks import timeline

NAME = "void mlx::core::cu::custom_kernel_{}"


def test_lines():
    """Two steps of three kernels, of which one runs beside another, out of order, with a gap between the steps."""
    step = [(0.0, 10.0, NAME.format("a")), (4.0, 6.0, NAME.format("b")), (12.0, 15.0, NAME.format("a"))]
    records = [*((begin + 100, end + 100, name) for begin, end, name in step), *step]
    *kernels, whole = timeline.lines(records, steps=2)
    assert [(line["kernel"], line["launches"], line["us"], line["ms"]) for line in kernels] == [
        ("a", 2.0, 6.5, 0.013),
        ("b", 1.0, 2.0, 0.002),
    ]
    assert kernels[0]["us_p10"] == 3.0 and kernels[0]["us_p90"] == 10.0
    assert whole["ms"] == 0.058 and whole["busy_ms"] == 0.013
    assert whole["longest_gaps_us"] == [(85.0, "a"), (2.0, "a"), (2.0, "a")]


def test_nothing_recorded():
    assert list(timeline.lines([], steps=2)) == []


def test_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(timeline.mx.cuda, "is_available", lambda: False)
    assert timeline.main([]) == 2 and "needs an NVIDIA GPU" in capsys.readouterr().err
