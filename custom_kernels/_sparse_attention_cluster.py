"""CUDA body of sparse attention for a few query rows: a row's list in eight parts, the blocks of a cluster.

One row has few heads to share out, and one block must read all that it lists. Here a cluster of eight blocks owns up to
16 heads of a query row, and each of its blocks an eighth of the list, all of whose rows are on their way at once. The
blocks exchange the maxima of 16 entries at a time through their shared memory, so that each probability is rounded
behind the same running maximum as in one block, and then their sums of values, an eighth of the result for each.

Estimate, on an H200: 640 entries of 1 KB are 80 KB a block, 1 us from memory behind two waits of 1 us, and three waits
for the cluster: 8 to 10 us for one row, cold, where one block a head group took 50.
"""

from __future__ import annotations

import mlx.core as mx

from . import _tiles_cuda
from ._kernel import Kernel, float_bits

PARTS = 8  # blocks of a cluster: the most that every Hopper card takes
_MOST = 80  # entries of a part: two blocks fit a multiprocessor
_HEADS = (16, 8, 4, 2, 1)


def _bytes(D: int, entries: int) -> int:
    """Shared memory as the body lays it out."""
    groups = entries // 16
    rows = max(2 * D * entries, 64 * (D + 8))
    return (
        rows + 32 * D + 64 * (entries + 4) + 32 * (entries + 8) + 64 * (PARTS * groups + 2 * groups + 2) + 4 * entries
    )


_SOURCE = """
    // Block p of a cluster owns entries p E .. p E + E - 1 of a query row's list, for HG heads. Warp w copies rows w,
    // w + 8, .. of them, makes the scores of entries 8 w .. 8 w + 7 (and 64 on), the probabilities of heads 2 w and
    // 2 w + 1, and the sums of an eighth of the channels.
    using namespace ds4_tiles;
    constexpr int D = 64 * PAIRS, CHUNKS = D / 8, GROUPS = E / 16, STRIDE = D + 8, PARTS = 8;
    const float FLOOR = -1e30f;
    // Rows of E entries; later the block's sums [16][STRIDE].
    bf16* const entries = (bf16*)dynamic_shared();
    float* const sums = (float*)entries;
    bf16* const queries = entries + (E * D > 32 * STRIDE ? E * D : 32 * STRIDE);
    float* const scores = (float*)(queries + 16 * D);        // [16][E + 4]
    bf16* const chances = (bf16*)(scores + 16 * (E + 4));    // [16][E + 8]
    float* const peaks = (float*)(chances + 16 * (E + 8));   // [PARTS * GROUPS][16], of the whole list
    float* const raised = peaks + 16 * PARTS * GROUPS;       // [GROUPS][16]: the maximum that an entry stands behind
    float* const fades = raised + 16 * GROUPS;               // [GROUPS][16]: from there to the last one
    float* const last = fades + 16 * GROUPS;                 // [16]
    float* const totals = last + 16;                         // [16], of the block
    int* const present = (int*)(totals + 16);                // [E]
    // 16 bytes of a row lie where no two of those that are read together share a bank.
    const auto place = [](int row, int chunk) { return row * CHUNKS + (chunk ^ ((row & 1) << 2 | (row >> 1 & 3))); };

    cluster_arrive();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, part = blockIdx.x % PARTS;
    const int length = q_shape[1], heads = sinks_shape[0], item = blockIdx.x / PARTS;
    const int row = item / (heads / HG), head0 = item % (heads / HG) * HG, batch = row / length;
    const int near_rows = near_shape[1], near_count = TWO ? near_list_shape[2] : 0;
    const int far_rows = far_shape[1], far_count = far_list_shape[2], recent_rows = SPLIT ? recent_shape[1] : 0;
    const size_t out = ((size_t)row * heads + head0) * D;

    // The part's list, an entry a lane, and its rows.
    const int own = warp + 8 * lane, p = part * E + own;
    int listed = -1;
    if (own < E) {
      if (p < near_count) listed = near_list[(size_t)row * near_count + p];
      else if (p < near_count + far_count) listed = far_list[(size_t)row * far_count + p - near_count];
    }
    const int start = SPLIT ? max(min(base[0], far_rows), 0) : far_rows;  // of the recent rows
    if (listed < 0 || listed >= (p < near_count ? near_rows : start + recent_rows)) listed = -1;
    if (own < E) present[own] = listed >= 0;
    #pragma unroll
    for (int i = 0; i < E / 8; i++) {
      const int e = warp + 8 * i, id = __shfl_sync(0xffffffffu, listed, i);
      const bool is_near = part * E + e < near_count, is_recent = SPLIT && !is_near && id >= start;
      const bf16* const from = (is_near ? near : is_recent ? recent : far)
          + ((size_t)batch * (is_near ? near_rows : is_recent ? recent_rows : far_rows)
             + (is_recent ? id - start : id < 0 ? 0 : id)) * D;
      for (int c = lane; c < CHUNKS; c += 32) {
        uint4* const to = (uint4*)entries + place(e, c);
        if (id >= 0) copy16_async(to, from + 8 * c);
        else *to = make_uint4(0, 0, 0, 0);  // a probability of 0 times what lay there may be NaN
      }
    }
    for (int i = threadIdx.x; i < 16 * CHUNKS; i += 256) {
      const int head = i / CHUNKS, c = i % CHUNKS;
      uint4 word = make_uint4(0, 0, 0, 0);
      if (head < HG) word = octet(q + out + (size_t)head * D + 8 * c, true);
      if (TURN_QUERIES && head < HG && 8 * c + 8 > D - 2 * TURN) {
        bf16* const x = (bf16*)&word;
        for (int j = 0; j < 4; j++) {
          const int pair = 4 * c + j - (D / 2 - TURN);
          if (pair < 0) continue;
          const float cs = cosine[row % length * TURN + pair], sn = sine[row % length * TURN + pair];
          const float a = __bfloat162float(x[2 * j]), b = __bfloat162float(x[2 * j + 1]);
          x[2 * j] = __float2bfloat16(a * cs - b * sn);
          x[2 * j + 1] = __float2bfloat16(a * sn + b * cs);
        }
      }
      ((uint4*)queries)[place(head, c)] = word;
    }
    wait_for_copies();
    __syncthreads();

    for (int tile = warp; tile < E / 8; tile += 8) {
      float dots[2][4] = {};
      #pragma unroll
      for (int c = 0; c < 2 * PAIRS; c++) {
        const uint4* const of_query = (const uint4*)queries;
        product(dots[c & 1], of_query[place(g, 4 * c + t)], of_query[place(g + 8, 4 * c + t)],
                ((const uint4*)entries)[place(8 * tile + g, 4 * c + t)]);
      }
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        const int e = 8 * tile + 2 * t + (i & 1), head = g + 8 * (i >> 1);
        scores[head * (E + 4) + e] =
            present[e] ? (dots[0][i] + dots[1][i]) * __int_as_float(SCALE_BITS) : __int_as_float(0xff800000);
      }
    }
    __syncthreads();
    cluster_wait();  // all blocks of the cluster have begun
    for (int i = threadIdx.x; i < 16 * GROUPS; i += 256) {
      const int head = i & 15, group = i >> 4;
      float peak = FLOOR;
      for (int e = 0; e < 16; e++) peak = fmaxf(peak, scores[head * (E + 4) + 16 * group + e]);
      for (int block = 0; block < PARTS; block++)
        *in_block(peaks + 16 * (part * GROUPS + group) + head, block) = peak;
    }
    cluster_arrive();
    cluster_wait();
    // The reference takes blocks of 64 entries in order: an entry's maximum is that of all blocks up to its own.
    for (int i = threadIdx.x; i < 16 * GROUPS; i += 256) {
      const int head = i & 15, group = i >> 4, behind = ((part * GROUPS + group) | 3) + 1;
      float at = FLOOR, most = FLOOR;
      #pragma unroll
      for (int j = 0; j < PARTS * GROUPS; j++) {
        most = fmaxf(most, peaks[16 * j + head]);
        if (j < behind) at = most;
      }
      raised[i] = at;
      fades[i] = expf(at - most);
      if (group == 0) last[head] = most;
    }
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int head = 2 * warp + i;
      float total = 0.f;
      #pragma unroll
      for (int e0 = 0; e0 < E; e0 += 32) {
        const int e = e0 + lane;
        if (e < E) {
          const float chance = expf(scores[head * (E + 4) + e] - raised[e / 16 * 16 + head]);
          chances[head * (E + 8) + e] = __float2bfloat16(chance);
          total = fmaf(chance, fades[e / 16 * 16 + head], total);
        }
      }
      total = warp_sum(total);
      if (lane == 0) totals[head] = total;
    }
    __syncthreads();

    float acc[PAIRS][4] = {};
    #pragma unroll
    for (int step = 0; step < GROUPS; step++) {
      const bf16* const low = chances + g * (E + 8) + 16 * step + 2 * t;
      const bf16* const high = low + 8 * (E + 8);
      const unsigned a0 = *(const unsigned*)low, a1 = *(const unsigned*)high;
      const unsigned a2 = *(const unsigned*)(low + 8), a3 = *(const unsigned*)(high + 8);
      const float fade_low = fades[16 * step + g], fade_high = fades[16 * step + g + 8];
      #pragma unroll
      for (int n = 0; n < PAIRS; n++) {
        unsigned b0, b1;
        transposed(b0, b1, entries + 8 * place(16 * step + (lane & 15), PAIRS * warp + n));
        float c[4];
        mma_new(c, a0, a1, a2, a3, b0, b1);
        #pragma unroll
        for (int i = 0; i < 4; i++) acc[n][i] = fmaf(c[i], i < 2 ? fade_low : fade_high, acc[n][i]);
      }
    }
    __syncthreads();  // sums lie where the entries did
    #pragma unroll
    for (int n = 0; n < PAIRS; n++) {
      const int channel = 8 * (PAIRS * warp + n) + 2 * t;
      *(float2*)&sums[g * STRIDE + channel] = make_float2(acc[n][0], acc[n][1]);
      *(float2*)&sums[(g + 8) * STRIDE + channel] = make_float2(acc[n][2], acc[n][3]);
    }
    cluster_arrive();
    cluster_wait();

    // Each block adds up an eighth of the result, in the order of the parts.
    constexpr int SHARE = HG * D / PARTS;
    for (int i = 4 * threadIdx.x; i < SHARE; i += 1024) {
      const int at = part * SHARE + i, head = at / D, channel = at % D;
      float v[4] = {0.f, 0.f, 0.f, 0.f}, denominator = 0.f;
      #pragma unroll
      for (int block = 0; block < PARTS; block++) {
        const float4 w = *(const float4*)in_block(sums + head * STRIDE + channel, block);
        v[0] += w.x, v[1] += w.y, v[2] += w.z, v[3] += w.w;
        denominator += *in_block(totals + head, block);
      }
      denominator += expf(sinks[head0 + head] - last[head]);
      bf16 x[4];
      #pragma unroll
      for (int j = 0; j < 4; j++) x[j] = __float2bfloat16(v[j] / denominator);
      #pragma unroll
      for (int j = 0; j < 2; j++) {
        const int pair = channel / 2 + j - (D / 2 - TURN);
        if (TURN > 0 && pair >= 0) {
          const float cs = cosine[row % length * TURN + pair], sn = -sine[row % length * TURN + pair];
          const float a = __bfloat162float(x[2 * j]), b = __bfloat162float(x[2 * j + 1]);
          x[2 * j] = __float2bfloat16(a * cs - b * sn);
          x[2 * j + 1] = __float2bfloat16(a * sn + b * cs);
        }
      }
      for (int j = 0; j < 4; j++) o[out + (size_t)head * D + channel + j] = x[j];
    }
    cluster_arrive();
    cluster_wait();  // others still read this block's sums
"""

_kernel = Kernel(
    "sparse_attention_cluster",
    ["q", "near", "near_list", "far", "far_list", "recent", "base", "sinks", "cosine", "sine"],
    ["o"],
    None,
    cuda_source=_SOURCE,
    cuda_header=_tiles_cuda.HEADER,
    cuda_bounds=(256, 2),
    cuda_cluster=PARTS,
    shared_memory=_bytes(512, _MOST),
    exact=False,
    family="sparse_attention",
)


def takes(rows: int, entries: int) -> bool:
    """Whether `attend` is for this many query rows, each with a list of this many entries."""
    return rows <= 8 and entries <= PARTS * _MOST


def attend(inputs: list[mx.array], template: list[tuple[str, int | bool]], scale: float, entries: int) -> mx.array:
    """One launch; `inputs` and the rest of `template` as `sparse_attention` gives them to its own kernel."""
    q, sinks = inputs[0], inputs[7]
    H = sinks.shape[0]
    heads = next(h for h in _HEADS if H % h == 0)
    return _kernel(
        inputs=inputs,
        template=[("HG", heads), ("E", -(-entries // (16 * PARTS)) * 16), *template, ("SCALE_BITS", float_bits(scale))],
        grid=(q.shape[0] * q.shape[1] * (H // heads) * PARTS * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[q.shape],
        output_dtypes=[mx.bfloat16],
    )[0]
