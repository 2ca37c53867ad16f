"""Mixture of experts: router, routed experts, one shared expert."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels.expert_matmul import clamped_swiglu
from mlx_ds4.custom_kernels.fake_quant import fake_quant_fp8
from mlx_ds4.custom_kernels.router import route

from .linear import Linear, dense, rounds_input
from .step import Step

# Up to this many (row, expert) pairs their matrices are dequantized together, without asking the host.
_GATHERED_PAIRS = 8


class Gate(nn.Module):
    """Router logits and the selection bias (text rows; the image bias of the release is not used)."""

    def __init__(self, dims: int, experts: int):
        super().__init__()
        self.weight = mx.zeros((experts, dims))
        self.bias = mx.zeros((experts,))

    def __call__(self, x: mx.array) -> mx.array:
        return x.astype(mx.float32) @ dense(self.weight).T


class StackedLinear(nn.Module):
    """One matrix per expert, weight [E, out, in], dense or block-quantized."""

    def __init__(self, experts: int, in_dims: int, out_dims: int):
        super().__init__()
        self.weight = mx.zeros((experts, out_dims, in_dims), dtype=mx.bfloat16)
        self._rounds_input: bool | None = None

    @property
    def rounds_input(self) -> bool:
        return rounds_input(self.weight, self._rounds_input)

    @rounds_input.setter
    def rounds_input(self, value: bool | None) -> None:
        self._rounds_input = value

    def apply(self, x: mx.array, expert: mx.array | int) -> mx.array:
        """x [.., in] through one expert, or x [P, 1, in] through the P experts of an index array."""
        if self.rounds_input:
            x = fake_quant_fp8(x)
        weight = dense(self.weight, expert)
        return (x.astype(mx.float32) @ weight.swapaxes(-1, -2)).astype(mx.bfloat16)


class Experts(nn.Module):
    """Routed experts: y = sum over chosen, by ascending id, of w2(weight * swiglu(w1 x, w3 x)), in float32."""

    def __init__(self, config: ModelConfig, experts: int):
        super().__init__()
        c = config
        self._limit = c.swiglu_limit
        self.w1 = StackedLinear(experts, c.hidden_size, c.moe_intermediate_size)
        self.w3 = StackedLinear(experts, c.hidden_size, c.moe_intermediate_size)
        self.w2 = StackedLinear(experts, c.moe_intermediate_size, c.hidden_size)

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        """x [N, C], chosen int32 [N, K] ascending, weights float32 [N, K] -> float32 [N, C]."""
        if chosen.size <= _GATHERED_PAIRS:
            rows = mx.repeat(x, chosen.shape[1], axis=0)[:, None]
            y = self._expert(rows, chosen.reshape(-1), weights.reshape(-1, 1, 1)).reshape(*chosen.shape, -1)
        else:
            y = self._by_expert(x, chosen, weights)
        total = y[:, 0].astype(mx.float32)
        for slot in range(1, y.shape[1]):
            total = total + y[:, slot].astype(mx.float32)
        return total

    def _expert(self, x: mx.array, expert: mx.array | int, weight: mx.array) -> mx.array:
        a = clamped_swiglu(self.w1.apply(x, expert), self.w3.apply(x, expert), self._limit, weight)
        return self.w2.apply(a, expert)

    def _by_expert(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        """Each expert once over all of its rows; reads the choice on the host. Returns [N, K, C]."""
        flat = np.array(chosen).reshape(-1)
        order = np.argsort(flat, kind="stable")
        K = chosen.shape[1]
        weights = weights.reshape(-1, 1)
        parts = []
        for expert in np.unique(flat):
            pairs = order[np.searchsorted(flat[order], expert) :][: np.count_nonzero(flat == expert)]
            index = mx.array(pairs)
            parts.append(self._expert(x[index // K], int(expert), weights[index]))
            mx.eval(parts[-1])  # one dequantized expert alive at a time
        back = np.empty_like(order)
        back[order] = np.arange(order.size)
        return mx.concatenate(parts)[mx.array(back)].reshape(*chosen.shape, -1)


class SharedExpert(nn.Module):
    """The expert that every row takes, without a routing weight."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        c = config
        self._limit = c.swiglu_limit
        self.w1 = Linear(c.hidden_size, c.moe_intermediate_size, trained=True)
        self.w3 = Linear(c.hidden_size, c.moe_intermediate_size, trained=True)
        self.w2 = Linear(c.moe_intermediate_size, c.hidden_size, trained=True)

    def __call__(self, x: mx.array) -> mx.array:
        return self.w2(clamped_swiglu(self.w1(x), self.w3(x), self._limit))


class MoE(nn.Module):
    """x [B, L, C] -> bfloat16 [B, L, C] (architecture notes 8)."""

    def __init__(self, config: ModelConfig, *, experts: int | None = None, top_k: int | None = None):
        super().__init__()
        experts = experts or config.n_routed_experts
        self._top_k = top_k or config.num_experts_per_tok
        self._factor = config.routed_scaling_factor
        self.gate = Gate(config.hidden_size, experts)
        self.experts = Experts(config, experts)
        self.shared_experts = SharedExpert(config)

    def __call__(self, x: mx.array, step: Step) -> mx.array:
        logits = self.gate(x)
        chosen, weights = route(logits, self.gate.bias, k=self._top_k, factor=self._factor)
        rows = x.reshape(-1, x.shape[-1])
        K = self._top_k
        y = self.experts(rows, chosen.reshape(-1, K), weights.reshape(-1, K)).reshape(x.shape)
        y = (y + self.shared_experts(x).astype(mx.float32)).astype(mx.bfloat16)
        for name, value in (
            ("ffn.logits", logits), ("ffn.experts", chosen), ("ffn.weights", weights), ("ffn.y", y)
        ):  # fmt: skip
            step.note(name, value)
        return y
