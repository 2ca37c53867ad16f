// What a compiled kernel and the runtime share.  Included by both, so it uses built-in types only.
#pragma once

// The position of the running thread; one per fiber, `msl_current` points at the running one's.
struct msl_context {
  unsigned position_in_grid[3];
  unsigned position_in_group[3];
  unsigned group_position[3];
  unsigned group_size[3];     // of this threadgroup, which may be a smaller one at the grid's edge
  unsigned nominal_group[3];  // of a full threadgroup
  unsigned group_count[3];
  unsigned grid_size[3];
  unsigned index_in_group;
  unsigned lane;
  unsigned simdgroup;
  unsigned simdgroups;
  unsigned nominal_simdgroups;
};

enum msl_atomic_op : unsigned {
  MSL_LOAD,
  MSL_STORE,
  MSL_EXCHANGE,
  MSL_ADD,
  MSL_SUB,
  MSL_MIN_UNSIGNED,
  MSL_MAX_UNSIGNED,
  MSL_MIN_SIGNED,
  MSL_MAX_SIGNED,
  MSL_AND,
  MSL_OR,
  MSL_XOR,
  MSL_COMPARE_EXCHANGE,
  MSL_ADD_FLOAT,
  MSL_SUB_FLOAT,
};

#define MSL_NOESCAPE __attribute__((noescape))

#pragma GCC visibility push(default)
extern "C" {
extern msl_context* msl_current;

// Deposits `bytes` bytes (16 at most), waits until the whole simdgroup has come to this call, then gives
// the deposits of all 32 lanes and the mask of those that took part.
void msl_exchange(MSL_NOESCAPE const void* in, unsigned bytes, MSL_NOESCAPE unsigned* active,
                  const char* what, MSL_NOESCAPE void* all) __attribute__((convergent, noinline));

// `flags`: the bits of Metal's mem_flags.
void msl_threadgroup_barrier(unsigned flags) __attribute__((convergent, noinline));
void msl_simdgroup_barrier(unsigned flags) __attribute__((convergent, noinline));

// A 32-bit atomic; answers the old value.  `exchanged` is written by MSL_COMPARE_EXCHANGE only.
unsigned msl_atomic(void* address, msl_atomic_op op, unsigned value, unsigned expected, unsigned* exchanged)
    __attribute__((noinline));

// Ends the launch: an operation named by `what` reads the value of a lane that takes no part in it.
void msl_inactive_lane(const char* what) __attribute__((noinline, cold));
}
#pragma GCC visibility pop
