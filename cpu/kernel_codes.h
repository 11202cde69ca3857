// Packed codes against a vector operand: the inner loop that keys and values share.
//
// Codes are centred while they are still bytes, so that sums of them stay small: 4 bits become 2 * (q - 7.5) and 2 bits
// 4 * (q - 1.5), both exact; centre_params folds the power of two into the scale and the centre into the offset.
#pragma once

#include "kernel.h"
#include "simd.h"

namespace jax_foscar::cpu {
namespace {

constexpr int kLine = 64;  // bytes: one token octet member of K, one channel row pair of V
constexpr int kSteps = 8;  // of 16 codes, in the contraction of one stream

// A line's field at `Shift`, centred.
template <int Bits, int Shift>
JF_INLINE void decode_line(const uint8_t* line, int8_t* codes) {
  constexpr int kBytes = 4 * kWidth;
  typedef uint8_t Bytes __attribute__((vector_size(kBytes)));
  typedef uint16_t Shorts __attribute__((vector_size(kBytes)));
  constexpr int kPlace = Bits == 4 ? 1 : 2;  // where the field goes
  constexpr uint8_t kMask = Bits == 4 ? 0x1E : 0x0C, kCentre = Bits == 4 ? 15 : 6;
  for (int i = 0; i < kLine; i += kBytes) {
    Shorts x = load<Shorts>(line + i);
    if constexpr (Shift > kPlace) x = x >> (Shift - kPlace);
    if constexpr (Shift < kPlace) x = x << (kPlace - Shift);
    store(codes + i, (bits_of<Bytes>(x) & kMask) - kCentre);
  }
}

// Floats of an operand [16 / kWidth][kSteps][R][kWidth]: 128 places for each row.
template <int R>
constexpr int kOperandFloats = 16 * kSteps * R;

// Where word w (of 4) of a step's 16 places stands for a row.
template <int R>
JF_INLINE float* operand_word(float* operand, int step, int row, int w) {
  return operand + ((4 * w / kWidth * kSteps + step) * R + row) * kWidth + 4 * w % kWidth;
}

// acc[s][row] += codes of stream s * operand of the row.  The two streams share the operand, so each of its loads feeds
// two products.  `codes` is [2][kSteps * 16].
template <int R, int Steps>
JF_INLINE void accumulate(const int8_t* codes, const float* operand, F (&acc)[2][R]) {
#pragma GCC unroll 8
  for (int i = 0; i < Steps; ++i) {
    const F a = widen_codes(codes + 16 * i);
    const F b = widen_codes(codes + kSteps * 16 + 16 * i);
#pragma GCC unroll 4
    for (int row = 0; row < R; ++row) {
      F x = load<F>(operand + (i * R + row) * kWidth);
      in_register(x);
      acc[0][row] += a * x;
      acc[1][row] += b * x;
    }
  }
}

// [words][4 rows] from an accumulator a row.
template <int R>
JF_INLINE F sum_rows(const F (&acc)[R]) {
  return sum_words(acc[0], R > 1 ? acc[R > 1 ? 1 : 0] : F{}, R > 2 ? acc[R > 2 ? 2 : 0] : F{},
                   R > 3 ? acc[R > 3 ? 3 : 0] : F{});
}

// Parameter pairs as f32: scale * 2^-k and offset + centre * scale.  `pairs` is a multiple of 16.
JF_NOINLINE void centre_params(const Operand& operand, const void* params, int pairs, float* scale, float* offset) {
  const float unit = operand.bits == 4 ? 0.5f : 0.25f, centre = operand.bits == 4 ? 7.5f : 1.5f;
  for (int i = 0; i < pairs; i += 16) {
    alignas(64) float pair[32];
    for (int j = 0; j < 32; j += kWidth) {
      store(pair + j, operand.half_params ? from_f16(static_cast<const uint16_t*>(params) + 2 * i + j)
                                          : load<F>(static_cast<const float*>(params) + 2 * i + j));
    }
    for (int j = 0; j < 16; j += 4) {
      const F4 a = load<F4>(pair + 2 * j), b = load<F4>(pair + 2 * j + 4);
      const F4 s = __builtin_shufflevector(a, b, 0, 2, 4, 6);
      store(scale + i + j, s * unit);
      store(offset + i + j, __builtin_shufflevector(a, b, 1, 3, 5, 7) + s * centre);
    }
  }
}

}  // namespace
}  // namespace jax_foscar::cpu
