// The quantization of one group, as jax_foscar/quantize.py states it, to the bit.
//
// Every operation is rounded for itself: files that include this are compiled without contraction to FMA.  XLA flushes
// subnormals on the host, where the kernel runs on its threads; CUDA does with -ftz=true.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "dtype.h"

namespace jax_foscar {

// The range of a group; NaN once a value is.
struct Range {
  float low = INFINITY, high = -INFINITY;

  JF_HOST_DEVICE void add(float x) { merge(x, x); }
  JF_HOST_DEVICE void merge(float other_low, float other_high) {
#if defined(__CUDA_ARCH__)
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(low) : "f"(other_low));
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(high) : "f"(other_high));
#else
    low = other_low < low || other_low != other_low ? other_low : low;
    high = other_high > high || other_high != other_high ? other_high : high;
#endif
  }
};

// What a group's codes are chosen against: the parameters, rounded as they are stored.
struct Affine {
  float inverse;  // 4 / scale; 0 makes every code 0
  float quarter;  // offset / 4
};

// A group's parameters as they are stored: NaN where a value is not finite.
struct Pair {
  float scale, offset;
  uint32_t halves;  // both as f16
  Affine affine;
};

JF_HOST_DEVICE inline float clamp(float x, float limit) { return x < -limit ? -limit : x > limit ? limit : x; }

// 4 / scale, rounded once.
JF_HOST_DEVICE inline float inverse_of(float scale, [[maybe_unused]] bool is_half) {
#if defined(__CUDA_ARCH__)
  // What the division comes to after its checks of ranges, which a f16 cannot leave.
  if (is_half) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(scale));
    return 4.0f * __fmaf_rn(y, __fmaf_rn(-scale, y, 1.0f), y);
  }
#endif
  return 4.0f / scale;
}

JF_HOST_DEVICE inline Pair make_pair(Range range, int bits, DType dtype) {
  const bool finite = range.low >= -FLT_MAX && range.high <= FLT_MAX;  // false for NaN
  const bool half = dtype == DType::kF16;
  const float limit = half ? 65504.0f : FLT_MAX;
  // -0 is stored as 0, so that it does not matter which of them a minimum picks.
  float offset = clamp(range.low == 0 ? 0.0f : range.low, limit);
  const uint16_t half_offset = float_to_f16(offset);
  if (half) offset = f16_to_float(half_offset);
  // A quarter, since the range itself may overflow.
  const float quarter = offset * 0.25f, per_level = bits == 2 ? 4.0f / 3.0f : 4.0f / 15.0f;
  float scale = range.high > range.low ? clamp((range.high * 0.25f - quarter) * per_level, limit) : 0.0f;
  if (!(scale > 0)) scale = 0;
  const uint16_t half_scale = float_to_f16(scale);
  if (half) scale = f16_to_float(half_scale);
  return {finite ? scale : NAN,
          finite ? offset : NAN,
          finite ? half_scale | uint32_t{half_offset} << 16 : 0x7e007e00u,
          {finite && scale > 0 ? inverse_of(scale, half) : 0.0f, quarter}};
}

JF_HOST_DEVICE inline void store_pair(const Pair& pair, DType dtype, void* pairs, int64_t index) {
  if (dtype == DType::kF16) {
    static_cast<uint32_t*>(pairs)[index] = pair.halves;
  } else {
    static_cast<float*>(pairs)[2 * index] = pair.scale;
    static_cast<float*>(pairs)[2 * index + 1] = pair.offset;
  }
}

// The nearest code: 2^23 + 2^22 more, and the sum's last bits are the rounded steps.
JF_HOST_DEVICE inline uint32_t code(float x, Affine group, int bits) {
  const float levels = bits == 2 ? 3.0f : 15.0f;
#if defined(__CUDA_ARCH__)
  const float steps = fminf(fmaxf(__fmaf_rn(x, 0.25f, -group.quarter) * group.inverse, 0.0f), levels);
#else
  float steps = (x * 0.25f - group.quarter) * group.inverse;
  steps = steps > 0 ? steps : 0;  // NaN, too
  steps = steps < levels ? steps : levels;
#endif
  return bits_of_float(steps + 0x1.8p23f) & ((1u << bits) - 1);
}

}  // namespace jax_foscar
