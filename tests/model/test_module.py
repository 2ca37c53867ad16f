"""Every way to change a module of the model is counted, and reading is not."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from mlx import nn

from mlx_ds4.model.module import Module
from mlx_ds4.model.norm import RMSNorm


class Pair(Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = RMSNorm(4, 1e-6), RMSNorm(4, 1e-6)
        self.size = 4


def merge(pair):
    pair |= {"left": pair.right}


CHANGES = {
    "a setting": lambda pair: setattr(pair, "size", 5),
    "a setting of a part": lambda pair: setattr(pair.left, "eps", 1.0),
    "a setting that goes": lambda pair: delattr(pair, "size"),
    "a part": lambda pair: setattr(pair, "left", RMSNorm(4, 1.0)),
    "a part that goes": lambda pair: delattr(pair, "left"),
    "an array": lambda pair: setattr(pair.left, "weight", mx.zeros((4,))),
    "an item": lambda pair: pair.left.__setitem__("weight", mx.zeros((4,))),
    "an item that goes": lambda pair: pair.__delitem__("left"),
    "merge": merge,
    "pop": lambda pair: pair.pop("left"),
    "popitem": lambda pair: pair.popitem(),
    "clear": lambda pair: pair.clear(),
    "setdefault": lambda pair: pair.setdefault("middle", pair.left),
    "update": lambda pair: pair.update({"left": {"weight": mx.zeros((4,))}}),
    "load_weights": lambda pair: pair.load_weights([("left.weight", mx.zeros((4,)))], strict=False),
    "update_modules": lambda pair: pair.update_modules({"left": nn.Identity()}),
    "apply": lambda pair: pair.apply(lambda x: x + 1),
    "train": lambda pair: pair.train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_counted(change):
    pair = Pair()
    before = Module.changes
    CHANGES[change](pair)
    assert Module.changes > before


def test_reading_is_no_change():
    pair = Pair()
    before = Module.changes
    pair.left(mx.ones((1, 4)))
    assert pair["left"] is pair.left and len(pair.parameters()) == 2 and list(pair.items()) and pair.get("none") is None
    assert "RMSNorm" in repr(pair)
    assert Module.changes == before


def test_they_remain_dicts_to_mlx():
    """What a counted method returns is what a dict's does; a copy has the same parts."""
    pair = Pair()
    left = pair.left
    assert pair.setdefault("left", None) is left and pair.pop("left") is left and pair.pop("left", 3) == 3
    assert copy.deepcopy(pair).right.weight.shape == (4,)
    with pytest.raises(KeyError):
        pair.pop("left")
