// Checks of memory accesses: bounds, write protection, alignment, initialisation and races.
//
// Every byte of threadgroup memory and of the outputs has a Cell with its last writer and its readers.  Two
// accesses of different threads, one of them a write, are ordered if a barrier that covers the memory stands
// between them (the epoch has moved on), or, within one simdgroup, a simdgroup barrier; otherwise they race.
// Threadgroups are never ordered.
#include <link.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "state.h"

namespace {
enum Flags : uint32_t {
  READ_BY_OTHER_LANES = 1,       // since the last simdgroup barrier, besides `reader`
  READ_BY_OTHER_SIMDGROUPS = 2,  // in this epoch, besides that of `reader`
  READ_PLAIN = 4,                // in this epoch, by a read that is no atomic
  READ_BY_OTHER_GROUPS = 8,      // plainly, in an earlier threadgroup
  READ_FLAGS = READ_BY_OTHER_LANES | READ_BY_OTHER_SIMDGROUPS | READ_PLAIN,
  WRITE_ATOMIC = 16,
  WRITE_STORE = 32,  // an atomic store, whose order with atomic updates matters
};

// The clock that applies to one kind of memory and the running thread.
struct When {
  uint32_t epoch, group_start;
  uint16_t simd_epoch;
  bool device;
};

struct Segment {
  uint8_t *low, *high;
  bool holds(const uint8_t* p) const { return p >= low && p < high; }
};

std::vector<Cell> group_shadow;
std::vector<Segment> readable;  // the kernel's tables, and this runtime's own memory

bool is_atomic(Access a) { return a >= Access::ATOMIC_LOAD; }
bool is_read(Access a) { return a == Access::READ || a == Access::ATOMIC_LOAD || a == Access::ATOMIC_UPDATE; }
bool is_write(Access a) { return a != Access::READ && a != Access::ATOMIC_LOAD; }
const char* name(Access a) {
  static const char* const names[] = {"read", "write", "atomic load", "atomic store", "atomic update"};
  return names[(int)a];
}

// Same simdgroup, and a simdgroup barrier between.
bool ordered_in_simdgroup(uint16_t other, uint16_t other_epoch, uint16_t me, uint16_t my_epoch) {
  return other / LANES == me / LANES && other_epoch != my_epoch;
}

// The thread whose earlier write conflicts with this access; -1: none, -2: one of another threadgroup.
int conflicting_writer(const Cell& c, Access access, const When& now, uint16_t me) {
  bool other_group = now.device && c.write_epoch < now.group_start;
  bool unordered = c.write_epoch == now.epoch && c.writer != me &&
                   !ordered_in_simdgroup(c.writer, c.write_simd_epoch, me, now.simd_epoch);
  if (!other_group && !unordered) return -1;
  if (is_atomic(access) && (c.flags & WRITE_ATOMIC)) {
    bool was_store = c.flags & WRITE_STORE;
    bool mixed = (access == Access::ATOMIC_STORE && !was_store) || (access == Access::ATOMIC_UPDATE && was_store);
    if (!mixed) return -1;
  }
  return other_group ? -2 : c.writer;
}

// Whether this write conflicts with an earlier read.
bool conflicts_with_reader(const Cell& c, Access access, const When& now, uint16_t me) {
  if (c.flags & READ_BY_OTHER_GROUPS) return true;
  if (is_atomic(access) && !(c.flags & READ_PLAIN)) return false;
  if (now.device && c.read_epoch != 0 && c.read_epoch < now.group_start) return c.flags & READ_PLAIN;
  if (c.read_epoch != now.epoch) return false;
  if (c.flags & READ_BY_OTHER_SIMDGROUPS || c.reader / LANES != me / LANES) return true;
  return c.read_simd_epoch == now.simd_epoch && (c.reader != me || c.flags & READ_BY_OTHER_LANES);
}

void record_write(Cell& c, Access access, const When& now, uint16_t me) {
  bool same_epoch = c.write_epoch == now.epoch;
  // A plain write stays on record when an atomic follows it in the same epoch: it is the one others race with.
  if (is_atomic(access) && same_epoch && !(c.flags & WRITE_ATOMIC)) return;
  bool store = access == Access::ATOMIC_STORE ||
               (same_epoch && c.write_simd_epoch == now.simd_epoch && (c.flags & WRITE_STORE));
  c.flags &= ~(WRITE_ATOMIC | WRITE_STORE);
  if (is_atomic(access)) c.flags |= WRITE_ATOMIC | (store ? WRITE_STORE : 0);
  c.write_epoch = now.epoch;
  c.writer = me;
  c.write_simd_epoch = now.simd_epoch;
}

void record_read(Cell& c, Access access, const When& now, uint16_t me) {
  if (c.read_epoch != now.epoch) {
    if (now.device && c.read_epoch != 0 && c.read_epoch < now.group_start && (c.flags & READ_PLAIN))
      c.flags |= READ_BY_OTHER_GROUPS;
    c.flags &= ~READ_FLAGS;
    c.read_epoch = now.epoch;
  } else if (c.reader / LANES != me / LANES) {
    c.flags |= READ_BY_OTHER_SIMDGROUPS;
  } else if (c.read_simd_epoch != now.simd_epoch) {
    c.flags &= ~READ_BY_OTHER_LANES;
  } else if (c.reader != me) {
    c.flags |= READ_BY_OTHER_LANES;
  }
  c.reader = me;
  c.read_simd_epoch = now.simd_epoch;
  if (!is_atomic(access)) c.flags |= READ_PLAIN;
}

void check_history(Cell* cells, uint64_t bytes, Access access, const When& now, bool initialised, void* pc) {
  uint16_t me = current->context.index_in_group;
  const char* kind = now.device ? "device" : "threadgroup";
  for (Cell* c = cells; c < cells + bytes; c++) {
    bool written = c->write_epoch != 0 && (now.device || c->write_epoch >= now.group_start);
    if (is_read(access) && !written && !initialised)
      return fail(UNINITIALISED, pc, "%s of %s memory that was never written", name(access), kind);
    if (written) {
      int other = conflicting_writer(*c, access, now, me);
      const char* before = !(c->flags & WRITE_ATOMIC)  ? "write"
                           : c->flags & WRITE_STORE ? "atomic store"
                                                    : "atomic update";
      if (other == -2)
        return fail(RACE, pc, "race on device memory: %s by thread %u and %s by another threadgroup", name(access),
                    me, before);
      if (other >= 0)
        return fail(RACE, pc, "race on %s memory: %s by thread %u after %s by thread %d without a barrier between",
                    kind, name(access), me, before, other);
    }
    if (is_write(access)) {
      if (conflicts_with_reader(*c, access, now, me))
        return fail(RACE, pc, "race on %s memory: %s by thread %u after a read by %s without a barrier between",
                    kind, name(access), me,
                    now.device && (c->flags & READ_BY_OTHER_GROUPS || c->read_epoch < now.group_start)
                        ? "another threadgroup"
                        : "another thread");
      record_write(*c, access, now, me);
    } else {
      record_read(*c, access, now, me);
    }
  }
}

void count_traffic(Buffer* b, const uint8_t* p, uint64_t bytes, Access access) {
  uint8_t mark = (is_read(access) ? 1 : 0) | (is_write(access) ? 2 : 0);
  if (mark & 1) b->bytes_read += bytes;
  if (mark & 2) b->bytes_written += bytes;
  if (!b->touched) return;
  uint8_t* t = b->touched + (p - b->base);
  for (uint64_t i = 0; i < bytes; i++) t[i] |= mark;
}

bool inside(const Buffer* b, const uint8_t* p, uint64_t bytes) {
  return p >= b->base && p + bytes <= b->base + b->size;
}

// Names the object whose start or end is nearest to an address that belongs to none.
void fail_out_of_bounds(const uint8_t* p, uint64_t bytes, Access access, void* pc) {
  const char* what = "";
  uint32_t index = 0;
  int64_t offset = 0;
  uint64_t size = 0, best = ~0ull;
  auto consider = [&](const char* object, uint32_t i, const uint8_t* base, uint64_t n) {
    uint64_t distance = p < base ? base - p : p - std::min(p, base + n);
    if (distance >= best) return;
    best = distance, what = object, index = i, offset = p - base, size = n;
  };
  for (uint32_t i = 0; i < launch->buffer_count; i++)
    consider("buffer", i, launch->buffers[i].base, launch->buffers[i].size);
  for (uint32_t i = 0; i < launch->group_variable_count; i++)
    consider("variable", i, launch->group_memory + launch->group_variables[i].offset,
             launch->group_variables[i].size);
  fail(OUT_OF_BOUNDS, pc, "%s of %lu bytes at byte %ld of @%s%u, which has %lu bytes", name(access),
       (unsigned long)bytes, (long)offset, what, index, (unsigned long)size);
}

void check_group_memory(const uint8_t* p, uint64_t bytes, Access access, void* pc) {
  uint64_t offset = p - launch->group_memory;
  for (uint32_t k = 0; k < launch->group_variable_count; k++) {
    const GroupVariable& v = launch->group_variables[k];
    if (offset < v.offset || offset + bytes > (uint64_t)v.offset + v.size) continue;
    When now = {clock_now.group, clock_now.group_start, clock_now.simd_group[current->context.simdgroup], false};
    return check_history(&group_shadow[offset], bytes, access, now, false, pc);
  }
  fail_out_of_bounds(p, bytes, access, pc);
}

__attribute__((noinline)) void check_anywhere(const uint8_t* p, uint64_t bytes, Access access, void* pc) {
  if (p >= current->stack && p + bytes <= current->stack + STACK_SIZE) return;
  if (p < current->stack && p + bytes > current->stack - GUARD_SIZE) return fail(STACK, pc, TOO_MUCH_STACK);
  if (p >= launch->group_memory && p < launch->group_memory + launch->group_memory_size)
    return check_group_memory(p, bytes, access, pc);
  for (Buffer* b = launch->buffers; b < launch->buffers + launch->buffer_count; b++) {
    if (!inside(b, p, bytes)) continue;
    if (!b->writable && b->touched && b != recent_inputs[0]) {
      recent_inputs[1] = recent_inputs[0];
      recent_inputs[0] = b;
    }
    if (is_write(access) && !b->writable)
      return fail(READ_ONLY, pc, "%s to the input @buffer%u", name(access), (uint32_t)(b - launch->buffers));
    count_traffic(b, p, bytes, access);
    if (!b->shadow) return;
    When now = {clock_now.device, clock_now.device_start, clock_now.simd_device[current->context.simdgroup], true};
    return check_history(b->shadow + (p - b->base), bytes, access, now, b->initialised, pc);
  }
  for (const Segment& s : readable)
    if (s.holds(p) && access == Access::READ) return;
  fail_out_of_bounds(p, bytes, access, pc);
}

int note_segments(struct dl_phdr_info* info, size_t, void*) {
  auto segment = [&](int k) {
    uint8_t* low = (uint8_t*)info->dlpi_addr + info->dlpi_phdr[k].p_vaddr;
    return Segment{low, low + info->dlpi_phdr[k].p_memsz};
  };
  bool kernel = false, runtime = false;
  for (int k = 0; k < info->dlpi_phnum; k++) {
    if (info->dlpi_phdr[k].p_type != PT_LOAD) continue;
    kernel |= segment(k).holds((uint8_t*)launch->entry);
    runtime |= segment(k).holds((uint8_t*)&msl_current);
  }
  if (kernel) launch->image_base = (void*)info->dlpi_addr;
  for (int k = 0; k < info->dlpi_phnum; k++) {
    if (info->dlpi_phdr[k].p_type != PT_LOAD) continue;
    bool constant_data = kernel && !(info->dlpi_phdr[k].p_flags & PF_W);
    if (constant_data || runtime) readable.push_back(segment(k));
  }
  return 0;
}
}  // namespace

Buffer* recent_inputs[2];

void memory_begin() {
  recent_inputs[0] = recent_inputs[1] = nullptr;
  group_shadow.assign(launch->checked ? launch->group_memory_size : 0, Cell{});
  readable.clear();
  dl_iterate_phdr(note_segments, nullptr);
}

void check_access(void* address, uint64_t bytes, Access access, bool aligned, void* pc) {
  const uint8_t* p = (const uint8_t*)address;
  launch->accesses++;
  if (aligned && ((uintptr_t)p & (bytes - 1)))
    return fail(MISALIGNED, pc, "%s of %lu bytes at an address that is no multiple of it", name(access),
                (unsigned long)bytes);
  check_anywhere(p, bytes, access, pc);
}
