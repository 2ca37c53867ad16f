"""What the commands share: a parser whose errors the command prints, in one line like all others."""

from __future__ import annotations

import argparse


class UsageError(ValueError):
    """A request that cannot be started."""


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print its usage and exit."""

    def error(self, message: str):
        raise UsageError(f"{message}; --help lists what is possible.")
