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

// The ranges of pairs of channels.
struct PairRange {
  uint32_t low = 0x7f807f80, high = 0xff80ff80;

  __device__ void add(uint32_t x) { low = min2(low, x), high = max2(high, x); }
};

// --- Codes -----------------------------------------------------------------------------------------------------------

// An Affine whose steps are taken as parts of the power of two above the levels, so that saturating to [0, 1] is half
// of the clamp.  Scaling by a power of two is exact here: the scale is a f16.
template <int kBits>
constexpr float kTop = kBits == 2 ? 4.0f : 16.0f;

template <int kBits>
__device__ float2 scaled(Affine x) {
  return make_float2(x.inverse * (1 / kTop<kBits>), x.quarter);
}

// The nearest number of steps, up to kTop: the product is a subnormal, whose bits count units of 2^-149.
template <int kBits>
__device__ int steps_of(float x, float2 group) {
  float part, steps;
  asm("mul.ftz.sat.f32 %0, %1, %2;" : "=f"(part) : "f"(__fmaf_rn(x, 0.25f, -group.y)), "f"(group.x));  // of NaN: 0
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(steps) : "f"(part), "f"(kTop<kBits> * 0x1p-149f));
  return static_cast<int>(bits_of_float(steps));
}

// Appends two codes below the others, no larger than they may be.
template <int kBits>
__device__ void push_codes(uint32_t& codes, int upper, int lower) {
  if constexpr (kBits == 2) {
    asm("cvt.pack.sat.u2.s32.b32 %0, %1, %2, %0;" : "+r"(codes) : "r"(upper), "r"(lower));
  } else {
    asm("cvt.pack.sat.u4.s32.b32 %0, %1, %2, %0;" : "+r"(codes) : "r"(upper), "r"(lower));
  }
}

// --- A byte's fields of four neighbouring channels -------------------------------------------------------------------

__device__ inline uint2 load_channels(const uint16_t* from) { return *reinterpret_cast<const uint2*>(from); }

template <int kBits, bool kValue>
struct Block {
  static constexpr int kFields = 8 / kBits, kChannels = 128 / kBits;
  static constexpr int field_channel(int f) {
    return kValue ? value_field_channel(false, f) : key_field_channel(kBits, false, f);
  }

  // What a token has of it.
  struct Token {
    uint2 fields[kFields];

    __device__ explicit Token(const uint16_t* first) {
#pragma unroll
      for (int f = 0; f < kFields; ++f) fields[f] = load_channels(first + field_channel(f));
    }
    __device__ float channel(int f, int i) const {
      const uint32_t pair = i < 2 ? fields[f].x : fields[f].y;
      return i % 2 == 0 ? low_half(pair) : high_half(pair);
    }
  };

  float2 groups[kFields][4];  // `scaled`, of each channel

  // Of block b, from those of a token, a group for 1 << shift times 32 channels.
  __device__ void load_token_groups(const float2* of_token, int b, int shift) {
#pragma unroll
    for (int f = 0; f < kFields; ++f) {
      const float2 group = of_token[(b * (kChannels / 32) + field_channel(f) / 32) >> shift];
#pragma unroll
      for (float2& of : groups[f]) of = group;
    }
  }
  // From those of channels, of which these are the first.
  __device__ void load_channel_groups(const float2* of_channels) {
#pragma unroll
    for (int f = 0; f < kFields; ++f) {
      const float4* pairs = reinterpret_cast<const float4*>(of_channels + field_channel(f));
      const float4 low = pairs[0], high = pairs[1];
      groups[f][0] = make_float2(low.x, low.y), groups[f][1] = make_float2(low.z, low.w);
      groups[f][2] = make_float2(high.x, high.y), groups[f][3] = make_float2(high.z, high.w);
    }
  }

  // Appends the byte of a token's channel i.
  __device__ void push_byte(uint32_t& codes, const Token& x, int i) const {
#pragma unroll
    for (int f = kFields - 1; f > 0; f -= 2)
      push_codes<kBits>(codes, steps_of<kBits>(x.channel(f, i), groups[f][i]),
                        steps_of<kBits>(x.channel(f - 1, i), groups[f - 1][i]));
  }
};

}  // namespace jax_foscar::cuda::whole
