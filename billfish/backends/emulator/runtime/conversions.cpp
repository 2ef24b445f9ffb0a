// Conversions that x86 has no instructions for. Compilers call them by these names and expect them in their own library.
#if defined(__x86_64__)

namespace {

// To float, rounded to odd: toward zero, and the last bit set if anything was lost. A second rounding to fewer bits is
// then as good as one.
float round_to_odd(double x) {
  float nearest = (float)x;
  if ((double)nearest == x || x != x) return nearest;
  unsigned bits = __builtin_bit_cast(unsigned, nearest);
  bool beyond = __builtin_fabs((double)nearest) > __builtin_fabs(x);
  return __builtin_bit_cast(float, (bits - beyond) | 1);
}

__bf16 from_float(float x) {
  unsigned bits = __builtin_bit_cast(unsigned, x);
  unsigned short out = x != x ? bits >> 16 | 0x40 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return __builtin_bit_cast(__bf16, out);
}

}  // namespace

extern "C" __bf16 __truncsfbf2(float x) { return from_float(x); }
extern "C" __bf16 __truncdfbf2(double x) { return from_float(round_to_odd(x)); }
extern "C" _Float16 __truncdfhf2(double x) { return (_Float16)round_to_odd(x); }

#endif
