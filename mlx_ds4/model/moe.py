"""Mixture of experts: router, routed experts, one shared expert."""

from __future__ import annotations

import mlx.core as mx

from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels.expand_matmul import experts_expand
from mlx_ds4.custom_kernels.expert_matmul import Plan, expert_down, expert_swiglu, plan_pairs
from mlx_ds4.custom_kernels.fake_quant import fake_quant_fp8
from mlx_ds4.custom_kernels.hyper_connection import SiteSums, expand
from mlx_ds4.custom_kernels.shared_expert import shared_swiglu_routed

from .linear import Linear, rounds_input, stored
from .module import Module
from .step import Step


class Gate(Module):
    """Router logits and the selection bias (text rows; the image bias of the release is not used)."""

    def __init__(self, dims: int, experts: int):
        super().__init__()
        self.weight = mx.zeros((experts, dims))
        self.bias = mx.zeros((experts,))


class StackedLinear(Module):
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


class Experts(Module):
    """Routed experts: y = shared + sum over chosen, by ascending id, of w2(weight * swiglu(w1 x, w3 x)), in float32.

    x is rounded to FP8 once, where w1 or w3 asks for it.
    """

    def __init__(self, config: ModelConfig, experts: int):
        super().__init__()
        c = config
        self._limit = c.swiglu_limit
        self.w1 = StackedLinear(experts, c.hidden_size, c.moe_intermediate_size)
        self.w3 = StackedLinear(experts, c.hidden_size, c.moe_intermediate_size)
        self.w2 = StackedLinear(experts, c.moe_intermediate_size, c.hidden_size)

    def activate(self, x: mx.array, chosen: mx.array, weights: mx.array) -> tuple[mx.array, Plan | None]:
        """What w2 takes, bfloat16 [N, K, F], of x [N, C], chosen int32 [N, K] ascending and weights float32 [N, K]; and
        the order of the pairs of many rows."""
        if self.w1.rounds_input or self.w3.rounds_input:
            x = fake_quant_fp8(x)
        gate, up = (stored(layer.weight) for layer in (self.w1, self.w3))
        plan = plan_pairs(chosen, gate[1]["codes"].shape[0])
        a = expert_swiglu(x, gate, up, chosen, weights, limit=self._limit, plan=plan)
        return fake_quant_fp8(a) if self.w2.rounds_input else a, plan


class SharedExpert(Module):
    """The expert that every row takes, without a routing weight: w2(swiglu(w1 x, w3 x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        c = config
        self._limit = c.swiglu_limit
        self.w1 = Linear(c.hidden_size, c.moe_intermediate_size, trained=True)
        self.w3 = Linear(c.hidden_size, c.moe_intermediate_size, trained=True)
        self.w2 = Linear(c.moe_intermediate_size, c.hidden_size, trained=True)

    def activate(
        self, x: mx.array, gate: Gate, sums: SiteSums, counts: mx.array, *, k: int, factor: float
    ) -> tuple[mx.array, ...]:
        """Router logits float32 [N, E] of x [N, C], what w2 takes: bfloat16 [N, F], and the four of `route_beside`."""
        rounded = fake_quant_fp8(x) if self.w1.rounds_input or self.w3.rounds_input else x
        weights = (stored(layer.weight) for layer in (self.w1, self.w3))
        logits, a, *chosen = shared_swiglu_routed(
            rounded, *weights, x, stored(gate.weight), gate.bias, sums,
            k=k, factor=factor, limit=self._limit, counts=counts,
        )  # fmt: skip
        return logits, fake_quant_fp8(a) if self.w2.rounds_input else a, *chosen


class MoE(Module):
    """The feed-forward part (architecture notes 8): x [B, L, C], the streams h [B, L, M, C] and the sums of its site ->
    the streams as the result expands them, and the site's `coefficients`."""

    def __init__(self, config: ModelConfig, *, experts: int | None = None, top_k: int | None = None):
        super().__init__()
        experts = experts or config.n_routed_experts
        self._top_k = top_k or config.num_experts_per_tok
        self._factor = config.routed_scaling_factor
        self.gate = Gate(config.hidden_size, experts)
        self.experts = Experts(config, experts)
        self.shared_experts = SharedExpert(config)

    def __call__(self, x: mx.array, step: Step, h: mx.array, sums: SiteSums) -> tuple[mx.array, mx.array, mx.array]:
        rows = x.reshape(-1, x.shape[-1])
        logits, shared, chosen, weights, pre, mix = self.shared_experts.activate(
            rows, self.gate, sums, step.tickets(), k=self._top_k, factor=self._factor
        )
        a, plan = self.experts.activate(rows, chosen, weights)
        last = (a, stored(self.experts.w2.weight), chosen, (shared, stored(self.shared_experts.w2.weight)))
        if step.traces:
            for name, value in (("ffn.logits", logits), ("ffn.experts", chosen), ("ffn.weights", weights)):
                step.note(name, value.reshape(*x.shape[:-1], -1))
            y = expert_down(*last, plan=plan).reshape(x.shape)
            step.note("ffn.y", y)
            return expand(y, h, mix), pre, mix
        return experts_expand(*last, h, mix, plan=plan, counts=step.tickets()), pre, mix
