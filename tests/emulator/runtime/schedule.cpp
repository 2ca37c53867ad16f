// Runs a grid: threadgroups one after another, one fiber per thread.  A simdgroup goes on when all its
// lanes wait at the same simd operation, a threadgroup when all its threads wait at the same barrier.
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>

#include "stack_switch.h"
#include "state.h"

extern "C" {
msl_context* msl_current;
}
Thread* current;
Clock clock_now;

static Thread threads[MAX_THREADS];
static void* scheduler_stack;
static uint32_t thread_count, simdgroup_count;
// Deposits of simd operations, by simdgroup, parity and lane.  Two sets, as a lane may reach its next
// operation before another has read the results of this one.
static uint8_t slots[LANES][2][LANES][16];
static uint32_t random_state;

void yield_to_scheduler() {
  launch->switches++;
  emulator_switch(&current->stack_pointer, scheduler_stack);
}

static void resume(Thread* t) {
  current = t;
  msl_current = &t->context;
  launch->switches++;
  emulator_switch(&scheduler_stack, t->stack_pointer);
  current = nullptr;
}

static void thread_main() {
  launch->entry(launch->arguments);
  current->wait = Wait::RETURNED;
  yield_to_scheduler();
  __builtin_unreachable();
}

static void wait_here(Wait wait, const char* what, void* site) {
  current->wait = wait;
  current->waits_in = what;
  current->site = site;
  yield_to_scheduler();
}

extern "C" void msl_exchange(MSL_NOESCAPE const void* in, unsigned bytes, MSL_NOESCAPE unsigned* active,
                             const char* what, MSL_NOESCAPE void* all) {
  Thread* me = current;
  launch->simd_operations++;
  me->parity ^= 1;
  auto& set = slots[me->context.simdgroup][me->parity];
  memcpy(set[me->context.lane], in, bytes);
  wait_here(Wait::SIMD, what, __builtin_return_address(0));
  *active = me->flags;
  uint8_t* out = (uint8_t*)all;
  if (bytes == 4) {  // nearly always
    for (uint32_t i = 0; i < LANES; i++) memcpy(out + 4 * i, set[i], 4);
  } else {
    for (uint32_t i = 0; i < LANES; i++) memcpy(out + bytes * i, set[i], bytes);
  }
}

extern "C" void msl_threadgroup_barrier(unsigned flags) {
  current->flags = flags;
  wait_here(Wait::THREADGROUP_BARRIER, "threadgroup_barrier", __builtin_return_address(0));
}

extern "C" void msl_simdgroup_barrier(unsigned flags) {
  current->flags = flags;
  wait_here(Wait::SIMDGROUP_BARRIER, "simdgroup_barrier", __builtin_return_address(0));
}

static uint32_t random_below(uint32_t n) {  // xorshift
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  random_state ^= random_state << 5;
  return random_state % n;
}

// Fills `order` with 0 .. n-1 in the order in which this launch runs its threads.
static void execution_order(uint32_t* order, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) order[i] = launch->order == BACKWARD ? n - 1 - i : i;
  if (launch->order == RANDOM)
    for (uint32_t i = n; i > 1; i--) std::swap(order[i - 1], order[random_below(i)]);
}

static void describe(const Thread* t, char* text, size_t size) {
  if (t->wait == Wait::RETURNED)
    snprintf(text, size, "lane %u has returned", t->context.lane);
  else
    snprintf(text, size, "lane %u waits in %s", t->context.lane, t->waits_in);
}

// Runs one simdgroup until its lanes have all returned, or all wait at one threadgroup barrier.
static void run_simdgroup(uint32_t index) {
  Thread* lanes = threads + index * LANES;
  uint32_t n = std::min(LANES, thread_count - index * LANES), order[LANES];
  execution_order(order, n);
  for (;;) {
    for (uint32_t k = 0; k < n; k++) {
      if (lanes[order[k]].wait != Wait::NOTHING) continue;
      resume(lanes + order[k]);
      if (failed) return;
    }
    Thread *first = nullptr, *different = nullptr, *returned = nullptr;
    for (uint32_t i = 0; i < n; i++) {
      Thread* t = lanes + i;
      if (t->wait == Wait::RETURNED)
        returned = t;
      else if (!first)
        first = t;
      else if (!different && (t->wait != first->wait || t->site != first->site))
        different = t;
    }
    if (!first) return;
    if (!different && first->wait != Wait::THREADGROUP_BARRIER) different = returned;
    if (different) {
      char a[160], b[160];
      describe(first, a, sizeof a);
      describe(different, b, sizeof b);
      bool same_operation = different->wait == first->wait;
      fail(DIVERGENCE, first->site, "simdgroup %u of threadgroup (%u,%u,%u) has diverged: %s while %s%s", index,
           first->context.group_position[0], first->context.group_position[1],
           first->context.group_position[2], a, b, same_operation ? " at another place" : "");
      return;
    }
    if (first->wait == Wait::THREADGROUP_BARRIER) return;
    if (first->wait == Wait::SIMDGROUP_BARRIER) {
      if (first->flags & 2) clock_now.simd_group[index]++;
      if (first->flags & 1) clock_now.simd_device[index]++;
    }
    uint32_t active = n == LANES ? ~0u : (1u << n) - 1;
    for (uint32_t i = 0; i < n; i++) {
      lanes[i].flags = active;
      lanes[i].wait = Wait::NOTHING;
    }
  }
}

// Lets all threads pass the barrier at which they wait.  False: all have returned, or an error.
static bool pass_barrier() {
  Thread *first = nullptr, *returned = nullptr;
  for (Thread* t = threads; t < threads + thread_count; t++) {
    if (t->wait == Wait::RETURNED) {
      returned = t;
    } else if (!first) {
      first = t;
    } else if (t->site != first->site) {
      fail(DIVERGENCE, first->site, "threads %u and %u wait at two different threadgroup_barriers",
           first->context.index_in_group, t->context.index_in_group);
      return false;
    }
  }
  if (!first) return false;
  if (returned) {
    fail(DIVERGENCE, first->site, "thread %u waits in threadgroup_barrier, thread %u has returned",
         first->context.index_in_group, returned->context.index_in_group);
    return false;
  }
  launch->barriers++;
  if (first->flags & 2) clock_now.group++;
  if (first->flags & 1) clock_now.device++;
  for (Thread* t = threads; t < threads + thread_count; t++) t->wait = Wait::NOTHING;
  return true;
}

static void run_threadgroup() {
  clock_now.group_start = ++clock_now.group;
  clock_now.device_start = ++clock_now.device;
  memset(clock_now.simd_group, 0, sizeof clock_now.simd_group);
  memset(clock_now.simd_device, 0, sizeof clock_now.simd_device);
  // NaNs, and indices far out of range: whoever uses them by mistake in an unchecked run shall notice.
  for (uint32_t k = 0; k < launch->group_variable_count; k++)
    memset(launch->group_memory + launch->group_variables[k].offset, 0xff, launch->group_variables[k].size);
  uint32_t order[LANES];
  do {
    execution_order(order, simdgroup_count);
    for (uint32_t k = 0; k < simdgroup_count && !failed; k++) run_simdgroup(order[k]);
  } while (!failed && pass_barrier());
}

static void prepare_thread(uint32_t index, const uint32_t position[3], const uint32_t size[3],
                           const uint32_t full[3], const uint32_t count[3]) {
  Thread* t = threads + index;
  t->stack_pointer = fresh_stack(t->stack + STACK_SIZE, thread_main);
  t->wait = Wait::NOTHING;
  t->parity = 0;
  msl_context& c = t->context;
  c.position_in_group[0] = index % size[0];
  c.position_in_group[1] = index / size[0] % size[1];
  c.position_in_group[2] = index / size[0] / size[1];
  for (int i = 0; i < 3; i++) {
    c.group_position[i] = position[i];
    c.position_in_grid[i] = position[i] * full[i] + c.position_in_group[i];
    c.group_size[i] = size[i];
    c.nominal_group[i] = full[i];
    c.group_count[i] = count[i];
    c.grid_size[i] = launch->grid[i];
  }
  c.index_in_group = index;
  c.lane = index % LANES;
  c.simdgroup = index / LANES;
  c.simdgroups = simdgroup_count;
  c.nominal_simdgroups = (full[0] * full[1] * full[2] + LANES - 1) / LANES;
}

static bool allocate_stacks(uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    if (threads[i].stack) continue;
    void* memory = mmap(nullptr, STACK_SIZE + GUARD_SIZE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return false;
    mprotect(memory, GUARD_SIZE, PROT_NONE);
    threads[i].stack = (uint8_t*)memory + GUARD_SIZE;
  }
  return true;
}

int run_grid() {
  current = nullptr;
  random_state = launch->seed;
  clock_now = Clock{};
  memory_begin();
  uint32_t full[3], count[3];
  for (int i = 0; i < 3; i++) {
    full[i] = std::min(launch->group[i], launch->grid[i]);
    count[i] = (launch->grid[i] - 1) / full[i] + 1;
  }
  if (!allocate_stacks(full[0] * full[1] * full[2])) {
    fail(FAULT, nullptr, "no memory for the stacks of %u threads", full[0] * full[1] * full[2]);
    return 1;
  }
  uint64_t total = (uint64_t)count[0] * count[1] * count[2];
  for (uint64_t k = 0; k < total && !failed; k++) {
    uint64_t g = launch->order == BACKWARD ? total - 1 - k : k;
    uint32_t position[3] = {(uint32_t)(g % count[0]), (uint32_t)(g / count[0] % count[1]),
                            (uint32_t)(g / count[0] / count[1])};
    uint32_t size[3];  // smaller at the grid's edge: Metal launches no threads outside the grid
    for (int i = 0; i < 3; i++) size[i] = std::min(full[i], launch->grid[i] - position[i] * full[i]);
    thread_count = size[0] * size[1] * size[2];
    simdgroup_count = (thread_count + LANES - 1) / LANES;
    for (uint32_t t = 0; t < thread_count; t++) prepare_thread(t, position, size, full, count);
    run_threadgroup();
  }
  return failed;
}
