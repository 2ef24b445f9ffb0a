// Behind the kernel: how the runtime finds its way in. Included last.
#pragma once

inline uint3 emulator_uint3(emulator::Uint3 u) { return uint3{u.x, u.y, u.z}; }

#ifdef __APPLE__
extern "C" emulator::Variable emulator_first_variable[] asm("section$start$__DATA$emu_vars");
extern "C" emulator::Variable emulator_end_of_variables[] asm("section$end$__DATA$emu_vars");
#else
extern "C" __attribute__((weak, visibility("hidden"))) emulator::Variable __start_emu_vars[];
extern "C" __attribute__((weak, visibility("hidden"))) emulator::Variable __stop_emu_vars[];
#define emulator_first_variable __start_emu_vars
#define emulator_end_of_variables __stop_emu_vars
#endif

extern "C" EMULATOR_UNSEEN emulator::Variable* emulator_variables(unsigned long* count) {
  *count = emulator_end_of_variables - emulator_first_variable;
  return emulator_first_variable;
}
