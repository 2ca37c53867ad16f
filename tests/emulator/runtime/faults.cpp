// Errors, signals and the time limit: whatever a kernel does, the launch ends and the process goes on.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "state.h"

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

Launch* launch;
bool failed;
static sigjmp_buf way_out;
static volatile pid_t runner;  // the system thread that runs a launch, or 0

static void describe_thread(char* text, size_t size) {
  const msl_context& c = current->context;
  snprintf(text, size, " [thread (%u,%u,%u) of threadgroup (%u,%u,%u), simdgroup %u, lane %u]",
           c.position_in_group[0], c.position_in_group[1], c.position_in_group[2], c.group_position[0],
           c.group_position[1], c.group_position[2], c.simdgroup, c.lane);
}

void fail(ErrorKind kind, void* pc, const char* format, ...) {
  if (!failed) {
    failed = true;
    launch->error_kind = kind;
    launch->error_pc = pc;
    const size_t size = sizeof launch->error;
    va_list arguments;
    va_start(arguments, format);
    size_t n = vsnprintf(launch->error, size, format, arguments);
    va_end(arguments);
    if (current && n < size) describe_thread(launch->error + n, size - n);
  }
  if (!current) return;
  current->wait = Wait::RETURNED;
  yield_to_scheduler();
}

static void* program_counter(void* context) {
#if defined(__x86_64__)
  return (void*)(((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP] + 1);
#else
  return (void*)(((ucontext_t*)context)->uc_mcontext.pc + 1);
#endif
}

static const int CAUGHT[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP};
constexpr int CAUGHT_COUNT = sizeof CAUGHT / sizeof *CAUGHT;
static int time_signal() { return SIGRTMIN + 6; }

static void on_signal(int number, siginfo_t* info, void* context) {
  if (runner != (pid_t)syscall(SYS_gettid)) {
    if (number == time_signal()) return;
    signal(number, SIG_DFL);  // somebody else's fault: it happens again, with the default outcome
    return;
  }
  const uint8_t* address = (const uint8_t*)info->si_addr;
  Thread* t = current;
  ErrorKind kind = FAULT;
  const char* text = "access to memory that does not exist";
  if (number == time_signal()) {
    kind = TIMEOUT, text = "the launch takes longer than its time limit";
  } else if ((number == SIGILL || number == SIGTRAP) && launch->checked) {
    // The trap of -fsanitize=local-bounds, where the compiler sees which variable a pointer points into.
    kind = OUT_OF_BOUNDS, text = "access outside the variable that the pointer points into";
  } else if (number == SIGILL || number == SIGTRAP) {
    kind = UNDEFINED, text = "the compiler has proved that this place has undefined behaviour";
  } else if (number == SIGFPE) {
    kind = UNDEFINED, text = "integer division by zero, or of the least integer by -1";
  } else if (t && address >= t->stack - GUARD_SIZE && address < t->stack) {
    kind = STACK, text = TOO_MUCH_STACK;
  }
  void* pc = program_counter(context);
  if (!failed) {
    failed = true;
    launch->error_kind = kind;
    launch->error_pc = pc;
    size_t n = snprintf(launch->error, sizeof launch->error, "%s", text);
    if (t) describe_thread(launch->error + n, sizeof launch->error - n);
  }
  siglongjmp(way_out, 1);
}

// Float32 denormals are zero on Apple's GPUs; half and bfloat conversions keep theirs.
static uint64_t set_float_mode(bool flush) {
#if defined(__x86_64__)
  uint32_t old = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(flush ? old | 0x8040u : old & ~0x8040u);
  return old;
#else
  uint64_t old;
  asm volatile("mrs %0, fpcr" : "=r"(old));
  asm volatile("msr fpcr, %0" ::"r"(flush ? old | 1ull << 24 : old & ~(1ull << 24)));
  return old;
#endif
}
static void restore_float_mode(uint64_t old) {
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr((uint32_t)old);
#else
  asm volatile("msr fpcr, %0" ::"r"(old));
#endif
}

static bool start_timer(timer_t* timer) {
  sigevent event;
  memset(&event, 0, sizeof event);
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = time_signal();
  event.sigev_notify_thread_id = (pid_t)syscall(SYS_gettid);
  if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, timer)) return false;
  itimerspec limit;
  memset(&limit, 0, sizeof limit);
  limit.it_value.tv_sec = (time_t)launch->time_limit;
  limit.it_value.tv_nsec = (long)((launch->time_limit - (double)limit.it_value.tv_sec) * 1e9) + 1;
  return timer_settime(*timer, 0, &limit, nullptr) == 0;
}

extern "C" int emulator_run(Launch* l) {
  // Handlers need a stack of their own: the fault may be that the fiber's is used up.
  static uint8_t signal_stack[64 * 1024];
  launch = l;
  failed = false;
  stack_t stack = {}, old_stack;
  stack.ss_sp = signal_stack;
  stack.ss_size = sizeof signal_stack;
  sigaltstack(&stack, &old_stack);
  struct sigaction action, old_actions[CAUGHT_COUNT], old_timer_action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < CAUGHT_COUNT; i++) sigaction(CAUGHT[i], &action, &old_actions[i]);
  sigaction(time_signal(), &action, &old_timer_action);
  uint64_t float_mode = set_float_mode(l->flush_denormals);
  timer_t timer;

  volatile bool timed = false;
  volatile int rc = 1;
  if (!sigsetjmp(way_out, 1)) {
    runner = (pid_t)syscall(SYS_gettid);
    timed = start_timer(&timer);
    if (timed)
      rc = run_grid();
    else
      fail(FAULT, nullptr, "the system gives no timer for the time limit");
  }
  runner = 0;
  current = nullptr;
  if (timed) timer_delete(timer);

  restore_float_mode(float_mode);
  for (int i = 0; i < CAUGHT_COUNT; i++) sigaction(CAUGHT[i], &old_actions[i], nullptr);
  sigaction(time_signal(), &old_timer_action, nullptr);
  old_stack.ss_flags &= ~SS_ONSTACK;
  sigaltstack(&old_stack, nullptr);
  return rc;
}
