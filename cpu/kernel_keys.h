// Logits of one span for one block of query rows.
//
// K tile: for fixed m = n / 4 and t % 8 the bytes are one 64-byte line; word w of each of its 16-byte quarters is block
// n = 4 m + w, that is token octet n / blocks and block n % blocks.  A unit is 32 channels: two fields of a block, and
// two neighbouring lines (t % 8 even and odd) are the two streams of `accumulate`.
#pragma once

#include "kernel_codes.h"

namespace jax_foscar::cpu {
namespace {

constexpr int units_per_block(int bits) { return 4 / bits; }
constexpr bool has_tail(const Operand& x) { return x.bits == 2 && x.padded_dim % 64 != 0; }

// Lines repeat their assignment of words to blocks after this many m.
constexpr int key_patterns(const Operand& key) {
  return key.blocks % 4 == 0 ? key.blocks / 4 : key.blocks % 2 == 0 ? key.blocks / 2 : key.blocks;
}
// Operands: [pattern][unit of a block], then the two field pairs of the tail.
constexpr int key_operands(const Operand& key) {
  return key_patterns(key) * units_per_block(key.bits) + (has_tail(key) ? 2 : 0);
}
// Sums: [unit of a block][m][t % 8][w][4 rows], then the tail's [64 tokens][4 rows].
constexpr int key_sum_floats(const Operand& key) {
  return units_per_block(key.bits) * key.blocks * 256 + (has_tail(key) ? 256 : 0);
}

// The query (times a scale a channel, if any) in the order of the lines' codes.
template <int R>
JF_NOINLINE void arrange_query(const Operand& key, const float* query, const float* scale, float* operand) {
  const int units = units_per_block(key.bits);
  auto at = [&](int row, int channel) {
    const F4 q = load<F4>(query + row * key.padded_dim + channel);
    return scale ? q * load<F4>(scale + channel) : q;
  };
  for (int pattern = 0; pattern < key_patterns(key); ++pattern) {
    for (int unit = 0; unit < units; ++unit, operand += kOperandFloats<R>) {
      for (int w = 0; w < 4; ++w) {
        const int channel = 32 * ((4 * pattern + w) % key.blocks * units + unit);
        for (int step = 0; step < kSteps; ++step)  // field step / 4, lane step % 4
          for (int row = 0; row < R; ++row) store(operand_word<R>(operand, step, row, w), at(row, channel + 4 * step));
      }
    }
  }
  if (!has_tail(key)) return;
  for (int half = 0; half < 2; ++half, operand += kOperandFloats<R>) {
    for (int step = 0; step < kSteps; ++step) {
      // Channels 8 f + 2 c and the next, for all octets.
      const int channel = key.padded_dim - 32 + 8 * (2 * half + step / 4) + 2 * (step % 4);
      for (int row = 0; row < R; ++row) {
        const F4 both = at(row, channel / 4 * 4);
        const F4 twice = channel % 4 ? __builtin_shufflevector(both, both, 2, 3, 2, 3)
                                     : __builtin_shufflevector(both, both, 0, 1, 0, 1);
        for (int w = 0; w < 4; ++w) store(operand_word<R>(operand, step, row, w), twice);
      }
    }
  }
}

// Sums of one unit over lines first <= m < last.
template <int Bits, int Unit, int R>
JF_NOINLINE void key_unit(const Operand& key, const uint8_t* tile, const uint8_t* next, const float* operands,
                          int first, int last, float* sums) {
  constexpr int kUnits = units_per_block(Bits);
  const int patterns = key_patterns(key);
  for (int m = first; m < last; ++m) {
    const float* operand = operands + (m % patterns * kUnits + Unit) * kOperandFloats<R>;
    for (int r = 0; r < 8; r += 2) {
      const int64_t at = (m * 8 + r) * kLine;
      if (Unit == 0) __builtin_prefetch(next + at), __builtin_prefetch(next + at + kLine);
      alignas(64) int8_t codes[2][2][kLine];  // [line][field]
      for (int line = 0; line < 2; ++line) {
        decode_line<Bits, 2 * Unit>(tile + at + line * kLine, codes[line][0]);
        decode_line<Bits, 2 * Unit + 4>(tile + at + line * kLine, codes[line][1]);
      }
      for (int v = 0; v < 16 / kWidth; ++v) {
        F acc[2][R] = {};
        accumulate<R, kSteps>(&codes[0][0][v * kWidth], operand + v * kSteps * R * kWidth, acc);
        for (int line = 0; line < 2; ++line) store(sums + (m * 8 + r + line) * 16 + v * kWidth, sum_rows<R>(acc[line]));
      }
    }
  }
}

// The tail's 8 bytes a token: line t % 8, a quarter c holds bytes 2 c and 2 c + 1 of all octets.
template <int R>
JF_NOINLINE void key_tail(const Operand& key, const uint8_t* tile, const float* operands, float* sums) {
  const uint8_t* tail = tile + key.blocks * 16 * kSpanTokens;
  for (int r = 0; r < 8; r += 2) {
    alignas(64) int8_t codes[2][2][2][kLine];  // [half of the fields][line][field]
    for (int line = 0; line < 2; ++line) {
      decode_line<2, 0>(tail + (r + line) * kLine, codes[0][line][0]);
      decode_line<2, 2>(tail + (r + line) * kLine, codes[0][line][1]);
      decode_line<2, 4>(tail + (r + line) * kLine, codes[1][line][0]);
      decode_line<2, 6>(tail + (r + line) * kLine, codes[1][line][1]);
    }
    for (int v = 0; v < 16 / kWidth; ++v) {
      F acc[2][R] = {};
      for (int half = 0; half < 2; ++half)
        accumulate<R, kSteps>(&codes[half][0][0][v * kWidth],
                              operands + half * kOperandFloats<R> + v * kSteps * R * kWidth, acc);
      for (int line = 0; line < 2; ++line) {
        for (int row = 0; row < kBlockRows; ++row) {
          for (int i = 0; i < kWidth; i += 2) {
            const int token = (v * kWidth + i) / 2 * 8 + r + line;
            sums[token * 4 + row] = row < R ? acc[line][row < R ? row : 0][i] + acc[line][row < R ? row : 0][i + 1] : 0;
          }
        }
      }
    }
  }
}

template <int Bits, int R>
inline void key_codes(const Operand& key, const Span& span, const float* operands, int first, int last, float* sums) {
  const uint8_t* next = span.next_key ? span.next_key : span.key_codes;
  key_unit<Bits, 0, R>(key, span.key_codes, next, operands, first, last, sums);
  if constexpr (Bits == 2) key_unit<2, 1, R>(key, span.key_codes, next, operands, first, last, sums + key.blocks * 256);
}

// Adds up a token's units and folds scale and offset in.  `bias` is [groups][4 rows]: per token, the sums of the query
// over a group; per channel, query times offset.
template <bool PerChannel>
JF_NOINLINE void fold_keys(const Operand& key, const float* sums, const float* scale, const float* offset,
                           const float* bias, int first, int last, float* logits) {
  const int units = units_per_block(key.bits), all = key.blocks * units;
  const float* tail = has_tail(key) ? sums + all * 256 : nullptr;
  const int per_group = key.groups == 1 ? key.padded_dim / 32 : key.group / 32;
  for (int octet = first / 8; octet < last / 8; ++octet) {
    F4 logit[8] = {};
    for (int g = 0; g < key.groups; ++g) {
      F4 sum[8] = {};
      for (int unit = g * per_group; unit < (g + 1) * per_group; ++unit) {
        const int n = octet * key.blocks + unit / units;
        const bool is_tail = unit == all;
        const float* from =
            is_tail ? tail + octet * 32 : sums + unit % units * key.blocks * 256 + n / 4 * 128 + n % 4 * 4;
        const int stride = is_tail ? 4 : 16;
        for (int r = 0; r < 8; ++r) sum[r] += load<F4>(from + r * stride);
      }
      const F4 b = load<F4>(bias + 4 * g);
      for (int r = 0; r < 8; ++r) {
        const int at = (octet * 8 + r) * key.groups + g;
        logit[r] = PerChannel ? sum[r] + b : logit[r] + (sum[r] * scale[at] + b * offset[at]);
      }
    }
    for (int r = 0; r < 8; ++r) store(logits + (octet * 8 + r) * 4, logit[r]);
  }
}

// Row sums of query * x over channels first <= d < last, x = 1 if null.
inline F4 query_sum(const Operand& key, const float* query, const float* x, int first, int last) {
  F acc[4] = {};
  for (int row = 0; row < 4; ++row) {
    for (int d = first; d < last; d += kWidth) {
      const F q = load<F>(query + row * key.padded_dim + d);
      acc[row] += x ? q * load<F>(x + d) : q;
    }
  }
  return add_words(sum_words(acc[0], acc[1], acc[2], acc[3]));
}

// Rows of bf16: two tokens at a time for enough independent sums.
template <int R>
JF_NOINLINE void dense_keys(const Operand& key, const uint16_t* rows, int count, const float* query, float* logits) {
  for (int t = 0; t < count; t += 2) {
    const uint16_t* a = rows + t * key.dim;
    const uint16_t* b = t + 1 < count ? a + key.dim : a;
    F acc[2][R] = {};
    for (int d = 0; d < key.dim; d += kWidth) {
      const F x = from_bf16(a + d), y = from_bf16(b + d);
      for (int row = 0; row < R; ++row) {
        const F q = load<F>(query + row * key.padded_dim + d);
        acc[0][row] += q * x;
        acc[1][row] += q * y;
      }
    }
    store(logits + t * 4, add_words(sum_rows<R>(acc[0])));
    store(logits + t * 4 + 4, add_words(sum_rows<R>(acc[1])));
  }
}

}  // namespace
}  // namespace jax_foscar::cpu
