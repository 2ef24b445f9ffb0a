// Ways to decode a word of eight codes, for `python -m benchmarks.metal_profile` to count what each costs. `scale` multiplies in float.
namespace variants {

// One part of a run.
template <typename E>
METAL_FUNC void ours(uint word, uint high, float scale, thread float* out) {
  const billfish::Part part = {{word, 0}, high};
  #pragma unroll
  for (int t = 0; t < 4; t++) {
    const half2 both = E::pair(part, t);
    const float unit = E::bias == 0 ? E::unit(t) * scale : E::unit(t);
    out[2 * t] = E::bias == 0 ? float(both.x) * unit : fma(float(both.x), unit, float(-E::bias)) * scale;
    out[2 * t + 1] = E::bias == 0 ? float(both.y) * unit : fma(float(both.y), unit, float(-E::bias)) * scale;
  }
}

}  // namespace variants

// ---- E2M1

extern "C" void fp4_masked(uint word, float scale, thread float* out) {
  variants::ours<billfish::Element<billfish::Nibbles<0>, billfish::E2M1<1>>>(word, 0, scale, out);
}

// Codes in their natural order, moved.
extern "C" void fp4_shift(uint word, float scale, thread float* out) {
  const float with_bias = scale * 16384.0f;
  #pragma unroll
  for (int j = 0; j < 4; j++) {
    const uint lanes = word << (12 - 4 * j);
    const half2 raw = as_type<half2>((lanes & 0x80008000u) | ((lanes & 0x70007000u) >> 3));
    out[j] = float(raw.x) * with_bias;
    out[j + 4] = float(raw.y) * with_bias;
  }
}

// Field by field, as one would write it down.
extern "C" void fp4_fields(uint word, float scale, thread float* out) {
  #pragma unroll
  for (int j = 0; j < 8; j++) {
    const uint code = (word >> (4 * j)) & 15;
    const uint exponent = (code >> 1) & 3, mantissa = code & 1;
    const float value = exponent == 0 ? float(mantissa) * 0.5f : float(1u << (exponent - 1)) * (1.0f + float(mantissa) * 0.5f);
    out[j] = (code & 8 ? -value : value) * scale;
  }
}

constant float FP4_TABLE[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

extern "C" void fp4_table(uint word, float scale, thread float* out) {
  #pragma unroll
  for (int j = 0; j < 8; j++) out[j] = FP4_TABLE[(word >> (4 * j)) & 15] * scale;
}

// ---- integers

extern "C" void u4b8_masked(uint word, float scale, thread float* out) {
  variants::ours<billfish::Element<billfish::Nibbles<0>, billfish::Integer<8>>>(word, 0, scale, out);
}

// 0x6400 is the half 1024, whose last bit is worth 1.
extern "C" void u4b8_magic(uint word, float scale, thread float* out) {
  #pragma unroll
  for (int j = 0; j < 4; j++) {
    const half2 both = as_type<half2>((word >> (4 * j) & 0x000F000Fu) | 0x64006400u) - half2(half(1032));
    out[j] = float(both.x) * scale;
    out[j + 4] = float(both.y) * scale;
  }
}

extern "C" void u4b8_convert(uint word, float scale, thread float* out) {
  #pragma unroll
  for (int j = 0; j < 8; j++) out[j] = float(int((word >> (4 * j)) & 15) - 8) * scale;
}

constant float U4B8_TABLE[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

extern "C" void u4b8_table(uint word, float scale, thread float* out) {
  #pragma unroll
  for (int j = 0; j < 8; j++) out[j] = U4B8_TABLE[(word >> (4 * j)) & 15] * scale;
}

extern "C" void u5b16_masked(uint word, uint high, float scale, thread float* out) {
  variants::ours<billfish::Element<billfish::Nibbles<1>, billfish::Integer<16>>>(word, high, scale, out);
}

extern "C" void u5b16_convert(uint word, uint high, float scale, thread float* out) {
  #pragma unroll
  for (int j = 0; j < 8; j++) {
    const uint code = ((word >> (4 * j)) & 15) | ((high >> j) & 1) << 4;
    out[j] = float(int(code) - 16) * scale;
  }
}

extern "C" void iq4nl_table(uint word, float scale, thread float* out) {
  variants::ours<billfish::Element<billfish::Nibbles<0>, billfish::Looked>>(word, 0, scale, out);
}
