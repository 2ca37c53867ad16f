// IQ2_XXS by way of tables in shared memory, for blocks that have room for 64 KB; behind `_quant_mma.h`.
// Reads of shared memory bound this, then instructions. So a table has 8 bytes for 8 columns, of which permutations
// make bfloat16: per 8 columns one instruction more than with ready values, and 3 cycles of shared memory, not 5.

namespace ds4 {

// Row i of 256 bytes of the tables: 16 copies of entry i of the grid, 32 of the signs of the seven bits i / 2; a lane
// reads those in its banks. The tables lie at a multiple of their size, so a byte permutation makes an address: a byte
// of the codes in the lane's own.
//
// Each half of an entry has four columns, a byte each: two nibbles, which choose the low and the high byte of a
// bfloat16 among the bytes of LOW and of FIRST_HIGH or SECOND_HIGH. A sign is bit 5 of its column's byte in the first
// half, bit 4 in the second, so one word has all eight.
struct Iq2Tables {
  static constexpr int BYTES = 65536;
  static constexpr u32 LOW = 0x002cc800, FIRST_HIGH = 0xc2c14241, SECOND_HIGH = 0xc242c141;
  // This thread's part of the grid, read early: it takes long, and nothing depends on the launch's arrays.
  struct Words {
    u32 first, second;
    __device__ __forceinline__ Words() {
      const unsigned int* const p = IQ2_WORDS + 2 * (threadIdx.x & 255);
      first = read4(p);
      second = read4(p + 1);
    }
    // By all threads, a multiple of 256 of them; needs a barrier before use.
    __device__ __forceinline__ void stage(unsigned char* tables) const {
      const u32 ones = 0x01010101;
      for (int k = threadIdx.x; k < 512; k += blockDim.x) {
        const int i = k & 255;
        uint4* const copies = (uint4*)tables + 16 * i + (k < 256 ? 0 : 8);
        uint4 v;
        if (k < 256) {  // magnitudes 8, 25 and 43: bit 4 is set in the second alone, bit 5 in the third
          v.x = 0x40404040u + (first >> 4 & ones) + 0x12 * (first >> 5 & ones);
          v.y = 0x40404040u + (second >> 4 & ones) + 0x22 * (second >> 5 & ones);
          v.z = v.x;
          v.w = v.y;
        } else {
          u32 s = i / 2;
          s |= (__popc(s) & 1) << 7;
          s = ((s & 15) * 0x00204081u & ones) << 5 | ((s >> 4) * 0x00204081u & ones) << 4;
          v = make_uint4(s, s, s, s);
        }
#pragma unroll
        for (int c = 0; c < 8; c++) copies[(c + i) & 7] = v;  // lanes begin in different banks
      }
    }
  };
  u32 grid, signs, byte_t, power, low, ones;
  __device__ __forceinline__ explicit Iq2Tables(const unsigned char* tables) {
    const u32 lane = threadIdx.x & 31, t = lane & 3, table = shared_address(tables);
    grid = opaque(table + 8 * (lane & 15));
    signs = opaque(table + 128 + 4 * lane);
    byte_t = opaque(0x7604 + (t << 4));
    power = opaque(1u << (25 - 7 * t));
  }
  // Once the tables are there: constants that are the lane's own to the compiler, as the first word of signs, 0, is; it
  // would move others into registers again and again.
  __device__ __forceinline__ void begin() {
    low = read4_shared(signs) | LOW;
    ones = read4_shared(signs) | 0x3f803f80;
  }
  // What the tables have of an octet.
  struct Found {
    uint2 entry;
    u32 signs;
  };
  __device__ __forceinline__ Found look_up(u32 index, u32 rest) const {
    return {read8_shared(__byte_perm(index, grid, byte_t)), read4_shared(__byte_perm(rest * power, signs, 0x7634))};
  }
  // The upper half of a word, in both, as a product of bfloat16 by 1: no two columns' nibbles are a NaN, an infinity or
  // subnormal. A shift would go to the pipe of logic, which binds; the upper half of an integer product keeps that one
  // waiting, too.
  __device__ __forceinline__ u32 upper_half(u32 columns) const { return mul2_by_half(ones, columns, true); }
  __device__ __forceinline__ void values(u32 (&a)[4], const Found& found) const {
    const u32 first = found.entry.x ^ (found.signs & 0x20202020u), second = found.entry.y ^ (found.signs & 0x10101010u);
    a[0] = permute(low, FIRST_HIGH, first);
    a[1] = permute(low, FIRST_HIGH, upper_half(first));
    a[2] = permute(low, SECOND_HIGH, second);
    a[3] = permute(low, SECOND_HIGH, upper_half(second));
  }
  // d (2 s + 1) / 8, exact, by way of 2^21 + s / 4: the highest four bits on top of a float whose last bit is 1/4. Written
  // as a product, which becomes one instruction; as a shift it would be done early, where registers are short.
  static __device__ __forceinline__ float scale(float d, u32 rest) {
    return d * (__int_as_float(upper_product(rest, 16, 0x4a000000u)) - 2097151.875f);
  }
};

}  // namespace ds4
