// Single values of a float dtype to and from f32, rounding to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

#include "params.h"

namespace jax_foscar {

JF_HOST_DEVICE inline float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

JF_HOST_DEVICE inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

JF_HOST_DEVICE inline float bf16_to_float(uint16_t x) { return float_of_bits(uint32_t{x} << 16); }

JF_HOST_DEVICE inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = bits_of_float(x);
  if (x != x) return static_cast<uint16_t>(bits >> 16 | (bits & 0xffff ? 0x40 : 0));  // a bf16 NaN stays as it is
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

JF_HOST_DEVICE inline float f16_to_float(uint16_t x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
#else
  const uint32_t sign = uint32_t{x} >> 15 << 31, exponent = x >> 10 & 31, mantissa = x & 0x3ff;
  if (exponent == 31) return float_of_bits(sign | 0x7f800000 | mantissa << 13);
  if (exponent != 0) return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
  const float small = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -small : small;
#endif
}

JF_HOST_DEVICE inline uint16_t float_to_f16(float x) {
  const uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
#if defined(__CUDA_ARCH__)
  uint16_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#else
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds past 65504
  if (magnitude < 0x38800000) {  // subnormal: adding 0.5 leaves multiples of 2^-24, rounded to even
    return static_cast<uint16_t>(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13);
#endif
}

JF_HOST_DEVICE inline float load_float(const void* from, int64_t index, DType dtype) {
  if (dtype == DType::kF32) return static_cast<const float*>(from)[index];
  const uint16_t half = static_cast<const uint16_t*>(from)[index];
  return dtype == DType::kBF16 ? bf16_to_float(half) : f16_to_float(half);
}

JF_HOST_DEVICE inline void store_float(void* to, int64_t index, DType dtype, float x) {
  if (dtype == DType::kF32) {
    static_cast<float*>(to)[index] = x;
  } else {
    static_cast<uint16_t*>(to)[index] = dtype == DType::kBF16 ? float_to_bf16(x) : float_to_f16(x);
  }
}

}  // namespace jax_foscar
