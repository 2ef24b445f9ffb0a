// Prints the best ISA level of this machine, for CMake.
#include <cstdio>

#include "bind/machine_levels.h"

int main() {
  for (const char* name : {"neon_i8mm", "neon_dotprod", "amx", "avx512_vnni", "avx_vnni", "avx2", "portable"})
    if (billfish::runs_here(name)) {
      std::puts(name);
      return 0;
    }
  return 1;
}
