"""Flat parameters with their optimizers, routing biases and a step counter: what a checkpoint holds."""

from __future__ import annotations

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from .parameters import Layout

# Storage class -> (learning rate as a multiple, weight decay). A row of a table is rarely seen, so it learns faster.
_RATES = {
    "FP4": (1.0, 0.1),
    "FP8": (1.0, 0.1),
    "BF16": (1.0, 0.1),
    "ROWS": (3.0, 0.0),
    "VECTORS": (1.0, 0.0),
    "F32": (1.0, 0.0),
}
_LARGEST_NORM = 1.0
_BIAS_STEP = 1e-3  # of a routing bias towards even load


class Learner:
    """One part of the model in training."""

    def __init__(self, layout: Layout, seed: int):
        self.layout = layout
        self.flat = layout.initial(seed)
        self.biases = {w.name: mx.zeros(w.shape) for w in layout.biases}
        self.step = 0
        self._optimizers = {
            name: optim.AdamW(0.0, betas=[0.9, 0.95], weight_decay=_RATES[name][1], bias_correction=True)
            for name in self.flat
        }

    def update(self, gradients: dict[str, mx.array], loads: list[mx.array], rate: float) -> mx.array:
        """One step of AdamW on clipped gradients, and of the biases against the load; returns the gradients' norm."""
        gradients, norm = optim.clip_grad_norm(gradients, _LARGEST_NORM)
        usable = mx.isfinite(norm)  # one bad batch must not end the run
        gradients = {name: mx.where(usable, g, 0) for name, g in gradients.items()}
        for name, optimizer in self._optimizers.items():
            optimizer.learning_rate = rate * _RATES[name][0]
            self.flat[name] = optimizer.apply_gradients({"v": gradients[name]}, {"v": self.flat[name]})["v"]
        for name, load in zip(self.biases, loads, strict=True):
            self.biases[name] = self.biases[name] + _BIAS_STEP * mx.sign(load.mean() - load)
        self.step += 1
        return norm

    def arrays(self) -> list[mx.array]:
        """Everything that a step changes."""
        return [value for _, value in tree_flatten([self.flat, self.biases, self._states()])]

    def named(self) -> dict[str, mx.array]:
        """The weights as the model is to hold them, routing biases included."""
        return {**self.layout.named(self.flat), **self.biases}

    def save(self) -> dict[str, mx.array]:
        """The state as named arrays for a checkpoint."""
        state = {"flat": self.flat, "optimizers": self._states(), "step": mx.array(self.step)}
        named = {f"bias.{name}": value for name, value in self.biases.items()}
        return {**dict(tree_flatten(state)), **named}

    def restore(self, saved: dict[str, mx.array]) -> None:
        """Takes the state of a `save` of the same layout; ValueError when it is another one."""
        state = tree_unflatten([(k, v) for k, v in saved.items() if not k.startswith("bias.")])
        shapes = {name: v.shape for name, v in self.flat.items()}
        if {name: v.shape for name, v in state["flat"].items()} != shapes:
            raise ValueError(f"the checkpoint holds other weights than {shapes}: it belongs to another model")
        self.flat = state["flat"]
        self.biases = {name: saved[f"bias.{name}"] for name in self.biases}
        self.step = int(state["step"].item())
        for name, optimizer in self._optimizers.items():
            optimizer.init({"v": self.flat[name]})
            optimizer.state = state["optimizers"][name]

    def _states(self) -> dict:
        return {name: optimizer.state for name, optimizer in self._optimizers.items()}
