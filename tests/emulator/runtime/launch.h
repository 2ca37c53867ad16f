// What the driver hands to the runtime and gets back.  _runtime.py mirrors these structures field by field.
#pragma once
#include <stdint.h>

enum ErrorKind : uint32_t {
  NONE,
  RACE,
  UNINITIALISED,
  OUT_OF_BOUNDS,
  MISALIGNED,
  READ_ONLY,
  DIVERGENCE,
  INACTIVE_LANE,
  UNDEFINED,
  STACK,
  FAULT,
  TIMEOUT,
};

enum Order : uint32_t { FORWARD, BACKWARD, RANDOM };

// History of one byte of writable memory (see memory.cpp).
struct Cell {
  uint32_t write_epoch, read_epoch;
  uint16_t writer, reader;
  uint16_t write_simd_epoch, read_simd_epoch;
  uint32_t flags;
};

// A kernel argument in device or constant memory.
struct Buffer {
  uint8_t* base;
  uint64_t size;
  Cell* shadow;      // `size` cells, or null: not writable
  uint8_t* touched;  // `size` bytes: bit 0 read, bit 1 written; or null: not counted
  uint64_t bytes_read, bytes_written;
  uint32_t writable, initialised;
};

struct GroupVariable {
  uint32_t offset, size;  // within the threadgroup memory
};

struct Launch {
  void (*entry)(void** arguments);
  void** arguments;
  Buffer* buffers;
  GroupVariable* group_variables;
  uint8_t* group_memory;
  uint64_t group_memory_size;
  double time_limit;  // seconds of CPU time
  uint32_t buffer_count, group_variable_count;
  uint32_t grid[3], group[3];
  uint32_t checked, order, seed, flush_denormals;
  // Answers.
  uint64_t switches, accesses, simd_operations, barriers;
  void* error_pc;    // an address behind the instruction at fault, or null
  void* image_base;  // where the kernel's shared object is loaded
  uint32_t error_kind;
  char error[1020];  // objects are named @buffer<i> and @variable<i>
};

extern "C" __attribute__((visibility("default"))) int emulator_run(Launch* launch);  // 0, or 1: see `error`
