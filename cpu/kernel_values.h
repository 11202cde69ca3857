// Weighted sums of one span's values for one block of query rows.
//
// V tile: for fixed t / 32, row block and r % 8 the bytes are one 64-byte line; word w of its quarter c holds tokens
// {2c, 8 + 2c, 2c + 1, 9 + 2c} + 16 (w / 2) of channel row r % 8 + 8 (w % 2).  A unit is 32 channels: two fields of a
// row block, which are the two streams of `accumulate`; a unit's two lines t / 32 are the halves of its contraction.
#pragma once

#include "kernel_codes.h"
#include "kernel_keys.h"

namespace jax_foscar::cpu {
namespace {

// Where a channel's [4 rows] stand in the output: unit, r % 8, field, r / 8, so that a line's sums are one run.
inline int value_position(const Operand& value, int channel) {
  if (value.bits == 16 || (has_tail(value) && channel >= value.padded_dim - 32)) return channel;
  const int r = channel % 16;
  return channel / 32 * 32 + (r % 8 * 2 + channel % 32 / 16) * 2 + r / 8;
}

// Weights times a token's scale as operands: one for row blocks, one for the tail.  `offset_sum` gets the row sums of
// weights * offset.  A token of weight 0 may be one that the row must not see, whose parameters are anything.
template <int R>
JF_NOINLINE void arrange_weights(const float* weights, const float* scale, const float* offset, int stride,
                                 float* operand, float* tail, F4* offset_sum) {
  F4 offsets = {};
  auto at = [&](int t) {
    const F4 p = load<F4>(weights + 4 * t);
    if (!scale) return p;
    offsets += p != 0 ? p * offset[t * stride] : F4{};
    return p != 0 ? p * scale[t * stride] : F4{};
  };
  for (int step = 0; step < kSteps; ++step) {  // t / 32 = step / 4, c = step % 4
    for (int half = 0; half < 2; ++half) {
      const int t = step / 4 * 32 + 16 * half + 2 * (step % 4);
      const F4 a = at(t), b = at(t + 8), c = at(t + 1), d = at(t + 9);
      const F4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
      const F4 ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7), cd2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      const F4 row[4] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                         __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5), __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7)};
      for (int i = 0; i < R; ++i) {
        store(operand_word<R>(operand, step, i, 2 * half), row[i]);
        store(operand_word<R>(operand, step, i, 2 * half + 1), row[i]);
        if (tail) store(operand_word<R>(tail, step / 2, i, step % 2 * 2 + half), row[i]);
      }
    }
  }
  if (scale) *offset_sum += offsets;
}

// A line's sums [field][r / 8][4 rows] over `Steps` steps.
template <int R, int Steps>
JF_INLINE void value_line(const int8_t* codes, const float* operand, float* sums) {
  constexpr int kApart = kWidth == 4 ? 2 : 1;  // with one word a vector, the two channel rows are apart
  for (int a = 0; a < kApart; ++a) {
    F acc[2][R] = {};
    for (int v = a; v < 16 / kWidth; v += kApart)
      accumulate<R, Steps>(codes + v * kWidth, operand + v * kSteps * R * kWidth, acc);
    for (int field = 0; field < 2; ++field) {
      const F sum = sum_rows<R>(acc[field]);
      if constexpr (kWidth == 16) {
        store(sums + 8 * field, word(sum, 0) + word(sum, 2));
        store(sums + 8 * field + 4, word(sum, 1) + word(sum, 3));
      } else {
        store(sums + 8 * field + 4 * a, sum);
      }
    }
  }
}

// What the parameters of values per channel need of the span.
struct TokenGroups {
  int count;            // of 64 / count tokens
  F4 weight_sum[2];     // sums of the weights over a group
  const float* scale;   // [count][dim]
  const float* offset;  // likewise
};

// out += scale * sum + offset * (sum of weights), where the row sees any token of the group.
JF_INLINE void add_channel(const TokenGroups& groups, int g, int index, F4 sum, float* out) {
  const F4 weights = groups.weight_sum[g];
  const F4 value = sum * groups.scale[index] + weights * groups.offset[index];
  store(out, load<F4>(out) + (weights != 0 ? value : F4{}));
}

// Adds unit `Unit` of row block rb to out [32 positions][4 rows].
template <int Bits, int Unit, int R>
JF_NOINLINE void value_unit(const Operand& value, const Span& span, const uint8_t* next, const float* operand, int rb,
                            const TokenGroups* groups, float* out) {
  constexpr int kShift0 = Bits == 4 ? 0 : 4 * Unit, kShift1 = Bits == 4 ? 4 : 4 * Unit + 2;
  const int64_t other = value.blocks * 8 * kLine;  // from a line to the one 32 tokens on
  for (int r = 0; r < 8; ++r, out += 16) {
    const int64_t at = (rb * 8 + r) * kLine;
    const uint8_t* line = span.value_codes + at;
    if (Unit == 0) __builtin_prefetch(next + at), __builtin_prefetch(next + at + other);
    alignas(64) int8_t codes[2][2][kLine];  // [field][t / 32]
    decode_line<Bits, kShift0>(line, codes[0][0]);
    decode_line<Bits, kShift0>(line + other, codes[0][1]);
    decode_line<Bits, kShift1>(line, codes[1][0]);
    decode_line<Bits, kShift1>(line + other, codes[1][1]);
    alignas(64) float sums[16];
    if (!groups) {
      value_line<R, kSteps>(codes[0][0], operand, sums);
      for (int i = 0; i < 16; i += kWidth) store(out + i, load<F>(out + i) + load<F>(sums + i));
      continue;
    }
    const int channel = 32 * (rb * units_per_block(Bits) + Unit) + r;
    for (int g = 0; g < groups->count; ++g) {
      if (groups->count == 1) {
        value_line<R, kSteps>(codes[0][0], operand, sums);
      } else {
        value_line<R, kSteps / 2>(codes[0][g], operand + g * kSteps / 2 * R * kWidth, sums);
      }
      for (int i = 0; i < 4; ++i) {  // field i / 2, row r + 8 (i % 2)
        const int c = channel + 16 * (i / 2) + 8 * (i % 2);
        // Padding channels have no parameters, and nobody reads them.
        if (c < value.dim) add_channel(*groups, g, g * value.dim + c, load<F4>(sums + 4 * i), out + 4 * i);
      }
    }
  }
}

// The tail's 32 channels, 8 f + r: line t / 32 and r even holds 32 bytes of channel row r and 32 of r + 1.
template <int R>
JF_NOINLINE void value_tail(const Operand& value, const Span& span, const float* operand, const TokenGroups* groups,
                            float* out) {
  const uint8_t* tail = span.value_codes + value.blocks * 16 * kSpanTokens;
  constexpr int kHalf = kSteps / 4;  // steps of 32 tokens
  for (int r = 0; r < 8; r += 2) {
    alignas(64) int8_t codes[2][2][2][kLine];  // [t / 32][field / 2][field % 2]
    for (int half = 0; half < 2; ++half) {
      const uint8_t* line = tail + (half * 8 + r) * kLine / 2;
      decode_line<2, 0>(line, codes[half][0][0]);
      decode_line<2, 2>(line, codes[half][0][1]);
      decode_line<2, 4>(line, codes[half][1][0]);
      decode_line<2, 6>(line, codes[half][1][1]);
    }
    for (int fields = 0; fields < 2; ++fields) {
      for (int odd = 0; odd < 2; ++odd) {
        F4 sums[2][2];  // [t / 32][field % 2]
        for (int half = 0; half < 2; ++half) {
          for (int field = 0; field < 2; ++field) {
            F acc[R] = {};
            for (int v = 0; v < 16 / kWidth; ++v)
              for (int i = 0; i < kHalf; ++i)
                for (int row = 0; row < R; ++row)
                  acc[row] += widen_codes(&codes[half][fields][field][odd * 32 + 16 * i + v * kWidth]) *
                              load<F>(operand + ((v * kSteps + half * kHalf + i) * R + row) * kWidth);
            sums[half][field] = add_words(sum_rows<R>(acc));
          }
        }
        for (int field = 0; field < 2; ++field) {
          const int channel = 8 * (2 * fields + field) + r + odd, c = value.padded_dim - 32 + channel;
          float* to = out + channel * 4;
          if (!groups) {
            store(to, load<F4>(to) + (sums[0][field] + sums[1][field]));
          } else if (c < value.dim) {
            if (groups->count == 1) add_channel(*groups, 0, c, sums[0][field] + sums[1][field], to);
            if (groups->count == 2) add_channel(*groups, 0, c, sums[0][field], to);
            if (groups->count == 2) add_channel(*groups, 1, value.dim + c, sums[1][field], to);
          }
        }
      }
    }
  }
}

// Adds units first <= unit < last of the head to out.
template <int Bits, int R>
inline void value_codes(const Operand& value, const Span& span, const float* operand, const float* tail_operand,
                        const TokenGroups* groups, int first, int last, float* out) {
  constexpr int kUnits = units_per_block(Bits);
  const uint8_t* next = span.next_value ? span.next_value : span.value_codes;
  for (int unit = first; unit < last; ++unit) {
    float* to = out + unit * 128;
    if (unit == value.blocks * kUnits) {
      value_tail<R>(value, span, tail_operand, groups, to);
    } else if (unit % kUnits == 0) {
      value_unit<Bits, 0, R>(value, span, next, operand, unit / kUnits, groups, to);
    } else if constexpr (Bits == 2) {
      value_unit<2, 1, R>(value, span, next, operand, unit / kUnits, groups, to);
    }
  }
}

// Rows of bf16, tokens first <= t < last of them, into rows row0 .. row0 + R - 1 of out.
template <int R>
JF_NOINLINE void dense_values(const Operand& value, const uint16_t* rows, const float* weights, int row0, int first,
                              int last, float* out) {
  if (first >= last) return;
  for (int d = 0; d < value.dim; d += kWidth) {
    F acc[2][R] = {};
    int t = first;
    for (; t + 1 < last; t += 2) {
      const F x = from_bf16(rows + t * value.dim + d), y = from_bf16(rows + (t + 1) * value.dim + d);
      for (int i = 0; i < R; ++i) {
        acc[0][i] += x * weights[4 * t + row0 + i];
        acc[1][i] += y * weights[4 * t + 4 + row0 + i];
      }
    }
    if (t < last) {
      const F x = from_bf16(rows + t * value.dim + d);
      for (int i = 0; i < R; ++i) acc[0][i] += x * weights[4 * t + row0 + i];
    }
    for (int i = 0; i < R; ++i) {
      const F sum = acc[0][i] + acc[1][i];
      for (int lane = 0; lane < kWidth; ++lane) out[value_position(value, d + lane) * 4 + row0 + i] += sum[lane];
    }
  }
}

}  // namespace
}  // namespace jax_foscar::cpu
