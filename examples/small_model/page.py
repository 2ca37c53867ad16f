"""Where the pages of the examples go."""

from __future__ import annotations

from pathlib import Path


def write_page(text: str, out: Path | None) -> None:
    """To the file, or to standard output without one."""
    if out:
        out.write_text(text)
    else:
        print(text, end="")
