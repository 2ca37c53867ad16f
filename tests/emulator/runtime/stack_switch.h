// Switching between fibers: saves the callee-saved registers, and nothing else.
// The aarch64 version has not been run so far.
#pragma once
#include <stdint.h>
#include <string.h>

extern "C" void emulator_switch(void** save_stack_pointer, void* load_stack_pointer);

#if defined(__x86_64__)
asm(R"(
.text
.type emulator_switch,@function
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp,(%rdi)
  mov %rsi,%rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
// The initial stack pointer of a fiber that will start in `start`, which must not return.
inline void* fresh_stack(uint8_t* top, void (*start)()) {
  uint64_t* sp = (uint64_t*)((uintptr_t)top & ~15ull);
  *--sp = 0;  // the place of a return address, so that `start` finds the usual stack alignment
  *--sp = (uint64_t)start;
  for (int i = 0; i < 6; i++) *--sp = 0;
  return sp;
}
#elif defined(__aarch64__)
asm(R"(
.text
.type emulator_switch,%function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
inline void* fresh_stack(uint8_t* top, void (*start)()) {
  uint64_t* sp = (uint64_t*)((uintptr_t)top & ~15ull) - 20;
  memset(sp, 0, 160);
  sp[11] = (uint64_t)start;  // x30
  return sp;
}
#else
#error "no stack switch for this processor"
#endif
