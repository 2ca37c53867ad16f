// State shared by the parts of the runtime.  One launch at a time (the driver holds a lock).
#pragma once
#include <msl/abi.h>

#include <stddef.h>

#include "launch.h"

constexpr uint32_t LANES = 32;
constexpr uint32_t MAX_THREADS = 1024;
constexpr size_t STACK_SIZE = 64 * 1024;
constexpr size_t GUARD_SIZE = 1 << 20;  // address space only; a frame larger than this would jump over it
#define TOO_MUCH_STACK "the local variables of a thread need more than 64 KB"

enum class Wait : uint8_t { NOTHING, SIMD, SIMDGROUP_BARRIER, THREADGROUP_BARRIER, RETURNED };

// One GPU thread, run as a fiber.
struct Thread {
  void* stack_pointer;
  uint8_t* stack;  // STACK_SIZE bytes above the guard
  msl_context context;
  Wait wait;
  uint8_t parity;        // which of two sets of exchange slots the next simd operation uses
  uint32_t flags;        // barrier: its mem_flags; after a simd operation: the mask of active lanes
  void* site;            // where it waits
  const char* waits_in;  // and the operation's name
};

extern Launch* launch;
extern Thread* current;  // null while the scheduler itself runs
extern bool failed;

// Time, as the race check sees it.  Epochs count barriers that order the memory in question; the *_start
// values are those at the start of the running threadgroup.
struct Clock {
  uint32_t group, group_start, device, device_start;
  uint16_t simd_group[LANES], simd_device[LANES];  // simdgroup barriers, for each simdgroup
};
extern Clock clock_now;

// Records the first error.  From a fiber it does not return: the thread is abandoned.
__attribute__((cold, noinline, format(printf, 3, 4))) void fail(ErrorKind kind, void* pc, const char* format, ...);
void yield_to_scheduler();

// memory.cpp
enum class Access : uint8_t { READ, WRITE, ATOMIC_LOAD, ATOMIC_STORE, ATOMIC_UPDATE };
void memory_begin();             // once a launch
extern Buffer* recent_inputs[2];  // those last read; the next read is likely to be of one of them
void check_access(void* address, uint64_t bytes, Access access, bool aligned, void* pc);

// schedule.cpp
int run_grid();
