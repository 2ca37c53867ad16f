"""CUDA body of sparse attention for few query rows: thread blocks share the entries, and the last one finishes.

A few rows are bound by latencies, not by memory: the fewer steps follow each other, the better. Scores, which need all
channels but no order among entries, are made by a thread block for each 64 entries. It leaves them in global memory,
which here is the second-level cache, and takes a ticket. The block that draws the last ticket of its heads finds all
scores there: it does the softmax of all entries at once and then the values, the one part that has an order. Nobody
waits for another block, so nothing can hang, whatever else runs. Values are split by channels (`SLICES`), and each
slice has blocks and tickets of its own that make the same scores. All sums have the order of the body for many rows.

Estimates, on an H200, 64 heads and 640 entries. One row, 160 blocks: list, rows, product and ticket 3 us, scores and
softmax 1 us, 160 KB of values 1.5 us; with the launch 8 us. Six rows, 240 blocks: 15 MB from the second-level cache for
the scores 4 us, 320 KB of values for each of 24 finishing blocks 3 us; with the rest 12 us.
"""

from __future__ import annotations

from ._sparse_attention_cuda import SOURCES

MOST = 8  # query rows
HEADS = 16  # rows of a product
_MOST_SLICES = 4
_BLOCKS = 10  # of 64 entries whose softmax is made at once: a window of 128 and 512 selected entries
_LISTED = 64 * _BLOCKS + 128  # entries that 256 threads look up, whole times
_STRIDE = 64 * _BLOCKS + 8  # eight rows of probabilities begin in different banks
# Of the rows of a list, the probabilities of 32 heads and a ring of values: two such blocks fit a multiprocessor of the
# data-center cards.
BYTES = 8 * _LISTED + 2 * HEADS * _STRIDE * 2 + (4 << 14)


def split(rows: int, heads: int, width: int) -> tuple[int, int]:
    """How many tiles of 16 heads a block takes, and slices of the channels: one row shall make blocks enough for all
    multiprocessors, and several not read the same entries more often than that needs. Both change no bit."""
    slices = _MOST_SLICES if rows <= 3 else 2
    return 1 if rows == 1 or heads <= HEADS else 2, max(1, min(slices, width // 128))


def ticket_count(rows: int, heads: int) -> int:
    """How many tickets a launch may need; 4 at least, as MLX keeps arrays of up to 8 bytes in the host's memory."""
    return max(4, rows * -(-heads // HEADS) * _MOST_SLICES) if rows <= MOST else 4


SOURCE = (
    """
    // 8 warps own MT tiles of 16 heads of one query row, and a slice of its channels. First, for one block of 64
    // entries, warp w makes scores of 16 of them, from 16 (w / 2) on, out of every second 32 channels, from 32 (w % 2)
    // on. Then warp w owns heads 2 w and 2 w + 1 of each tile for the softmax, and an eighth of the slice for values.
    using namespace ds4_tiles;
    constexpr int D = 64 * PAIRS, WIDTH = D / SLICES, HEADS = 16 * MT, BLOCKS = BLOCK_COUNT, LISTED = LISTED_COUNT;
    constexpr int CHUNKS = WIDTH / 8, TILES = (CHUNKS + 7) / 8;     // octets of channels of the slice, and of a warp
    constexpr int STRIDE = 64 * BLOCKS + 8, RING = BYTE_COUNT - LISTED * 8 - HEADS * STRIDE * 2;
    constexpr int STAGE = WIDTH > 128 ? 32 : 64, ROOM = RING / (STAGE * WIDTH * 2);
    constexpr int STAGES = ROOM < 5 ? ROOM : 5;                     // of the ring, of STAGE entries each
    constexpr int OF_TILE = 16 * 65;                                // 16 heads' scores and their maxima
    const bf16** const listed = (const bf16**)dynamic_shared();     // [LISTED]: the rows of a list, or null
    bf16* const chances = (bf16*)(listed + LISTED);                 // [HEADS][STRIDE]
    bf16* const ring = chances + HEADS * STRIDE;                    // [STAGES][STAGE][WIDTH]; before it is used:
    uint4* const queries = (uint4*)ring;                            // [HEADS][D / 8]
    float* const partial = (float*)(ring + HEADS * D);              // [2][HEADS][72]
    __shared__ float fades[BLOCKS][HEADS], peaks[HEADS], totals[HEADS], denominators[HEADS];
    __shared__ bool is_last;
"""
    + SOURCES
    + """
    const int count = near_count + far_count, blocks = gridDim.x, block = blockIdx.x;
    const int slice = blockIdx.y % SLICES, head0 = blockIdx.y / SLICES * HEADS, row = blockIdx.z;
    const int batch = gridDim.z == length ? 0 : row / length, ticket = row * gridDim.y + blockIdx.y;
    const size_t out = ((size_t)row * heads + head0) * D;
    const size_t at_turn = (size_t)(row - batch * length) * TURN;
    // Words 2 w and 2 w + 1 of octet t of 32 channels c, of heads g and g + 8 of a tile, lie as a product takes them,
    // and where no two that are written together share a bank.
    const auto place = [](int tile, int c, int w, int g, int t) {
      return ((tile * (D / 32) + c) * 2 + w) * 32 + (4 * g + t ^ (c & 1) << 2);
    };
    int id[LISTED / 256];
    const auto read_list = [&](int first) {
      const int* const of_near = near_list + (size_t)row * near_count;
      const int* const of_far = far_list + (size_t)row * far_count - near_count;
      #pragma unroll
      for (int n = 0; n < LISTED / 256; n++) {
        const int p = 64 * first + threadIdx.x + 256 * n;
        id[n] = p < count ? (p < near_count ? of_near : of_far)[p] : -1;
      }
    };
    const auto find_rows = [&](int first) {
      const bf16* const of_near = near + (size_t)batch * near_rows * D;
      const bf16* const of_far = far + (size_t)batch * far_rows * D;
      const bf16* const of_recent = SPLIT ? recent + ((long long)batch * recent_rows - start) * D : of_far;
      #pragma unroll
      for (int n = 0; n < LISTED / 256; n++) {
        const int i = threadIdx.x + 256 * n;
        const bool is_near = 64 * first + i < near_count;
        const bool there = id[n] >= 0 && id[n] < (is_near ? near_rows : start + recent_rows);
        const bf16* const from = is_near ? of_near : SPLIT && id[n] >= start ? of_recent : of_far;
        listed[i] = there ? from + (long long)id[n] * D : nullptr;
      }
    };

    // ---- scores of one block. No read is put off behind a barrier, of which __syncwarp() is one too.
    read_list(block / BLOCKS * BLOCKS);
    constexpr int AT_ONCE = 256 / (D / 8), TURNS = (HEADS / 2 + AT_ONCE - 1) / AT_ONCE;  // pairs of heads g and g + 8
    const int chunk = threadIdx.x % (D / 8), first_head = threadIdx.x / (D / 8);
    const int first_pair = 4 * chunk - (D / 2 - TURN);
    uint4 word[TURNS][2] = {};
    #pragma unroll
    for (int n = 0; n < 2 * TURNS; n++) {
      const int two = first_head + AT_ONCE * (n / 2), head = two / 8 * 16 + two % 8 + n % 2 * 8;
      const bf16* const from = q + out + head * D + 8 * chunk;
      if (head < HEADS && head0 + head < heads) word[n / 2][n % 2] = *(const uint4*)from;
    }
    float c[4] = {}, s[4] = {};
    #pragma unroll
    for (int j = 0; j < 4; j++) {
      if (!TURN_QUERIES || first_pair + j < 0) continue;
      c[j] = cosine[at_turn + first_pair + j];
      s[j] = sine[at_turn + first_pair + j];
    }
    __syncwarp();
    find_rows(block / BLOCKS * BLOCKS);
    __syncthreads();
    const bf16* const* const own = listed + block % BLOCKS * 64;
    const int entry = warp / 2 * 16, odd = warp & 1;
    uint4 k[2][PAIRS] = {};
    #pragma unroll
    for (int j = 0; j < 2; j++) {
      const bf16* const row = own[entry + 8 * j + g];
      #pragma unroll
      for (int c = 0; c < PAIRS; c++) read16_fresh_if(row != nullptr, k[j][c], row + 32 * odd + 8 * t + 64 * c);
    }
    #pragma unroll
    for (int n = 0; n < TURNS; n++) {
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        bf16* const x = (bf16*)&word[n][i];
        if (TURN_QUERIES && first_pair + 3 >= 0) {
          #pragma unroll
          for (int j = 0; j < 4; j++)
            if (first_pair + j >= 0) turn(x[2 * j], x[2 * j + 1], c[j], s[j]);
        }
      }
      const int two = first_head + AT_ONCE * n;
      if (HEADS / 2 % AT_ONCE > 0 && two >= HEADS / 2) continue;
      const uint4 a = word[n][0], b = word[n][1];
      queries[place(two / 8, chunk / 4, 0, two % 8, chunk % 4)] = make_uint4(a.x, b.x, a.y, b.y);
      queries[place(two / 8, chunk / 4, 1, two % 8, chunk % 4)] = make_uint4(a.z, b.z, a.w, b.w);
    }
    __syncthreads();
    {
      float dots[MT][2][4] = {};
      #pragma unroll
      for (int c = 0; c < PAIRS; c++) {
        #pragma unroll
        for (int m = 0; m < MT; m++) {
          const uint4 a = queries[place(m, 2 * c + odd, 0, g, t)], b = queries[place(m, 2 * c + odd, 1, g, t)];
          #pragma unroll
          for (int j = 0; j < 2; j++) {  // as ds4_tiles::product does
            mma(dots[m][j], a.x, a.y, a.z, a.w, k[j][c].x, k[j][c].y);
            mma(dots[m][j], b.x, b.y, b.z, b.w, k[j][c].z, k[j][c].w);
          }
        }
      }
      #pragma unroll
      for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int j = 0; j < 2; j++)
          #pragma unroll
          for (int i = 0; i < 4; i++)
            partial[(odd * HEADS + 16 * m + g + 8 * (i >> 1)) * 72 + entry + 8 * j + 2 * t + (i & 1)] = dots[m][j][i];
    }
    __syncthreads();
    #pragma unroll
    for (int m = 0; m < MT; m++) {
      float* const to = scores + ((size_t)(ticket * blocks + block) * MT + m) * OF_TILE;
      uint4 both;  // of each head, the scores of entries lane and lane + 32
      float* const s = (float*)&both;
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        const int e = lane + 32 * (i & 1), at = (16 * m + 2 * warp + (i >> 1)) * 72 + e;
        s[i] = own[e] ? (partial[at] + partial[at + HEADS * 72]) * SCALE : NO_SCORE;
      }
      ((uint4*)to)[threadIdx.x] = both;
      const float a = fmaxf(s[0], s[1]), b = fmaxf(s[2], s[3]);
      float most = fmaxf(lane < 16 ? a : b, __shfl_xor_sync(0xffffffffu, lane < 16 ? b : a, 16));
      #pragma unroll
      for (int i = 8; i > 0; i >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
      if ((lane & 15) == 0) to[1024 + 2 * warp + (lane >> 4)] = most;
    }

    // ---- the last block of these heads goes on. The tickets are an input, because MLX knows no output in place and no
    // state of a kernel; the launch leaves them as it found them, so that the array's value does not change.
    __syncthreads();
    int* const drawn = (int*)tickets + ticket;
    if (threadIdx.x == 0) is_last = draw_ticket(drawn) == blocks - 1;
    __syncthreads();
    if (!is_last) return;
    if (threadIdx.x == 0) *drawn = 0;

    float acc[MT][TILES][4] = {};
    const bool has_channels = TILES * 8 == CHUNKS || TILES * warp < CHUNKS;
    const int half = lane >> 4, b = lane & 15;  // of its warp's two heads and of the blocks, what a lane has of them
    for (int first = 0; first < blocks; first += BLOCKS) {
      const int here = min(BLOCKS, blocks - first);
      if (blocks > BLOCKS) {
        read_list(first);
        __syncthreads();
        find_rows(first);
        __syncthreads();
      }
      uint4 both[BLOCKS] = {};
      float most;
      const auto read_scores = [&](int m) {
        const float* const from = scores + ((size_t)(ticket * blocks + first) * MT + m) * OF_TILE;
        most = NO_SCORE;
        read4_fresh_if(b < here, most, from + b * MT * OF_TILE + 1024 + 2 * warp + half);
        #pragma unroll
        for (int i = 0; i < BLOCKS; i++)
          read16_fresh_if(i < here, both[i], from + i * MT * OF_TILE + 4 * threadIdx.x);
      };
      const auto keep = [](int row, int chunk) {
        return row * CHUNKS + (chunk ^ (row & (CHUNKS < 8 ? CHUNKS - 1 : 7)));
      };
      const auto send = [&](int stage, int slot) {
        constexpr int AT_ONCE = 256 / CHUNKS;  // entries; a thread has one chunk of each
        uint4* const to = (uint4*)ring + slot * STAGE * CHUNKS;
        const int c = threadIdx.x % CHUNKS;
        constexpr int COPIES = (STAGE + AT_ONCE - 1) / AT_ONCE;
        const bf16* from[COPIES];
        #pragma unroll
        for (int n = 0; n < COPIES; n++) {
          const int e = threadIdx.x / CHUNKS + AT_ONCE * n;
          from[n] = STAGE % AT_ONCE == 0 || e < STAGE ? listed[STAGE * stage + e] : nullptr;
        }
        #pragma unroll
        for (int n = 0; n < COPIES; n++) {  // zeros for no row: a probability of 0 times what lay there may be NaN
          const int e = threadIdx.x / CHUNKS + AT_ONCE * n;
          const bf16* const there = from[n] ? from[n] : far;
          if (STAGE % AT_ONCE == 0 || e < STAGE)
            copy16_async_or_zeros(to + keep(e, c), there + slice * WIDTH + 8 * c, from[n] != nullptr);
        }
      };
      const int stages = here * 64 / STAGE;
      read_scores(0);
      __syncwarp();  // in front of the values, for which there is time
      #pragma unroll
      for (int stage = 0; stage < STAGES - 1; stage++) {
        if (stage < stages) send(stage, stage);
        commit_copies();
      }

      // ---- the softmax of all these blocks
      #pragma unroll 1
      for (int m = 0; m < MT; m++) {
        if (m > 0) read_scores(m);
        const int head = 16 * m + 2 * warp + half;
        const float peak = first > 0 ? peaks[head] : -1e30f;
        float raised = fmaxf(peak, most), total = first > 0 ? totals[head] : 0.f;
        #pragma unroll
        for (int i = 1; i < 16; i *= 2) {
          const float other = __shfl_sync(0xffffffffu, raised, lane - i & 31);
          if (b >= i) raised = fmaxf(raised, other);
        }
        const float before = __shfl_sync(0xffffffffu, raised, lane - 1 & 31);
        const float fade = expf((b > 0 ? before : peak) - raised);
        if (b < here) fades[b][head] = fade;
        float sum[16];  // of both heads, then of lanes 8, 4, 2 and 1 apart: as warp_sum, but of all blocks together
        bf16* const to = chances + (16 * m + 2 * warp) * STRIDE + lane;
        #pragma unroll
        for (int two = 0; two < BLOCKS; two += 2) {
          sum[two] = sum[two + 1] = 0.f;
          if (two >= here) continue;
          #pragma unroll
          for (int i = two; i < two + 2; i++) {
            const float low = __shfl_sync(0xffffffffu, raised, i), high = __shfl_sync(0xffffffffu, raised, 16 + i);
            const float p0 = expf(__int_as_float(both[i].x) - low), p1 = expf(__int_as_float(both[i].y) - low);
            const float p2 = expf(__int_as_float(both[i].z) - high), p3 = expf(__int_as_float(both[i].w) - high);
            to[64 * i] = __float2bfloat16(p0);
            to[64 * i + 32] = __float2bfloat16(p1);
            to[STRIDE + 64 * i] = __float2bfloat16(p2);
            to[STRIDE + 64 * i + 32] = __float2bfloat16(p3);
            const float mine = half ? p2 + p3 : p0 + p1, others = half ? p0 + p1 : p2 + p3;
            sum[i] = mine + __shfl_xor_sync(0xffffffffu, others, 16);
          }
        }
        #pragma unroll
        for (int step = 3; step >= 0; step--) {
          const int apart = 1 << step;
          #pragma unroll
          for (int i = 0; i < 8; i++) {
            if (i >= apart) continue;
            const bool two = i + apart < BLOCKS, up = two && (lane & apart);
            const float mine = up ? sum[i + apart] : sum[i], others = two && !up ? sum[i + apart] : sum[i];
            sum[i] = mine + __shfl_xor_sync(0xffffffffu, others, apart);
          }
        }
        #pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
          const float old = __shfl_sync(0xffffffffu, fade, 16 * half + i);
          const float more = __shfl_sync(0xffffffffu, sum[0], 16 * half + i);
          if (i < here) total = fmaf(total, old, more);
        }
        raised = __shfl_sync(0xffffffffu, raised, 16 * half + here - 1);
        if (b == 0) {
          peaks[head] = raised;
          totals[head] = total;
          denominators[head] = total + expf(sinks[min(head0 + head, heads - 1)] - raised);
        }
      }

      // ---- the values, 64 entries after 64
      int slot = 0;
      for (int stage = 0; stage < stages; stage++) {
        wait_for_copies_but<STAGES - 2>();
        __syncthreads();
        const uint4* const values = (const uint4*)ring + slot * STAGE * CHUNKS;
        if (has_channels && STAGE * stage % 64 == 0) {
          #pragma unroll
          for (int m = 0; m < MT; m++) {
            const float low = fades[STAGE * stage / 64][16 * m + g], high = fades[STAGE * stage / 64][16 * m + g + 8];
            #pragma unroll
            for (int n = 0; n < TILES; n++) {
              acc[m][n][0] *= low;
              acc[m][n][1] *= low;
              acc[m][n][2] *= high;
              acc[m][n][3] *= high;
            }
          }
        }
        #pragma unroll
        for (int e = 0; e < STAGE; e += 32) {
          if (!has_channels) continue;
          unsigned a[MT][8];
          #pragma unroll
          for (int m = 0; m < MT; m++) {
            const bf16* const from = chances + (16 * m + (lane & 15)) * STRIDE + STAGE * stage + e + 8 * half;
            fragment(a[m][0], a[m][1], a[m][2], a[m][3], from);
            fragment(a[m][4], a[m][5], a[m][6], a[m][7], from + 16);
          }
          #pragma unroll
          for (int n = 0; n < TILES; n++) {
            unsigned v0, v1, v2, v3;
            transposed(v0, v1, v2, v3, (const bf16*)(values + keep(e + lane, TILES * warp + n)));
            #pragma unroll
            for (int m = 0; m < MT; m++) {
              mma(acc[m][n], a[m][0], a[m][1], a[m][2], a[m][3], v0, v1);
              mma(acc[m][n], a[m][4], a[m][5], a[m][6], a[m][7], v2, v3);
            }
          }
        }
        const int before = slot > 0 ? slot - 1 : STAGES - 1;  // which all warps are done with
        if (stage + STAGES - 1 < stages) send(stage + STAGES - 1, before);
        commit_copies();
        slot = slot + 1 < STAGES ? slot + 1 : 0;
      }
    }
    if (!has_channels) return;
    #pragma unroll
    for (int n = 0; n < TILES; n++) {
      const int channel = slice * WIDTH + 8 * (TILES * warp + n) + 2 * t, pair = channel / 2 - (D / 2 - TURN);
      const bool turns = TURN > 0 && pair >= 0;
      const float c = turns ? cosine[at_turn + pair] : 0.f, s = turns ? sine[at_turn + pair] : 0.f;
      #pragma unroll
      for (int r = 0; r < 2 * MT; r++) {
        const int head = g + 8 * r;
        if (head0 + head >= heads) continue;
        bf16 x = __float2bfloat16(acc[r / 2][n][r % 2 * 2] / denominators[head]);
        bf16 y = __float2bfloat16(acc[r / 2][n][r % 2 * 2 + 1] / denominators[head]);
        if (turns) turn(x, y, c, -s);
        o[out + (size_t)head * D + channel] = x;
        o[out + (size_t)head * D + channel + 1] = y;
      }
    }
"""
)
for _word, _number in {"BLOCK_COUNT": _BLOCKS, "BYTE_COUNT": BYTES, "LISTED_COUNT": _LISTED}.items():
    SOURCE = SOURCE.replace(_word, str(_number))
