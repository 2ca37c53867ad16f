"""Stop strings in text that arrives token by token."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Finds stop strings in text that arrives in pieces, however it is cut.

    Text that may be the beginning of a stop string is held back. The string that is complete first, reading
    character by character, ends the text; of two complete at the same character, the longer.
    """

    def __init__(self, stop: str | Iterable[str] | None):
        self._stops = [stop] if isinstance(stop, str) else list(stop or [])
        if any(not isinstance(s, str) or not s for s in self._stops):
            raise ValueError(f"stop is {stop!r:.80}, but must be one or several non-empty strings.")
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """Takes a piece, returns the text now known to precede any stop string, and whether one was found."""
        text = self._held + piece
        starts = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if starts:
            self._held = ""
            return text[: min(starts)[1]], True
        keep = min(len(text), max(map(len, self._stops), default=1) - 1)
        while keep and not any(stop.startswith(text[len(text) - keep :]) for stop in self._stops):
            keep -= 1
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The text held back, once no more will come."""
        held, self._held = self._held, ""
        return held
