"""CUDA body of sparse attention for few query rows: thread blocks share the entries, and the last one finishes.

A few rows are bound by latencies, not by memory: the fewer steps follow each other, the better. Scores, which need all
channels but no order among entries, are made by a thread block for each 64 entries. It leaves them in global memory,
which here is the second-level cache, and takes a ticket. The block that draws the last ticket of its heads finds all
scores there and goes through them once more: the softmax of 64 entries beside the values of the 64 before. Nobody
waits for another block, so nothing can hang, whatever else runs. Values are split by channels (`SLICES`), and each
slice has blocks and tickets of its own that make the same scores. All sums have the order of the body for many rows.

A launch finds the instruction caches cold, and all multiprocessors ask for the same lines of 8 instructions, some 150
to 400 cycles each on an H200: a block pays for the length of its text. So whatever can be is a short loop over shared
memory, which copies fill that wait for nothing, and each text is there once: the loop of the finishing block begins
early enough to fill its own ring.

Estimates, on an H200, 64 heads and 640 entries. One row, 160 blocks: 380 instructions up to the ticket and two reads
that follow each other, 7 us; 420 in the last block, of which a turn of 210 for each 64 entries takes 500 cycles (the
reading of 160 KB would take half of that), 5 us; with the launch 14 us. Six rows, 240 blocks: 440 and 530 instructions,
320 KB of values for each of 24 last blocks in 20 turns; 23 us.
"""

from __future__ import annotations

from ._sparse_attention_cuda import SOURCES

MOST = 8  # query rows
MOST_ENTRIES = 1024  # of a row's lists: a window of 128 and 512 selected entries are 640
HEADS = 16  # rows of a product
_MOST_SLICES = 4
# Where the rows of a list lie and what they are; 64 rows of 512 channels and the queries of 32 heads, then rings of
# values and scores: two such blocks fit a multiprocessor of the data-center cards.
BYTES = (8 + 4) * MOST_ENTRIES + (64 + 2 * HEADS) * 512 * 2


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
    // on. In the last block LANES lanes own a head for the softmax, and warp w an eighth of the slice for values.
    using namespace ds4_tiles;
    constexpr int D = 64 * PAIRS, WIDTH = D / SLICES, HEADS = 16 * MT, LANES = 16 / MT;
    constexpr int CHUNKS = WIDTH / 8, TILES = (CHUNKS + 7) / 8;       // octets of channels of the slice, and of a warp
    constexpr int STAGE = MT * WIDTH > 128 ? 32 : 64, PARTS = 64 / STAGE;  // entries that the ring takes at once
    constexpr int STAGES = PARTS > 1 && WIDTH <= 128 ? 6 : 4, SLOTS = STAGES / PARTS;  // of the rings of values, scores
    static_assert(WIDTH <= 256, "entries that a thread copies are whole eights apart, where octets lie alike");
    constexpr int APART = 64 + LANES;  // heads' scores, so that the lanes of a warp read different banks
    const bf16** const listed = (const bf16**)dynamic_shared();       // [ENTRIES]: the rows of a list,
    int* const bytes = (int*)(listed + ENTRIES);                      // [ENTRIES]: 16, or 0 where no row is listed;
    int* const ids = bytes;                                           // first the list itself
    uint4* const keys = (uint4*)(bytes + ENTRIES);                    // [64][D / 8]
    uint4* const queries = keys + 64 * (D / 8);                       // [HEADS][D / 8]
    float* const partial = (float*)keys;                              // [2][HEADS][72]; then, in the same place:
    uint4* const values = keys;                                       // [STAGES][STAGE][CHUNKS]
    float* const held = (float*)(values + STAGES * STAGE * CHUNKS);   // [SLOTS][HEADS][APART]: scores
    bf16* const chances = (bf16*)(held + SLOTS * HEADS * APART);      // [2][HEADS][72]
    float* const sums = (float*)keys;                                 // [HEADS][WIDTH + 8]; at the end
    static_assert(STAGES * STAGE * WIDTH * 2 + (SLOTS * APART + 72) * HEADS * 4 <= BYTE_COUNT - 12 * ENTRIES, "");
    __shared__ __align__(16) float maxima[ENTRIES / 64 * HEADS];
    __shared__ float angles[TURN > 0 ? 2 * TURN : 1], fades[2][HEADS];
    __shared__ double inverses[HEADS];
    __shared__ bool is_last;
"""
    + SOURCES
    + """
    const int count = near_count + far_count, blocks = gridDim.x, block = blockIdx.x;
    const int slice = blockIdx.y % SLICES, head0 = blockIdx.y / SLICES * HEADS, row = blockIdx.z;
    const int batch = gridDim.z == length ? 0 : row / length, ticket = row * gridDim.y + blockIdx.y;
    const int present = min(HEADS, heads - head0);  // rows of a product do not mix: the others hold anything
    const size_t out = ((size_t)row * heads + head0) * D;
    // An octet of channels of a row of D: lanes 8 n .. 8 n + 7 of a product's reads meet in no bank.
    const auto place = [](unsigned row, unsigned chunk) { return row * (D / 8) + (chunk ^ (row & 1) << 2); };
    const auto keep = [](unsigned row, unsigned chunk) {  // as place(), of the slice
      return row * CHUNKS + (chunk ^ (row & (CHUNKS < 8 ? CHUNKS - 1 : 7)));
    };

    // ---- scores of one block
    #pragma unroll 1
    for (int first = 0; first < 64 * blocks; first += 256) {
      const int p = first + threadIdx.x;
      const int* const from = p < near_count ? near_list + (size_t)row * near_count
                                             : far_list + ((size_t)row * far_count - near_count);
      if (p < count) copy_async<4>(shared_address(ids + p), from + p);
      else ids[p] = -1;
    }
    #pragma unroll 1
    for (int n = 0; n < (HEADS * (D / 8) + 255) / 256; n++) {  // beyond the last head, its last octet once more
      const unsigned i = threadIdx.x + 256 * n;
      copy16_async(queries + place(i / (D / 8), i % (D / 8)), q + out + min((int)i, present * (D / 8) - 1) * 8);
    }
    #pragma unroll
    for (int first = 0; first < 2 * TURN; first += 256) {
      const int i = first + threadIdx.x;
      const size_t at = (size_t)(row - batch * length) * TURN;
      if (i < 2 * TURN) copy_async<4>(shared_address(angles + i), (i < TURN ? cosine + at : sine + at - TURN) + i);
    }
    wait_for_copies();
    #pragma unroll 1
    for (int first = 0; first < 64 * blocks; first += 256) {  // of what this thread has copied
      const int p = first + threadIdx.x, id = ids[p];
      const bool is_near = p < near_count, is_recent = SPLIT && !is_near && id >= start;
      const bool there = id >= 0 && id < (is_near ? near_rows : start + recent_rows);
      const int rows = is_near ? near_rows : is_recent ? recent_rows : far_rows;
      const bf16* const from = is_near ? near : is_recent ? recent : far;
      listed[p] = from + (long long)(batch * rows + (there ? is_recent ? id - start : id : 0)) * D;
      bytes[p] = there ? 16 : 0;
    }
    __syncthreads();
    #pragma unroll 1
    for (int n = 0; n < 2 * PAIRS; n += 2) {  // zeros for no row: what lay there may be NaN
      constexpr unsigned AT_ONCE = 256 / (D / 8);  // entries
      const unsigned e = threadIdx.x / (D / 8u) + n * AT_ONCE, p = 64 * block + e, chunk = threadIdx.x % (D / 8u);
      const bf16* const from[2] = {listed[p], listed[p + AT_ONCE]};
      const bool there[2] = {(bytes[p] & 16) > 0, (bytes[p + AT_ONCE] & 16) > 0};
      copy16_async_or_zeros(keys + place(e, chunk), from[0] + 8 * chunk, there[0]);
      copy16_async_or_zeros(keys + place(e, chunk) + 256, from[1] + 8 * chunk, there[1]);
    }
    #pragma unroll 1
    for (unsigned i = threadIdx.x; TURN_QUERIES && i < HEADS * TURN; i += 256) {
      const unsigned pair = i % max(TURN, 1), channel = D - 2 * TURN + 2 * pair;
      unsigned* const at = (unsigned*)(queries + place(i / max(TURN, 1), channel / 8)) + channel % 8 / 2;
      unsigned both = *at;
      turn(((bf16*)&both)[0], ((bf16*)&both)[1], angles[pair], angles[TURN + pair]);
      *at = both;
    }
    wait_for_copies();
    __syncthreads();
    {
      const int entry = warp / 2 * 16, odd = warp & 1, at = place(g, 4 * odd + t);  // rows 8 on have g's banks
      float dots[MT][2][4] = {};
      #pragma unroll 1
      for (int c = 0; c < PAIRS; c++) {
        const uint4* const of_keys = keys + entry * (D / 8) + at + 8 * c;
        const uint4* const of_queries = queries + at + 8 * c;
        const uint4 k[2] = {of_keys[0], of_keys[D]};
        #pragma unroll
        for (int m = 0; m < MT; m++) {
          const uint4 a = of_queries[2 * m * D], b = of_queries[(2 * m + 1) * D];
          product(dots[m][0], a, b, k[0]);
          product(dots[m][1], a, b, k[1]);
        }
      }
      __syncthreads();  // what was read lies where this goes
      #pragma unroll
      for (int n = 0; n < 4 * MT; n++) {
        const float* const two = dots[n / 4][n / 2 % 2] + n % 2 * 2;
        *(float2*)(partial + (odd * HEADS + n / 4 * 16 + g + n % 2 * 8) * 72 + entry + n / 2 % 2 * 8 + 2 * t) =
            make_float2(two[0], two[1]);
      }
    }
    __syncthreads();
    float* const all = scores + (size_t)ticket * blocks * HEADS * 65;  // [blocks][HEADS][64], then the maxima
    #pragma unroll 1
    for (int m = 0; m < MT; m++) {
      const unsigned head = 16 * m + threadIdx.x / 16u, e = threadIdx.x % 16u * 4;
      const float4 even = *(const float4*)(partial + head * 72 + e);
      const float4 odd = *(const float4*)(partial + (HEADS + head) * 72 + e);
      const int4 there = *(const int4*)(bytes + 64 * block + e);
      float4 s;
      s.x = there.x ? (even.x + odd.x) * SCALE : NO_SCORE;
      s.y = there.y ? (even.y + odd.y) * SCALE : NO_SCORE;
      s.z = there.z ? (even.z + odd.z) * SCALE : NO_SCORE;
      s.w = there.w ? (even.w + odd.w) * SCALE : NO_SCORE;
      ((float4*)all)[(block * MT + m) * 256 + threadIdx.x] = s;
      float most = fmaxf(fmaxf(s.x, s.y), fmaxf(s.z, s.w));
      #pragma unroll
      for (int apart = 8; apart > 0; apart >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, apart));
      if (e == 0) all[(blocks * 64 + block) * HEADS + head] = most;
    }

    // ---- the last block of these heads goes on. The tickets are an input, because MLX knows no output in place and no
    // state of a kernel; the launch leaves them as it found them, so that the array's value does not change.
    __syncthreads();
    int* const drawn = (int*)tickets + ticket;
    if (threadIdx.x == 0) is_last = draw_ticket(drawn) == blocks - 1;
    __syncthreads();
    if (!is_last) return;
    if (threadIdx.x == 0) *drawn = 0;

    if (threadIdx.x < blocks * HEADS / 4)
      copy16_async(maxima + 4 * threadIdx.x, all + blocks * HEADS * 64 + 4 * threadIdx.x);
    // What does not change from turn to turn: `opaque`, as the compiler would work it out anew in each.
    constexpr int AT_ONCE = 256 / CHUNKS, COPIES = (STAGE * CHUNKS + 255) / 256;  // entries; copies of a thread
    const unsigned thread = threadIdx.x;
    const unsigned mine = opaque(thread / LANES), l = opaque(thread % LANES);  // the softmax's head, and a lane of it
    const unsigned sent = opaque(thread / CHUNKS);                             // entry of a stage that a thread copies
    const unsigned to = opaque(shared_address(values) + 16 * keep(sent, thread % CHUNKS));
    const unsigned of_row = opaque(slice * WIDTH + 8 * (thread % CHUNKS));
    const unsigned to_held = opaque(shared_address(held + thread / 16 * APART + thread % 16 * 4));
    const float* const of_all = opaque(all + 4 * thread);
    const bf16* const of_chances = opaque(chances + (lane & 15) * 72 + 8 * (lane >> 4));
    const bf16* of_values[TILES];
    #pragma unroll
    for (int n = 0; n < TILES; n++) of_values[n] = opaque((const bf16*)(values + keep(lane, TILES * warp + n)));
    const float sink = sinks[min(head0 + (int)mine, heads - 1)];
    float peak = -1e30f, total = 0.f, acc[MT][TILES][4] = {};
    const bool has_channels = TILES * 8 == CHUNKS || TILES * warp < CHUNKS;
    // Each turn sends the values of a stage and the scores of the block behind it, which are read STAGES - 1 turns
    // later: the first turns do nothing else. A barrier a turn is enough, since what is sent or written goes where the
    // turn before has read.
    #pragma unroll 1
    for (int stage = 1 - STAGES - PARTS; stage < blocks * PARTS; stage++) {
      wait_for_copies_but<STAGES - 2>();
      __syncthreads();
      const int coming = stage + STAGES - 1;
      if (coming >= 0 && coming < blocks * PARTS) {
        const unsigned at = to + (unsigned)coming % STAGES * STAGE * CHUNKS * 16;
        const unsigned p = STAGE * coming + sent;
        const bf16* from[COPIES];
        bool there[COPIES];
        #pragma unroll
        for (int n = 0; n < COPIES; n++) {
          from[n] = listed[p + n * AT_ONCE];
          there[n] = bytes[p + n * AT_ONCE] & 16;
        }
        #pragma unroll
        for (int n = 0; n < COPIES; n++) {
          if (AT_ONCE > STAGE && sent >= STAGE) continue;
          copy16_async_or_zeros_to(at + n * 4096, from[n] + of_row, there[n]);
        }
      }
      if (coming % PARTS == 0 && coming / PARTS + 1 < blocks) {
        const unsigned b = coming / PARTS + 1;
        #pragma unroll
        for (int m = 0; m < MT; m++)
          copy_async<16>(to_held + (b % SLOTS * HEADS + 16 * m) * APART * 4, of_all + (b * MT + m) * 1024);
      }
      commit_copies();

      if (stage % PARTS == 0 && stage >= -PARTS && stage / PARTS + 1 < blocks) {
        const unsigned b = stage / PARTS + 1;
        const float* const from = held + (b % SLOTS * HEADS + mine) * APART + l;
        bf16* const chance = chances + (b % 2 * HEADS + mine) * 72 + l;
        const float raised = fmaxf(peak, maxima[b * HEADS + mine]), fade = expf(peak - raised);
        float sum = 0.f;  // of lanes 32, 16 and with two tiles 8 apart, then of the lanes: as warp_sum
        #pragma unroll 1
        for (int i = 0; i < MT * LANES; i += LANES) {
          const float p0 = expf(from[i] - raised), p1 = expf(from[i + 16] - raised);
          const float p2 = expf(from[i + 32] - raised), p3 = expf(from[i + 48] - raised);
          chance[i] = __float2bfloat16(p0);
          chance[i + 16] = __float2bfloat16(p1);
          chance[i + 32] = __float2bfloat16(p2);
          chance[i + 48] = __float2bfloat16(p3);
          sum += (p0 + p2) + (p1 + p3);
        }
        #pragma unroll
        for (int apart = LANES / 2; apart > 0; apart >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
        total = fmaf(total, fade, sum);
        peak = raised;
        if (l == 0) fades[b % 2][mine] = fade;
      }

      if (stage < 0 || !has_channels) continue;
      const unsigned b = (unsigned)stage / PARTS % 2;
      if (stage % PARTS == 0) {
        #pragma unroll
        for (int m = 0; m < MT; m++) {
          const float low = fades[b][16 * m + g], high = fades[b][16 * m + g + 8];
          #pragma unroll
          for (int n = 0; n < TILES; n++) {
            acc[m][n][0] *= low;
            acc[m][n][1] *= low;
            acc[m][n][2] *= high;
            acc[m][n][3] *= high;
          }
        }
      }
      const int here = (unsigned)stage % STAGES * STAGE * WIDTH;
      #pragma unroll
      for (int e = 0; e < STAGE; e += 32) {
        unsigned a[MT][8];
        #pragma unroll
        for (int m = 0; m < MT; m++) {
          const bf16* const from = of_chances + (b * HEADS + 16 * m) * 72 + stage % PARTS * STAGE + e;
          fragment(a[m][0], a[m][1], a[m][2], a[m][3], from);
          fragment(a[m][4], a[m][5], a[m][6], a[m][7], from + 16);
        }
        #pragma unroll
        for (int n = 0; n < TILES; n++) {
          unsigned v0, v1, v2, v3;
          transposed(v0, v1, v2, v3, of_values[n] + here + e * WIDTH);
          #pragma unroll
          for (int m = 0; m < MT; m++) {
            mma(acc[m][n], a[m][0], a[m][1], a[m][2], a[m][3], v0, v1);
            mma(acc[m][n], a[m][4], a[m][5], a[m][6], a[m][7], v2, v3);
          }
        }
      }
    }

    // ---- the result. A float64 product with the inverse, rounded, is the quotient's rounding: quotients of two floats
    // are ties or further than 2^-49 from one, and the product is off by 2^-52. It is a quarter of a division's text.
    __syncthreads();
    if (l == 0) inverses[mine] = 1. / (double)(total + expf(sink - peak));
    #pragma unroll
    for (int n = 0; n < 2 * MT * TILES; n++) {
      const float* const two = acc[n / (2 * TILES)][n / 2 % TILES] + n % 2 * 2;
      const int head = n / (2 * TILES) * 16 + g + n % 2 * 8, c = 8 * (TILES * warp + n / 2 % TILES) + 2 * t;
      if (has_channels) *(float2*)(sums + head * (WIDTH + 8) + c) = make_float2(two[0], two[1]);
    }
    __syncthreads();
    #pragma unroll 1
    for (unsigned i = threadIdx.x; i < present * (WIDTH / 4); i += 256) {
      const unsigned head = i / (WIDTH / 4), c = i % (WIDTH / 4) * 4, channel = slice * WIDTH + c;
      const float4 x = *(const float4*)(sums + head * (WIDTH + 8) + c);
      const double inverse = inverses[head];
      uint2 both;
      bf16* const y = (bf16*)&both;
      y[0] = __float2bfloat16((float)(x.x * inverse));
      y[1] = __float2bfloat16((float)(x.y * inverse));
      y[2] = __float2bfloat16((float)(x.z * inverse));
      y[3] = __float2bfloat16((float)(x.w * inverse));
      #pragma unroll
      for (int j = 0; j < 2; j++) {
        const int pair = (int)channel / 2 + j - (D / 2 - TURN);
        if (TURN > 0 && pair >= 0) turn(y[2 * j], y[2 * j + 1], angles[pair], -angles[TURN + pair]);
      }
      *(uint2*)(o + out + head * D + channel) = both;
    }
"""
)
for _word, _number in {"ENTRIES": MOST_ENTRIES, "BYTE_COUNT": BYTES}.items():
    SOURCE = SOURCE.replace(_word, str(_number))
