// The numbers of the Blackwell kernel: packed codes as E4M3 and E2M1 operands, and f32 values as sums of E4M3 parts.
//
// Neither kind of code is converted.  A masked field of a packed word is four E4M3 bytes, or eight E2M1 nibbles, that
// are a power of two times the code: small integers are subnormal, or as good as linear, in both formats.  Queries and
// weights, the other operand, need more than E4M3's four bits: they are split into up to three parts, one column each.
#pragma once

#include <cstdint>

#include "../dtype.h"

namespace jax_foscar::blackwell {

// --- Codes ----------------------------------------------------------------------------------------------------------

// 4-bit field 0 or 1 of every byte.
JF_HOST_DEVICE constexpr uint32_t e4m3_field4(uint32_t word, int field) { return word >> 4 * field & 0x0f0f0f0f; }

// 2-bit field 0 .. 3 of every byte; odd fields keep their place, which two fields share a shift for.
JF_HOST_DEVICE constexpr uint32_t e4m3_field2(uint32_t word, int field) {
  return word >> 4 * (field / 2) & (field % 2 ? 0x0c0c0c0c : 0x03030303);
}

// 2-bit fields `pair` (0 or 1) and `pair` + 2 of every byte, as its low and its high nibble.
JF_HOST_DEVICE constexpr uint32_t e2m1_fields(uint32_t word, int pair) { return word >> 2 * pair & 0x33333333; }

// What a code is multiplied with in these operands.
JF_HOST_DEVICE constexpr float e4m3_code4() { return 0x1p-9f; }
JF_HOST_DEVICE constexpr float e4m3_code2(int field) { return field % 2 ? 0x1p-7f : 0x1p-9f; }
JF_HOST_DEVICE constexpr float e2m1_code2() { return 0.5f; }

// --- E4M3 and E2M1, one value ---------------------------------------------------------------------------------------

inline constexpr float kE4M3Max = 448.0f;

// Subnormals are multiplied out: as f32 bits they would be subnormal, too, which some code flushes to zero.
JF_HOST_DEVICE inline float e4m3_value(uint8_t x) {
  const uint32_t magnitude = x & 0x7f;
  if (magnitude == 0x7f) return float_of_bits(0x7fc00000);
  const float value =
      magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f : float_of_bits((magnitude << 20) + (120u << 23));
  return x >> 7 ? -value : value;
}

JF_HOST_DEVICE inline float e2m1_value(uint32_t nibble) {
  const uint32_t magnitude = nibble & 7;
  const float value =
      magnitude < 2 ? static_cast<float>(magnitude) * 0.5f : float_of_bits((magnitude << 22) + (126u << 23));
  return nibble & 8 ? -value : value;
}

// The nearest E4M3, ties to even; what is larger than 448 becomes 448, NaN 0x7f.  As cvt.rn.satfinite.e4m3x2.f32 does.
JF_HOST_DEVICE inline uint8_t e4m3_of_float(float x) {
  const uint32_t bits = bits_of_float(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7f;
  if (magnitude >= 0x43e00000) return static_cast<uint8_t>(sign | 0x7e);
  if (magnitude < 0x3c800000) {  // subnormal: adding 2^14 leaves multiples of 2^-9, rounded to even
    return static_cast<uint8_t>(sign | (bits_of_float(float_of_bits(magnitude) + 0x1p14f) - 0x46800000));
  }
  return static_cast<uint8_t>(sign | (magnitude - (120u << 23) + 0x7ffff + (magnitude >> 20 & 1)) >> 20);
}

// --- Parts ----------------------------------------------------------------------------------------------------------

inline constexpr int kMaxParts = 3;

// x = part[0] + part[1] / 16 + part[2] / 256 + a rest.  Each part is the nearest E4M3 to 16 times what the one before
// left.  E4M3's step in [2^e, 2^(e+1)) is 2^(e-3), and 2^-9 below 2^-6, so that parts stay in range if x does, and for
// |x| in [2^e, 2^(e+1)) the rest after one, two, three parts is at most
//     max(2^(e-4), 2^-10)    max(2^(e-9), 2^-14)    max(2^(e-14), 2^-18)
// and after a fourth max(2^(e-19), 2^-22).
// All sums in here are exact in f32: host and device agree to the bit, contracted or not.  NaN is NaN in every part.
struct Parts {
  uint8_t part[kMaxParts];
};

// Parts of two values, the first one's in the low bytes.
template <int kParts>
struct SomePartPairs {
  uint16_t part[kParts];
};
using PartPairs = SomePartPairs<kMaxParts>;

// What a column of part `i` is multiplied with.
JF_HOST_DEVICE constexpr float part_weight(int i) {
  return i == 0 ? 1.0f : i == 1 ? 0x1p-4f : i == 2 ? 0x1p-8f : 0x1p-12f;
}

JF_HOST_DEVICE inline uint16_t e4m3_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return static_cast<uint16_t>(e4m3_of_float(low) | e4m3_of_float(high) << 8);
#endif
}

struct FloatPair {
  float low, high;
};

JF_HOST_DEVICE inline FloatPair e4m3_pair_value(uint16_t pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  FloatPair value;
  asm("{\n"
      ".reg .b32 halves;\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.f16x2.e4m3x2 halves, %2;\n"
      "mov.b32 {low, high}, halves;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}"
      : "=f"(value.low), "=f"(value.high)
      : "h"(pair));
  return value;
#else
  return {e4m3_value(static_cast<uint8_t>(pair)), e4m3_value(static_cast<uint8_t>(pair >> 8))};
#endif
}

// |x|, |y| <= 448, or NaN.
template <int kParts = kMaxParts>
JF_HOST_DEVICE inline SomePartPairs<kParts> split_pair(float x, float y) {
  SomePartPairs<kParts> pairs;
  for (int i = 0; i < kParts; ++i) {
    pairs.part[i] = e4m3_pair(x, y);
    const FloatPair taken = e4m3_pair_value(pairs.part[i]);
    x = (x - taken.low) * 16;
    y = (y - taken.high) * 16;
  }
  return pairs;
}

JF_HOST_DEVICE inline Parts split(float x) {
  const PartPairs pairs = split_pair(x, 0);
  return {
      {static_cast<uint8_t>(pairs.part[0]), static_cast<uint8_t>(pairs.part[1]), static_cast<uint8_t>(pairs.part[2])}};
}

// The value that the first `count` parts stand for: what the tensor core saw, which a code's offset is multiplied with.
JF_HOST_DEVICE inline float join(Parts parts, int count) {
  float sum = 0;
  for (int i = count; i-- > 0;) sum += e4m3_value(parts.part[i]) * part_weight(i);
  return sum;
}

// --- Scales of what is split ----------------------------------------------------------------------------------------

// Two inverse powers of two: values are multiplied with `up` before the split, what comes out of the product with
// `down`.
struct SplitScale {
  float up, down;
};

// Brings values into [-256, 256].  `largest` is the largest of their magnitudes as bits (bits & 0x7fffffff), of which
// an integer maximum keeps NaN and infinity: they make `up` NaN, hence every part and every result of that column,
// where the saturating conversion alone would turn an infinity into 448.
JF_HOST_DEVICE inline SplitScale split_scale(uint32_t largest) {
  const uint32_t exponent = largest >> 23;
  if (exponent == 255) return {float_of_bits(0x7fc00000), float_of_bits(0x7fc00000)};
  const uint32_t up = exponent < 8 ? 253 : 261 - exponent;  // both powers stay normal
  return {float_of_bits(up << 23), float_of_bits((254 - up) << 23)};
}

}  // namespace jax_foscar::blackwell
