// The keywords of Metal, as macros, and last of all: they must not be seen by the shim itself. Address spaces vanish, but
// for the lint.
#pragma once

using metal::as_type;
using metal::vec;

#define __METAL__ 1
#define __METAL_VERSION__ 320
#define METAL_FUNC inline __attribute__((always_inline))

#ifdef EMULATOR_LINT
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
#endif
#define thread
#define kernel
#define ray_data
#define object_data

// Vector types are names in every scope, and their constructors are calls.
using metal::bool2;
using metal::packed_bool2;
using metal::bool3;
using metal::packed_bool3;
using metal::bool4;
using metal::packed_bool4;
using metal::char2;
using metal::packed_char2;
using metal::char3;
using metal::packed_char3;
using metal::char4;
using metal::packed_char4;
using metal::uchar2;
using metal::packed_uchar2;
using metal::uchar3;
using metal::packed_uchar3;
using metal::uchar4;
using metal::packed_uchar4;
using metal::short2;
using metal::packed_short2;
using metal::short3;
using metal::packed_short3;
using metal::short4;
using metal::packed_short4;
using metal::ushort2;
using metal::packed_ushort2;
using metal::ushort3;
using metal::packed_ushort3;
using metal::ushort4;
using metal::packed_ushort4;
using metal::int2;
using metal::packed_int2;
using metal::int3;
using metal::packed_int3;
using metal::int4;
using metal::packed_int4;
using metal::uint2;
using metal::packed_uint2;
using metal::uint3;
using metal::packed_uint3;
using metal::uint4;
using metal::packed_uint4;
using metal::long2;
using metal::packed_long2;
using metal::long3;
using metal::packed_long3;
using metal::long4;
using metal::packed_long4;
using metal::ulong2;
using metal::packed_ulong2;
using metal::ulong3;
using metal::packed_ulong3;
using metal::ulong4;
using metal::packed_ulong4;
using metal::half2;
using metal::packed_half2;
using metal::half3;
using metal::packed_half3;
using metal::half4;
using metal::packed_half4;
using metal::float2;
using metal::packed_float2;
using metal::float3;
using metal::packed_float3;
using metal::float4;
using metal::packed_float4;
using metal::bfloat2;
using metal::packed_bfloat2;
using metal::bfloat3;
using metal::packed_bfloat3;
using metal::bfloat4;
using metal::packed_bfloat4;

#define bool2(...) ::metal::make_bool2(__VA_ARGS__)
#define bool3(...) ::metal::make_bool3(__VA_ARGS__)
#define bool4(...) ::metal::make_bool4(__VA_ARGS__)
#define char2(...) ::metal::make_char2(__VA_ARGS__)
#define char3(...) ::metal::make_char3(__VA_ARGS__)
#define char4(...) ::metal::make_char4(__VA_ARGS__)
#define uchar2(...) ::metal::make_uchar2(__VA_ARGS__)
#define uchar3(...) ::metal::make_uchar3(__VA_ARGS__)
#define uchar4(...) ::metal::make_uchar4(__VA_ARGS__)
#define short2(...) ::metal::make_short2(__VA_ARGS__)
#define short3(...) ::metal::make_short3(__VA_ARGS__)
#define short4(...) ::metal::make_short4(__VA_ARGS__)
#define ushort2(...) ::metal::make_ushort2(__VA_ARGS__)
#define ushort3(...) ::metal::make_ushort3(__VA_ARGS__)
#define ushort4(...) ::metal::make_ushort4(__VA_ARGS__)
#define int2(...) ::metal::make_int2(__VA_ARGS__)
#define int3(...) ::metal::make_int3(__VA_ARGS__)
#define int4(...) ::metal::make_int4(__VA_ARGS__)
#define uint2(...) ::metal::make_uint2(__VA_ARGS__)
#define uint3(...) ::metal::make_uint3(__VA_ARGS__)
#define uint4(...) ::metal::make_uint4(__VA_ARGS__)
#define long2(...) ::metal::make_long2(__VA_ARGS__)
#define long3(...) ::metal::make_long3(__VA_ARGS__)
#define long4(...) ::metal::make_long4(__VA_ARGS__)
#define ulong2(...) ::metal::make_ulong2(__VA_ARGS__)
#define ulong3(...) ::metal::make_ulong3(__VA_ARGS__)
#define ulong4(...) ::metal::make_ulong4(__VA_ARGS__)
#define half2(...) ::metal::make_half2(__VA_ARGS__)
#define half3(...) ::metal::make_half3(__VA_ARGS__)
#define half4(...) ::metal::make_half4(__VA_ARGS__)
#define float2(...) ::metal::make_float2(__VA_ARGS__)
#define float3(...) ::metal::make_float3(__VA_ARGS__)
#define float4(...) ::metal::make_float4(__VA_ARGS__)
#define bfloat2(...) ::metal::make_bfloat2(__VA_ARGS__)
#define bfloat3(...) ::metal::make_bfloat3(__VA_ARGS__)
#define bfloat4(...) ::metal::make_bfloat4(__VA_ARGS__)
#define static_cast ::metal::cast

// `threadgroup half tile[64][32];` has been rewritten to EMULATOR_THREADGROUP(tile, half[64][32]).
#ifdef __APPLE__
#define EMULATOR_RECORDS __attribute__((used, section("__DATA,emu_vars")))
#else
#define EMULATOR_RECORDS __attribute__((used, section("emu_vars")))
#endif
#ifdef EMULATOR_LINT
#define EMULATOR_THREADGROUP(name, ...)  \
  using name##_type = __VA_ARGS__; \
  static threadgroup name##_type name
#else
#define EMULATOR_THREADGROUP(name, ...)                                                                \
  static __attribute__((used)) ::emulator::Storage<__VA_ARGS__> name##_storage;                        \
  static EMULATOR_RECORDS ::emulator::Variable name##_record{#name, &name##_storage.value, sizeof(name##_storage.value)}; \
  auto& name = name##_storage.value
#endif
