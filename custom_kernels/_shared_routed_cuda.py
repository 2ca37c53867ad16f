"""CUDA: the router's choice and a site's coefficients in the launch that makes the router's logits.

Blocks for logits count their arrivals, and the last one chooses: a warp a row. Nothing waits for another block, and the
choice is made while other blocks multiply the shared expert's matrices. The choice and the coefficients are the
functions of `router.py` and `hyper_connection.py`, so they have the bits of launches of their own.

Estimate: a launch less for a layer, 4 us of 185 on an H200 and 10 us of host time.
"""

from __future__ import annotations

import mlx.core as mx

from . import _quant_cuda, _quant_group_cuda
from ._finish_cuda import COEFFICIENTS, arrive, metal_functions
from ._hyper_sources import COEFFICIENTS_HEADER
from ._kernel import Kernel, float_bits
from ._quant_group_cuda import SHARED_INPUTS, SHARED_SOURCE, Weight
from .hyper_connection import RIDER_INPUTS, RIDER_OUTPUTS, SiteSums
from .router import MOST_CHOSEN, MOST_EXPERTS, ROUTER_HEADER

_HEADER = _quant_group_cuda.HEADER + metal_functions(ROUTER_HEADER + COEFFICIENTS_HEADER)

# Short loops that all warps share, and reads of global memory first: `_enter_cuda.py` says why.
_CHOOSE = (
    """{
      constexpr int E = EXPERTS, PER = (E + 31) / 32, SLOTS = 32 * PER, BIASES = (SLOTS + 32 * W - 1) / (32 * W);
      float ahead[BIASES];
      #pragma unroll
      for (int i = 0; i < BIASES; i++) ahead[i] = bias[min((int)threadIdx.x + 32 * W * i, E - 1)];
"""
    + arrive("ROUTER_BLOCKS")
    + """
      const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
      float* const biases = part;               // [SLOTS], where the sums were
      float* const scores = biases + SLOTS;     // [M][SLOTS], at first the logits
      unsigned* const ranked = (unsigned*)scores + M * SLOTS;
      constexpr int WORD = E % 4 == 0 ? 4 : 1;  // what a thread copies at a time
      #pragma unroll 1
      for (int i = threadIdx.x; i < M * E / WORD; i += 32 * W) {
        const int row = i / (E / WORD), e = i % (E / WORD) * WORD;
        const float* const from = logits + (size_t)row * E + e;
        if (WORD == 4) copy16_async(scores + row * SLOTS + e, from);
        else scores[row * SLOTS + e] = *(const volatile float*)from;
      }
      #pragma unroll
      for (int i = 0; i < BIASES; i++)
        if (threadIdx.x + 32 * W * i < SLOTS) biases[threadIdx.x + 32 * W * i] = ahead[i];
      wait_for_copies();
      __syncthreads();
      #pragma unroll 1
      for (int i = threadIdx.x; i < M * SLOTS; i += 32 * W) {
        const int e = i % SLOTS;
        unsigned key = 0;
        if (e < E) {
          const float score = ds4_metal::router_score(scores[i]);
          scores[i] = score;
          key = ds4_metal::router_key(biases[e] + score);
        }
        ranked[i] = key;
      }
      __syncthreads();
      #pragma unroll 1
      for (int row = warp; row < M; row += W)
        ds4_metal::router_choose<E, K_CHOSEN>(
            scores + row * SLOTS, ranked + row * SLOTS, lane, __int_as_float(FACTOR_BITS),
            chosen + (size_t)row * K_CHOSEN, weights + (size_t)row * K_CHOSEN);
      return;
    }"""
)


def _source() -> str:
    first, begin, rest = SHARED_SOURCE.partition("    const bool routes")
    assert rest.count("if (routes) return;") == 1
    return first + COEFFICIENTS + begin + rest.replace("if (routes) return;", f"if (routes) {_CHOOSE}")


_kernel = Kernel(
    "shared_expert_routed_mma",
    [*SHARED_INPUTS, "bias", "tickets", *RIDER_INPUTS],
    ["logits", "a", "chosen", "weights", *RIDER_OUTPUTS],
    None,
    cuda_source=_source(),
    cuda_header=_HEADER,
    exact=False,
    family="shared_expert",
)


def takes(x: mx.array, gate: Weight, router: Weight, k: int, sums: SiteSums) -> bool:
    """Whether the launch may choose k experts for the rows of x and make their coefficients."""
    (rows, width), experts = x.shape, router[1]["codes"].shape[0]
    warps = _quant_group_cuda.warps_of([gate, router], width)
    held = 4 * -(-experts // 32) * 32 * (1 + 2 * rows)  # biases, scores and keys
    fits = 8 <= experts <= MOST_EXPERTS and k <= min(experts, MOST_CHOSEN) and held <= warps * _quant_cuda.RING
    return fits and sums.takes_kernel and sums.rows == rows


def shared_swiglu_routed(
    x, gate, up, router_x, router, bias: mx.array, sums: SiteSums, tickets: mx.array, *, k: int, factor: float,
    limit: float,
) -> list[mx.array]:  # fmt: skip
    """As `shared_expert.shared_swiglu_routed`, for up to 8 rows."""
    call, blocks, router_blocks, warps = _quant_group_cuda.shared_call(x, gate, up, router_x, router, limit)
    M, E = x.shape[0], router[1]["codes"].shape[0]
    call["inputs"] += [bias.astype(mx.float32), tickets]
    call["template"] += [("EXPERTS", E), ("K_CHOSEN", k), ("FACTOR_BITS", float_bits(factor))]
    call["template"] += [("ROUTER_BLOCKS", router_blocks)]
    call["output_shapes"] += [(M, k), (M, k)]
    call["output_dtypes"] += [mx.int32, mx.float32]
    return _kernel(
        **sums.behind(call),
        grid=((blocks + -(-M // warps)) * 32 * warps, 1, 1),
        threadgroup=(32 * warps, 1, 1),
    )
