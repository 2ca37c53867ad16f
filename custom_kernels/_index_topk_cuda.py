"""CUDA: index scores and each row's top-k in one launch.

Blocks score 128 columns of a row, as `_index_score_cuda.py` has it, and count their arrivals at the chunk of the row
that they lie in; the last one chooses. Nothing waits for another block. The scores pass through the second-level cache;
keys that sort like them, `topk.py`'s, stay in shared memory for all passes, so that a row of any width has the same
short text and a thread needs no register for each of its scores. Blocks behind what a row sees are not counted.

Estimate for an H200, one row of 16,384 scores. `topk` takes 14.5 us, and with it go a launch, its gap of 2 or 3 us and
14 us of host time. Here: a ticket 1 us; 64 KB from the second-level cache in four rounds of reads 2.5 us; 47
instructions a score on one multiprocessor 3.5 us; barriers 1 us. So 8 us behind the last score, 9 us less for a layer;
4 us, where the row sees 4,096.
"""

from __future__ import annotations

from . import _index_score_cuda, _tiles_cuda, _topk_metal
from ._finish_cuda import arrive, metal_functions

CHUNK = 1 << 14  # scores that a block chooses from, at most
_BINS = 2048  # of a digit
BYTES = 4 * (CHUNK + _BINS)  # of shared memory: keys, and how many of them have a digit

HEADER = (
    _tiles_cuda.HEADER
    + metal_functions(_topk_metal.HEADER)
    + """
namespace ds4_select {
using namespace ds4_ptx;
constexpr int THREADS = 256, WARPS = THREADS / 32, BINS = BIN_COUNT, OF_THREAD = BINS / THREADS;

// Over this lane of the warp and the ones below it.
__device__ __forceinline__ int running_sum(int x) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int below = __shfl_sync(0xffffffffu, x, (lane - by) & 31);
    if (lane >= by) x += below;
  }
  return x;
}

// Over the warps before this one, of what their last lanes hold, and over all.
__device__ __forceinline__ int2 sums_of_warps(const int* sums) {
  int2 both = make_int2(0, 0);
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) {
    if (warp < threadIdx.x / 32) both.x += sums[warp];
    both.y += sums[warp];
  }
  return both;
}

// All threads of a block write name(i) of the k best of `count` scores i, ascending, then -1. keys: as many words as
// scores; counts: BINS words. The digits of the k-th key are found from the highest on, 11, 11 and 10 bits.
template <class Name>
__device__ __forceinline__ void choose(
    const float* scores, int count, int k, unsigned* keys, int* counts, int* chosen, Name name) {
  __shared__ int sums[WARPS], totals[WARPS], found[3];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
  for (int bin = thread; bin < BINS; bin += THREADS) counts[bin] = 0;
  __syncthreads();
  constexpr int AHEAD = 16;  // reads on their way; other blocks have written what they bring
#pragma unroll 1
  for (int first = thread; first < count; first += AHEAD * THREADS) {
    float score[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      score[i] = 0.f;
      read4_fresh_if(first + i * THREADS < count, score[i], scores + first + i * THREADS);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int at = first + i * THREADS;
      if (at >= count) continue;
      const unsigned key = ds4_metal::topk_key((unsigned)__float_as_int(score[i]));
      keys[at] = key;
      if (key != 0) atomicAdd(counts + (key >> 21), 1);
    }
  }

  // Chosen are keys above `bound`, and the first `need` of those that equal it.
  unsigned prefix = 0, bound = 0;
  int need = k;
#pragma unroll 1
  for (int digit = 0; digit < 3; digit++) {
    const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, bits = digit == 2 ? 10 : 11;
    if (digit > 0) {
      for (int bin = thread; bin < BINS; bin += THREADS) counts[bin] = 0;
      __syncthreads();
#pragma unroll 8
      for (int at = thread; at < count; at += THREADS) {
        const unsigned key = keys[at];
        if (key >> (shift + bits) == prefix) atomicAdd(counts + (key >> shift & ((1u << bits) - 1)), 1);
      }
    }
    __syncthreads();
    // Thread t owns the t-th group of bins from above.
    const int top = BINS - OF_THREAD * thread;
    int here = 0;
    for (int bin = top - OF_THREAD; bin < top; bin += 4) {
      const int4 four = *(const int4*)(counts + bin);
      here += four.x + four.y + four.z + four.w;
    }
    int above = running_sum(here);
    if (lane == 31) sums[warp] = above;
    __syncthreads();
    const int2 others = sums_of_warps(sums);
    if (digit == 0 && others.y <= k) {  // all that may be chosen
      need = 0;
      break;
    }
    above += others.x - here;
    if (above < need && above + here >= need) {
      int bin = top, inside = 0;
      do {
        above += inside;
        inside = counts[--bin];
      } while (above + inside < need);
      found[0] = bin;
      found[1] = need - above;
      found[2] = inside;
    }
    __syncthreads();
    prefix = prefix << bits | found[0];
    bound = prefix << shift;
    need = found[1];
    if (need == found[2]) {  // all of this bin: the digits behind need not be known
      bound--;
      need = 0;
      break;
    }
  }

  // Warps own runs of keys, and a lane 64 neighbouring ones, as bits.
  const int words = (count + 2 * 32 * WARPS - 1) / (2 * 32 * WARPS) * 2;  // of 32 keys, of a warp; pairs
  unsigned larger[2] = {0, 0}, equal[2] = {0, 0};
#pragma unroll 4
  for (int word = 0; word < words; word += 2) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = 32 * (warp * words + word + i) + lane;
      const unsigned key = at < count ? keys[at] : 0;
      const unsigned of_larger = __ballot_sync(0xffffffffu, key > bound);
      const unsigned of_equal = __ballot_sync(0xffffffffu, need > 0 && key == bound);
      if (lane == word / 2) {
        larger[i] = of_larger;
        equal[i] = of_equal;
      }
    }
  }
  const int mine = __popc(larger[0]) + __popc(larger[1]) + ((__popc(equal[0]) + __popc(equal[1])) << 16);
  int before = running_sum(mine);
  if (lane == 31) totals[warp] = before;
  __syncthreads();
  const int2 others = sums_of_warps(totals);
  before += others.x - mine;
  int rank = before >> 16, place = (before & 0xffff) + min(rank, need);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    for (unsigned left = larger[i] | equal[i]; left != 0; left &= left - 1) {
      const int bit = __ffs(left) - 1;
      if ((equal[i] >> bit & 1) != 0 && rank++ >= need) continue;
      chosen[place++] = name(32 * (warp * words + 2 * lane + i) + bit);
    }
  }
  for (int i = (others.y & 0xffff) + min(others.y >> 16, need) + thread; i < k; i += THREADS) chosen[i] = -1;
}

}  // namespace ds4_select
""".replace("BIN_COUNT", str(_BINS))
)

_BARRIER = "    __syncthreads();\n    uint4 k["
assert _index_score_cuda.SOURCE.count(_BARRIER) == 1

# Behind the scores of one row and 128 columns, for which how much the row sees waits in shared memory: they take all
# registers.
SOURCE = (
    "    __shared__ int seen;"
    + _index_score_cuda.SOURCE.replace(_BARRIER, "    if (threadIdx.x == 0) seen = limit;\n" + _BARRIER)
    + """
    static_assert(ROWS == 1, "a block serves one row");
    const int chunks = (width + CHUNK - 1) / CHUNK, chunk = group0 / CHUNK, chunk0 = chunk * CHUNK;
    const int line = batch * length + row0;
    const int count = max(min((BLOCK > 0 ? width : seen) - chunk0, CHUNK), 0);
    const int arrivals = max((count + 127) / 128, 1);  // the first block, where the row sees nothing of the chunk
    if (group0 - chunk0 >= 128 * arrivals) return;
"""
    + arrive("arrivals", "line * chunks + chunk")
    + """
    unsigned* const sort_keys = (unsigned*)dynamic_shared();
    const int* const list = blocks + (BLOCK > 0 ? (size_t)line * blocks_shape[2] : 0);
    ds4_select::choose(
        scores + (size_t)line * width + chunk0, count, K, sort_keys, (int*)(sort_keys + CHUNK),
        index + ((size_t)line * chunks + chunk) * K, [&](int at) {
          constexpr int size = BLOCK > 0 ? BLOCK : 1;
          if (BLOCK == 0 || chunks > 1) return chunk0 + at;  // of several chunks the next launch knows the entries
          return list[at / size] * size + at % size;
        });
"""
)
