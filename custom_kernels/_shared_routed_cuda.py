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
from ._quant_group_cuda import SHARED_INPUTS, SHARED_SOURCE
from .hyper_connection import RIDER_INPUTS, RIDER_OUTPUTS, SiteSums
from .router import MOST_CHOSEN, MOST_EXPERTS, ROUTER_HEADER

_HEADER = _quant_group_cuda.HEADER + metal_functions(ROUTER_HEADER + COEFFICIENTS_HEADER)

_CHOOSE = (
    """{
      constexpr int E = EXPERTS, PER = (E + 31) / 32;
"""
    + arrive("ROUTER_BLOCKS")
    + """
      const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
      float* const scores = part + warp * (64 * PER);  // where the sums were
      unsigned* const ranked = (unsigned*)scores + 32 * PER;
      static_assert(64 * PER * 4 <= RING, "a warp's ring holds its scores and keys");
      for (int row = warp; row < M; row += W) {
        for (int e = lane; e < 32 * PER; e += 32) {
          unsigned key = 0;
          if (e < E) {
            const float b = bias[e];
            const float score = ds4_metal::router_score(*(const volatile float*)(logits + (size_t)row * E + e));
            scores[e] = score;
            key = ds4_metal::router_key(b + score);
          }
          ranked[e] = key;
        }
        __syncwarp();
        ds4_metal::router_choose<E, K_CHOSEN>(
            scores, ranked, lane, __int_as_float(FACTOR_BITS), chosen + (size_t)row * K_CHOSEN,
            weights + (size_t)row * K_CHOSEN);
        __syncwarp();
      }
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


def takes(rows: int, experts: int, k: int, sums: SiteSums) -> bool:
    """Whether the launch may choose k of this many experts for the rows and make their coefficients."""
    # A warp's ring holds two words an expert.
    most = min(MOST_EXPERTS, _quant_cuda.RING // 8 // 32 * 32)
    return 8 <= experts <= most and k <= min(experts, MOST_CHOSEN) and sums.takes_kernel and sums.rows == rows


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
