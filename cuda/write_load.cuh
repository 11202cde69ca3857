// Channels of tokens, a few at once, from any of their types to f32 or bfloat16.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace jax_foscar::cuda {

__device__ inline float to_float(uint16_t x) { return bf16_to_float(x); }
__device__ inline float to_float(float x) { return x; }

// Eight channels from index `at` on, all 16-byte aligned.
__device__ inline void load8(const void* from, int64_t at, DType dtype, float (&x)[8]) {
  if (dtype == DType::kF32) {
    const float4* wide = reinterpret_cast<const float4*>(static_cast<const float*>(from) + at);
    reinterpret_cast<float4*>(x)[0] = wide[0], reinterpret_cast<float4*>(x)[1] = wide[1];
    return;
  }
  alignas(16) uint16_t half[8];
  *reinterpret_cast<uint4*>(half) = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from) + at);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = dtype == DType::kBF16 ? bf16_to_float(half[i]) : f16_to_float(half[i]);
}

__device__ inline uint4 load8_bf16(const void* from, int64_t at, DType dtype) {
  if (dtype == DType::kBF16) return *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from) + at);
  alignas(16) float x[8];
  load8(from, at, dtype, x);
  alignas(16) uint16_t half[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) half[i] = float_to_bf16(x[i]);
  return *reinterpret_cast<const uint4*>(half);
}

__device__ inline void copy8(uint16_t* to, const void* from, int64_t at, DType dtype) {
  *reinterpret_cast<uint4*>(to) = load8_bf16(from, at, dtype);
}
__device__ inline void copy8(float* to, const void* from, int64_t at, DType dtype) {
  alignas(16) float x[8];
  load8(from, at, dtype, x);
  reinterpret_cast<float4*>(to)[0] = reinterpret_cast<const float4*>(x)[0];
  reinterpret_cast<float4*>(to)[1] = reinterpret_cast<const float4*>(x)[1];
}

__device__ inline void load4(const uint16_t* from, float (&x)[4]) {
  const uint2 pairs = *reinterpret_cast<const uint2*>(from);
  x[0] = float_of_bits(pairs.x << 16), x[1] = float_of_bits(pairs.x & 0xffff0000u);
  x[2] = float_of_bits(pairs.y << 16), x[3] = float_of_bits(pairs.y & 0xffff0000u);
}
__device__ inline void load4(const float* from, float (&x)[4]) {
  const float4 wide = *reinterpret_cast<const float4*>(from);
  x[0] = wide.x, x[1] = wide.y, x[2] = wide.z, x[3] = wide.w;
}

}  // namespace jax_foscar::cuda
