// Functions across the 32 lanes of a simdgroup.  Every one is a single rendezvous (msl_exchange): all lanes
// deposit their operand, and each then computes its result from the deposits.
#pragma once

namespace metal {
template <class T>
struct msl_lanes {
  T value[32];
  uint active;
  MSL_INLINE bool has(uint lane) const { return lane < 32 && (active >> lane & 1u); }
};

template <class T>
MSL_INLINE msl_lanes<T> msl_gather(T x, const char* what) {
  typedef typename msl_shape<T>::element element;
  static_assert(sizeof(element) <= 4, "simd functions take elements of 32 bits at most");
  static_assert(!is_same_v<element, bool>, "simd functions take no bool");
  static_assert(!is_same_v<element, bfloat>,
                "simd functions of bfloat are missing from some Metal compilers: cast to float");
  msl_lanes<T> lanes;
  T all[32];
  uint active;
  msl_exchange(&x, sizeof(T), &active, what, all);
  // Copied by value so that the arrays handed to the runtime do not have to live in memory afterwards.
  for (int i = 0; i < 32; i++) lanes.value[i] = all[i];
  lanes.active = active;
  return lanes;
}

// Reduction as a tree, the way hardware pairs lanes; lanes that take no part count as `neutral`.
template <class T, class F>
MSL_INLINE T msl_reduce(T x, T neutral, F f, const char* what) {
  msl_lanes<T> lanes = msl_gather(x, what);
  for (uint i = 0; i < 32; i++)
    if (!lanes.has(i)) lanes.value[i] = neutral;
  for (int width = 16; width > 0; width >>= 1)
    for (int i = 0; i < width; i++) lanes.value[i] = f(lanes.value[i], lanes.value[i + width]);
  return lanes.value[0];
}
// Reduction that needs no neutral element.
template <class T, class F>
MSL_INLINE T msl_choose(T x, F f, const char* what) {
  msl_lanes<T> lanes = msl_gather(x, what);
  T r = x;
  for (uint i = 0; i < 32; i++)
    if (lanes.has(i)) r = f(r, lanes.value[i]);
  return r;
}
// Running total of the lanes before this one, and of this one if `inclusive`.
template <class T, class F>
MSL_INLINE T msl_prefix(T x, T neutral, bool inclusive, F f, const char* what) {
  msl_lanes<T> lanes = msl_gather(x, what);
  T r = neutral;
  uint end = msl_current->lane + (inclusive ? 1u : 0u);
  for (uint i = 0; i < end; i++)
    if (lanes.has(i)) r = f(r, lanes.value[i]);
  return r;
}
template <class T>
MSL_INLINE T msl_of_lane(const msl_lanes<T>& lanes, uint lane, const char* what) {
  if (!lanes.has(lane)) msl_inactive_lane(what);
  return lanes.value[lane & 31u];
}

template <class T>
MSL_INLINE T simd_sum(T x) {
  return msl_reduce(x, T(0), [](T a, T b) { return T(a + b); }, "simd_sum");
}
template <class T>
MSL_INLINE T simd_product(T x) {
  return msl_reduce(x, T(1), [](T a, T b) { return T(a * b); }, "simd_product");
}
template <class T>
MSL_INLINE T simd_and(T x) {
  return msl_reduce(x, T(~T(0)), [](T a, T b) { return T(a & b); }, "simd_and");
}
template <class T>
MSL_INLINE T simd_or(T x) {
  return msl_reduce(x, T(0), [](T a, T b) { return T(a | b); }, "simd_or");
}
template <class T>
MSL_INLINE T simd_xor(T x) {
  return msl_reduce(x, T(0), [](T a, T b) { return T(a ^ b); }, "simd_xor");
}
template <class T>
MSL_INLINE T simd_max(T x) {
  return msl_choose(x, [](T a, T b) { return max(a, b); }, "simd_max");
}
template <class T>
MSL_INLINE T simd_min(T x) {
  return msl_choose(x, [](T a, T b) { return min(a, b); }, "simd_min");
}

template <class T>
MSL_INLINE T simd_prefix_inclusive_sum(T x) {
  return msl_prefix(x, T(0), true, [](T a, T b) { return T(a + b); }, "simd_prefix_inclusive_sum");
}
template <class T>
MSL_INLINE T simd_prefix_exclusive_sum(T x) {
  return msl_prefix(x, T(0), false, [](T a, T b) { return T(a + b); }, "simd_prefix_exclusive_sum");
}
template <class T>
MSL_INLINE T simd_prefix_inclusive_product(T x) {
  return msl_prefix(x, T(1), true, [](T a, T b) { return T(a * b); }, "simd_prefix_inclusive_product");
}
template <class T>
MSL_INLINE T simd_prefix_exclusive_product(T x) {
  return msl_prefix(x, T(1), false, [](T a, T b) { return T(a * b); }, "simd_prefix_exclusive_product");
}

template <class T>
MSL_INLINE T simd_shuffle(T x, ushort lane) {
  return msl_of_lane(msl_gather(x, "simd_shuffle"), lane, "simd_shuffle");
}
template <class T>
MSL_INLINE T simd_broadcast(T x, ushort lane) {
  return msl_of_lane(msl_gather(x, "simd_broadcast"), lane, "simd_broadcast");
}
template <class T>
MSL_INLINE T simd_shuffle_xor(T x, ushort mask) {
  return msl_of_lane(msl_gather(x, "simd_shuffle_xor"), msl_current->lane ^ mask, "simd_shuffle_xor");
}
// Lanes without a partner keep their own value.
template <class T>
MSL_INLINE T simd_shuffle_down(T x, ushort delta) {
  msl_lanes<T> lanes = msl_gather(x, "simd_shuffle_down");
  uint lane = msl_current->lane + delta;
  return lane < 32 ? msl_of_lane(lanes, lane, "simd_shuffle_down") : x;
}
template <class T>
MSL_INLINE T simd_shuffle_up(T x, ushort delta) {
  msl_lanes<T> lanes = msl_gather(x, "simd_shuffle_up");
  uint lane = msl_current->lane;
  return lane >= delta ? msl_of_lane(lanes, lane - delta, "simd_shuffle_up") : x;
}
template <class T>
MSL_INLINE T simd_shuffle_rotate_down(T x, ushort delta) {
  return msl_of_lane(msl_gather(x, "simd_shuffle_rotate_down"), (msl_current->lane + delta) & 31u,
                     "simd_shuffle_rotate_down");
}
template <class T>
MSL_INLINE T simd_shuffle_rotate_up(T x, ushort delta) {
  return msl_of_lane(msl_gather(x, "simd_shuffle_rotate_up"), (msl_current->lane - delta) & 31u,
                     "simd_shuffle_rotate_up");
}
// Lanes without a partner take theirs from the upper end of `filling`.
template <class T>
MSL_INLINE T simd_shuffle_and_fill_up(T x, T filling, ushort delta) {
  msl_lanes<T> data = msl_gather(x, "simd_shuffle_and_fill_up");
  msl_lanes<T> fill = msl_gather(filling, "simd_shuffle_and_fill_up");
  uint lane = msl_current->lane;
  return lane >= delta ? msl_of_lane(data, lane - delta, "simd_shuffle_and_fill_up")
                       : msl_of_lane(fill, (32u + lane - delta) & 31u, "simd_shuffle_and_fill_up");
}
template <class T>
MSL_INLINE T simd_broadcast_first(T x) {
  msl_lanes<T> lanes = msl_gather(x, "simd_broadcast_first");
  return lanes.active ? lanes.value[__builtin_ctz(lanes.active)] : x;
}

struct simd_vote {
  typedef ulong vote_t;
  vote_t v;
  explicit constexpr simd_vote(vote_t x = 0) : v(x) {}
  explicit constexpr operator vote_t() const { return v; }
  bool any() const { return v != 0; }
  bool all() const { return v == 0xfffffffful; }
};
MSL_INLINE simd_vote simd_ballot(bool b) {
  msl_lanes<uint> lanes = msl_gather(uint(b), "simd_ballot");
  ulong votes = 0;
  for (uint i = 0; i < 32; i++)
    if (lanes.has(i) && lanes.value[i]) votes |= 1ul << i;
  return simd_vote(votes);
}
MSL_INLINE simd_vote simd_active_threads_mask() {
  return simd_vote(msl_gather(0u, "simd_active_threads_mask").active);
}
MSL_INLINE bool simd_any(bool b) {
  return msl_reduce(uint(b), 0u, [](uint a, uint c) { return a | c; }, "simd_any") != 0;
}
MSL_INLINE bool simd_all(bool b) {
  return msl_reduce(uint(b), 1u, [](uint a, uint c) { return a & c; }, "simd_all") != 0;
}
MSL_INLINE bool simd_is_first() {
  uint active = msl_gather(0u, "simd_is_first").active;
  return active && uint(__builtin_ctz(active)) == msl_current->lane;
}

template <class T>
MSL_INLINE T quad_sum(T x) {
  msl_lanes<T> lanes = msl_gather(x, "quad_sum");
  uint q = msl_current->lane & ~3u;
  return T(T(lanes.value[q] + lanes.value[q + 1]) + T(lanes.value[q + 2] + lanes.value[q + 3]));
}
template <class T>
MSL_INLINE T quad_max(T x) {
  msl_lanes<T> lanes = msl_gather(x, "quad_max");
  uint q = msl_current->lane & ~3u;
  return max(max(lanes.value[q], lanes.value[q + 1]), max(lanes.value[q + 2], lanes.value[q + 3]));
}
template <class T>
MSL_INLINE T quad_broadcast(T x, ushort lane) {
  return msl_of_lane(msl_gather(x, "quad_broadcast"), (msl_current->lane & ~3u) + (lane & 3u),
                     "quad_broadcast");
}
template <class T>
MSL_INLINE T quad_shuffle_xor(T x, ushort mask) {
  return msl_of_lane(msl_gather(x, "quad_shuffle_xor"), msl_current->lane ^ (mask & 3u), "quad_shuffle_xor");
}
}  // namespace metal
