"""The base class of the model's modules."""

from __future__ import annotations

from typing import Any, ClassVar

from mlx import nn


class Module(nn.Module):
    """`nn.Module` that counts changes to modules of this class, all of them together, in `Module.changes`.

    A compiled graph keeps what it was traced with; that nothing was counted since then saves the look at thousands of
    values before each step. Counted are attributes and items that are set or removed, whatever their values, by
    `update`, `load_weights` or `freeze` as well. Not counted is what changes within a list or dict of a module, in a
    module of another class, or in `vars(module)`.
    """

    changes: ClassVar[int] = 0

    def __setattr__(self, name: str, value: Any) -> None:
        Module.changes += 1
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        Module.changes += 1
        super().__delattr__(name)


def _counted(name: str):
    method = getattr(nn.Module, name)

    def change(self: Module, *arguments: Any) -> Any:
        Module.changes += 1
        return method(self, *arguments)

    change.__name__, change.__doc__ = name, method.__doc__
    return change


# Modules are dicts, and these are what changes a dict; `update` is MLX's own and sets items.
for _name in ("__setitem__", "__delitem__", "__ior__", "pop", "popitem", "clear", "setdefault"):
    setattr(Module, _name, _counted(_name))
