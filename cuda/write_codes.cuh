// The arithmetic of whole tiles: two bfloat16 at once, and codes to the bit of `code` of quantize.h, in fewer
// instructions.
#pragma once

#include <cstdint>

#include "quantize.h"

namespace jax_foscar::cuda::whole {

// --- Two bfloat16 at once ------------------------------------------------------------------------------------------

__device__ inline uint32_t min2(uint32_t x, uint32_t y) {
  asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  return x;
}
__device__ inline uint32_t max2(uint32_t x, uint32_t y) {
  asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  return x;
}
__device__ inline uint32_t negate2(uint32_t x) { return x ^ 0x80008000u; }

__device__ inline float low_half(uint32_t x) { return float_of_bits(x << 16); }
__device__ inline float high_half(uint32_t x) { return float_of_bits(x & 0xffff0000u); }

// --- Codes -----------------------------------------------------------------------------------------------------------

// An Affine whose steps are taken as parts of the power of two above the levels, so that saturating to [0, 1] is half
// of the clamp.  Scaling by a power of two is exact here: the scale is a f16.
template <int kBits>
constexpr float kTop = kBits == 2 ? 4.0f : 16.0f;

template <int kBits>
__device__ float2 scaled(Affine x) {
  return make_float2(x.inverse * (1 / kTop<kBits>), x.quarter);
}

// What four bytes start from: the exponents that `add_code` leaves in them sum up to 0 then.
constexpr uint32_t kEmpty = 0u - 0x4b400000u * 0x01010101u;

template <int kBits>
__device__ void add_code(uint32_t* bytes, int shift, float x, float2 group) {
  constexpr float kLevels = (kTop<kBits> - 1) / kTop<kBits>;
  float part;  // NaN becomes 0
  asm("mul.ftz.sat.f32 %0, %1, %2;" : "=f"(part) : "f"(__fmaf_rn(x, 0.25f, -group.y)), "f"(group.x));
  part = fminf(part, kLevels);
  *bytes += bits_of_float(__fmaf_rn(part, kTop<kBits>, 0x1.8p23f)) << shift;
}

// --- Four neighbouring channels of a token ---------------------------------------------------------------------------

__device__ inline float channel(uint2 x, int i) {
  const uint32_t pair = i < 2 ? x.x : x.y;
  return i % 2 == 0 ? low_half(pair) : high_half(pair);
}

// What `scaled` gives for the group of each.
struct Groups {
  float2 of[4];

  __device__ explicit Groups(float2 all) : of{all, all, all, all} {}
  __device__ explicit Groups(const float2* each) {
    const float4* pairs = reinterpret_cast<const float4*>(each);
    const float4 low = pairs[0], high = pairs[1];
    of[0] = make_float2(low.x, low.y), of[1] = make_float2(low.z, low.w);
    of[2] = make_float2(high.x, high.y), of[3] = make_float2(high.z, high.w);
  }
};

// Their codes, as the bytes of a word.
template <int kBits>
__device__ uint32_t four_codes(uint2 x, const Groups& groups) {
  uint32_t bytes = kEmpty;
#pragma unroll
  for (int i = 0; i < 4; ++i) add_code<kBits>(&bytes, 8 * i, channel(x, i), groups.of[i]);
  return bytes;
}

// Their codes, as one byte of a word each.
template <int kBits>
__device__ void add_codes(uint32_t (&words)[4], int byte, uint2 x, const Groups& groups) {
#pragma unroll
  for (int i = 0; i < 4; ++i) add_code<kBits>(&words[i], 8 * byte, channel(x, i), groups.of[i]);
}

}  // namespace jax_foscar::cuda::whole
