// The instructions that the kernels use, by name. No header of the toolkit is included: NVRTC alone compiles this.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define INFINITE __int_as_float(0x7f800000)

// ---- bits ---------------------------------------------------------------------------------------------------------

// (a & b) | c and (~a & b) | c, one instruction each.
DEVICE u32 and_or(u32 a, u32 b, u32 c) { u32 r; asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
DEVICE u32 andnot_or(u32 a, u32 b, u32 c) { u32 r; asm("lop3.b32 %0, %1, %2, %3, 0xae;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
// Nibble i of `select` says which of the 8 bytes of (b, a) becomes byte i.
DEVICE u32 permute(u32 a, u32 b, u32 select) { u32 r; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(select)); return r; }

DEVICE u32 reversed(u32 bits) { u32 r; asm("brev.b32 %0, %1;" : "=r"(r) : "r"(bits)); return r; }

// The low or the high half of a pair, twice. Instructions on pairs take an operand like that, so it costs nothing.
DEVICE u32 twice(u32 pair, bool high) {
  u32 r;
  if (high) asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(r) : "r"(pair));
  else asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(r) : "r"(pair));
  return r;
}
DEVICE u32 negated2(u32 pair) { return pair ^ 0x80008000; }

// A value that the compiler keeps in a register, rather than working it out again wherever it is used.
DEVICE u32 opaque(u32 v) { asm volatile("" : "+r"(v)); return v; }

// ---- the two types of x, as pairs in a register ---------------------------------------------------------------------

struct F16 {
  static constexpr bool is_half = true;
  DEVICE u32 fma2(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
  DEVICE u32 mul2(u32 a, u32 b) { u32 r; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
  DEVICE u32 add2(u32 a, u32 b) { u32 r; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
  DEVICE u32 pack(float low, float high) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
  // Numbers beyond 65504 become that, not infinite: models trained in bfloat16 have some.
  DEVICE u32 pack_finite(float low, float high) { u32 r; asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
  DEVICE float to_float(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
  static constexpr u32 ones = 0x3c003c00;
  DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

struct BF16 {
  static constexpr bool is_half = false;
  DEVICE u32 fma2(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
  // Before sm_90 there is only the fma; -0 and 1 change nothing.
  DEVICE u32 mul2(u32 a, u32 b) { return fma2(a, b, 0x80008000); }
  DEVICE u32 add2(u32 a, u32 b) { return fma2(a, 0x3f803f80, b); }
  DEVICE u32 pack(float low, float high) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
  DEVICE u32 pack_finite(float low, float high) { return pack(low, high); }
  DEVICE float to_float(u16 h) { return __uint_as_float((u32)h << 16); }
  static constexpr u32 ones = 0x3f803f80;
  DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// ---- memory -------------------------------------------------------------------------------------------------------

// Weights are read once: they take no room in L1.
DEVICE uint4 load_stream(const void* p) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}
DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE uint4 load_shared16(u32 address) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(address));
  return r;
}
DEVICE void store_shared16(u32 address, float4 v) { asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory"); }
DEVICE void store_shared4(u32 address, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory"); }
DEVICE uint2 load_shared8(u32 address) { uint2 r; asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(address)); return r; }
DEVICE u32 load_shared4(u32 address) { u32 r; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address)); return r; }
// 16 bytes, of which those from `valid` on become zero.
DEVICE void copy_async(u32 to, const void* from, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
DEVICE void load_matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// Programmatic dependent launch: the next kernel may start; and: wait until the previous one has ended.
#if __CUDA_ARCH__ >= 900
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
DEVICE void let_next_start() {}
DEVICE void wait_for_previous() {}
#endif

// ---- what is done to a sum before it is rounded and stored -----------------------------------------------------------

// The bias is of x's type, or float32 (BIAS_F32), or not there. Loaded first and converted later, it is waited for later.
#ifdef BIAS_F32
typedef float Bias;
DEVICE float bias_value(Bias b) { return b; }
#elif defined(TYPE)
typedef u16 Bias;
DEVICE float bias_value(Bias b) { return TYPE::to_float(b); }
#endif
#ifdef TYPE
DEVICE Bias load_bias(const void* bias, int i) { return bias ? __ldg((const Bias*)bias + i) : (Bias)0; }
#endif

enum Activation { IDENTITY, RELU, SILU, GELU, GELU_TANH, CLAMPED_SILU };

#ifndef ACTIVATION
#define ACTIVATION IDENTITY
#endif
template <Activation A> DEVICE float activated(float v) {
  if constexpr (A == RELU) return fmaxf(v, 0.0f);
  else if constexpr (A == SILU) return v / (1.0f + expf(-v));
  else if constexpr (A == GELU) return 0.5f * v * (1.0f + erff(v * 0.70710678f));
  else if constexpr (A == GELU_TANH) return v / (1.0f + expf(-1.59576912f * (v + 0.044715f * v * v * v)));  // 2 sqrt(2 / pi)
  else return v;
}
DEVICE float activate(float v) { return activated<ACTIVATION>(v); }

// GATE: columns of y come in sixteens, eight gates and the eight numbers that they let through: y has half as many columns.
#ifdef GATE
constexpr int GATED = 1;
DEVICE float pass_gate(float gate, float v) {
  if constexpr (GATE == CLAMPED_SILU) {  // of gpt-oss; comparisons such that NaN stays
    const float g = gate > 7 ? 7 : gate, u = v > 7 ? 7 : v < -7 ? -7 : v;
    return g / (1.0f + expf(-1.702f * g)) * (u + 1);
  } else return activated<GATE>(gate) * v;
}
#else
constexpr int GATED = 0;
DEVICE float pass_gate(float gate, float v) { return v; }
#endif
