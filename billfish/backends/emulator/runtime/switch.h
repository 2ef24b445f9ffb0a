// emulator_switch(save, to): pushes the registers that a called function must keep, stores the stack pointer to *save,
// takes `to` as the stack pointer and pops. A fresh stack is laid out so that the last step "returns" into the fiber's entry.
#pragma once

#ifdef __APPLE__
#define SYMBOL "_emulator_switch"
#else
#define SYMBOL "emulator_switch"
#endif

extern "C" void emulator_switch(void** save, void* to);

#if defined(__aarch64__)

constexpr int saved_words = 20, return_word = 11;  // x19..x28, x29, x30 (the return address), d8..d15

asm(".text\n.p2align 4\n.globl " SYMBOL "\n" SYMBOL ":\n"
    "  stp x19, x20, [sp, #-160]!\n"
    "  stp x21, x22, [sp, #16]\n"
    "  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n"
    "  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n"
    "  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n"
    "  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n"
    "  str x9, [x0]\n"
    "  mov sp, x1\n"
    "  ldp x21, x22, [sp, #16]\n"
    "  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n"
    "  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n"
    "  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n"
    "  ldp d14, d15, [sp, #144]\n"
    "  ldp x19, x20, [sp], #160\n"
    "  ret\n");

#elif defined(__x86_64__)

// Six pushed registers, the return address, and one word more: at a function's entry rsp + 8 is a multiple of 16.
constexpr int saved_words = 8, return_word = 6;

asm(".text\n.p2align 4\n.globl " SYMBOL "\n" SYMBOL ":\n"
    "  push %rbp\n  push %rbx\n  push %r12\n  push %r13\n  push %r14\n  push %r15\n"
    "  mov %rsp, (%rdi)\n"
    "  mov %rsi, %rsp\n"
    "  pop %r15\n  pop %r14\n  pop %r13\n  pop %r12\n  pop %rbx\n  pop %rbp\n"
    "  ret\n");

#else
#error "The Metal emulator runs on aarch64 and x86_64."
#endif
