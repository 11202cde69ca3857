// The kernel: folded attention of up to four query rows over one span after another, with an online softmax.
//
// A translation unit of each instruction set defines JF_WIDTH, widen_codes and from_f16 and includes this file;
// everything here has internal linkage.  A span is 64 tokens: logits [64][4 rows], weights in their place, then the
// sums of V are added to the output.
#pragma once

#include "kernel_keys.h"
#include "kernel_values.h"

namespace jax_foscar::cpu {
namespace {

constexpr float kInfinity = __builtin_inff();

// Parts of Block::scratch.
struct Scratch {
  float* key_operands;
  float* key_bias;  // [groups][4]
  float* key_sums;
  float* key_scale;  // [64][groups] or [token groups][dim], as are the next three
  float* key_offset;
  float* value_scale;
  float* value_offset;
  float* weights;         // [64][4]: logits, then weights
  float* value_operands;  // row blocks', tail's
  float* out;             // [value.padded_dim positions][4]
  float* out_offset;      // [value.groups][4]: sums of weights * offset, of all channels of a group
};

inline int64_t param_floats(const Operand& x) {
  if (x.bits == 16) return 0;
  return x.per_channel ? 2 * (x.padded_dim + 16) : kSpanTokens * x.groups;
}

// Cuts memory into parts; with a null base it only measures.
inline int64_t lay_out(const Shape& shape, float* base, Scratch* s) {
  int64_t used = 0;
  auto take = [&](int64_t floats) {
    float* part = base ? base + used : nullptr;
    used += (floats + 15) / 16 * 16;
    return part;
  };
  if (shape.key.bits != 16) {
    s->key_operands = take(key_operands(shape.key) * kOperandFloats<kBlockRows>);
    s->key_sums = take(key_sum_floats(shape.key));
  }
  s->key_bias = take(4 * shape.key.groups);
  s->key_scale = take(param_floats(shape.key));
  s->key_offset = take(param_floats(shape.key));
  s->value_scale = take(param_floats(shape.value));
  s->value_offset = take(param_floats(shape.value));
  s->weights = take(4 * kSpanTokens);
  s->value_operands = take(2 * kOperandFloats<kBlockRows>);
  s->out = take(4 * shape.value.padded_dim);
  s->out_offset = take(4 * shape.value.groups);
  return used;
}

inline void clear(float* x, int64_t count) { __builtin_memset(x, 0, count * sizeof(float)); }

template <int R>
inline void begin_rows(const Shape& shape, Block* block) {
  const Operand& key = shape.key;
  Scratch s = {};
  lay_out(shape, block->scratch, &s);
  for (int row = 0; row < kBlockRows; ++row) block->max[row] = -kInfinity, block->sum[row] = 0;
  clear(s.out, 4 * shape.value.padded_dim);
  clear(s.out_offset, 4 * shape.value.groups);
  if (key.bits == 16) return;
  if (key.per_channel) {
    clear(s.key_scale, param_floats(key));  // padding channels keep 0
    return;
  }
  arrange_query<R>(key, block->query, nullptr, s.key_operands);
  for (int g = 0; g < key.groups; ++g) {
    const int last = key.groups == 1 ? key.padded_dim : (g + 1) * key.group;
    store(s.key_bias + 4 * g, query_sum(key, block->query, nullptr, g * key.group, last));
  }
}

// Token groups of a span whose parameters are per channel: two of 32 or one.
inline int span_groups(const Operand& x) { return x.group < kSpanTokens ? kSpanTokens / x.group : 1; }

template <int Bits, int R>
inline void quantized_logits(const Operand& key, const Span& span, const float* query, const Scratch& s) {
  const float* tail_operands = s.key_operands + key_patterns(key) * units_per_block(Bits) * kOperandFloats<R>;
  float* tail_sums = s.key_sums + units_per_block(Bits) * key.blocks * 256;
  if (!key.per_channel) {
    centre_params(key, span.key_params, kSpanTokens * key.groups, s.key_scale, s.key_offset);
    key_codes<Bits, R>(key, span, s.key_operands, 0, 2 * key.blocks, s.key_sums);
    if (has_tail(key)) key_tail<R>(key, span.key_codes, tail_operands, tail_sums);
    fold_keys<false>(key, s.key_sums, s.key_scale, s.key_offset, s.key_bias, 0, kSpanTokens, s.weights);
    return;
  }
  const int groups = span_groups(key), lines = 2 * key.blocks / groups, tokens = kSpanTokens / groups;
  for (int g = 0; g < groups; ++g) {
    const char* params = static_cast<const char*>(span.key_params) + g * key.dim * (key.half_params ? 4 : 8);
    centre_params(key, params, key.dim, s.key_scale, s.key_offset);
    arrange_query<R>(key, query, s.key_scale, s.key_operands);
    store(s.key_bias, query_sum(key, query, s.key_offset, 0, key.dim));
    key_codes<Bits, R>(key, span, s.key_operands, g * lines, (g + 1) * lines, s.key_sums);
    if (has_tail(key)) key_tail<R>(key, span.key_codes, tail_operands, tail_sums);
    fold_keys<true>(key, s.key_sums, nullptr, nullptr, s.key_bias, g * tokens, (g + 1) * tokens, s.weights);
  }
}

// Logits outside a row's range become -inf.
inline void mask_logits(const int* first, const int* last, float* logits) {
  const I4 from = load<I4>(first), to = load<I4>(last);
  for (int t = 0; t < kSpanTokens; ++t) {
    const I4 at = I4{} + t;
    const I4 seen = (at >= from) & (at < to);
    store(logits + 4 * t, seen ? load<F4>(logits + 4 * t) : splat<F4>(-kInfinity));
  }
}

// Whether draft i is one that the row does not see.
inline bool hides(const Block& block, int row, int i) { return block.drafts[row] && i >= 0 && !block.drafts[row][i]; }

inline void cap_logits(float cap, float* logits) {
  for (int i = 0; i < 4 * kSpanTokens; i += kWidth) store(logits + i, cap * tanh<F, I>(load<F>(logits + i) / cap));
}

// Logits become weights exp(logit - max); what was summed under the old maximum is scaled to the new one.
inline void online_softmax(const Shape& shape, Block* block, const Scratch& s) {
  F top = load<F>(s.weights);
  for (int i = kWidth; i < 4 * kSpanTokens; i += kWidth) top = max(load<F>(s.weights + i), top);
  const F4 old = load<F4>(block->max);
  F4 now = old;
  for (int w = 0; w < kWidth / 4; ++w) now = max(word(top, w), now);
  const F4 base = now == -kInfinity ? F4{} : now;  // nothing seen yet: exp(-inf - 0) = 0
  const F4 shrink = exp_nonpositive<F4, I4>(old - base);
  const F bases = repeat_word(base);
  F sum = {};
  for (int i = 0; i < 4 * kSpanTokens; i += kWidth) {
    const F weight = exp_nonpositive<F, I>(load<F>(s.weights + i) - bases);
    store(s.weights + i, weight);
    sum += weight;
  }
  store(block->max, now);
  store(block->sum, load<F4>(block->sum) * shrink + add_words(sum));
  const I4 same = shrink == 1.0f;
  if (same[0] & same[1] & same[2] & same[3]) return;
  for (int i = 0; i < 4 * shape.value.padded_dim; i += 4) store(s.out + i, load<F4>(s.out + i) * shrink);
  for (int i = 0; i < 4 * shape.value.groups; i += 4) store(s.out_offset + i, load<F4>(s.out_offset + i) * shrink);
}

template <int Bits, int R>
inline void quantized_values(const Operand& value, const Span& span, const Scratch& s) {
  const int units = value.padded_dim / 32;
  float* tail = has_tail(value) ? s.value_operands + kOperandFloats<R> : nullptr;
  if (!value.per_channel) {
    centre_params(value, span.value_params, kSpanTokens * value.groups, s.value_scale, s.value_offset);
    for (int g = 0; g < value.groups; ++g) {
      F4 offsets = load<F4>(s.out_offset + 4 * g);
      arrange_weights<R>(s.weights, s.value_scale + g, s.value_offset + g, value.groups, s.value_operands, tail,
                         &offsets);
      store(s.out_offset + 4 * g, offsets);
      const int first = g * value.group / 32, last = value.groups == 1 ? units : first + value.group / 32;
      value_codes<Bits, R>(value, span, s.value_operands, tail, nullptr, first, last, s.out);
    }
    return;
  }
  TokenGroups groups = {span_groups(value), {}, s.value_scale, s.value_offset};
  centre_params(value, span.value_params, groups.count * value.dim, s.value_scale, s.value_offset);
  for (int t = 0; t < kSpanTokens; ++t)
    groups.weight_sum[t * groups.count / kSpanTokens] += load<F4>(s.weights + 4 * t);
  arrange_weights<R>(s.weights, nullptr, nullptr, 0, s.value_operands, tail, nullptr);
  value_codes<Bits, R>(value, span, s.value_operands, tail, &groups, 0, units, s.out);
}

template <int R>
inline void attend_rows(const Shape& shape, const Span& span, Block* block) {
  Scratch s = {};
  lay_out(shape, block->scratch, &s);
  int first[kBlockRows], last[kBlockRows];  // of the span, what each row sees
  const int drafts = block->first_draft - span.first;
  bool any = false, all = true;
  for (int row = 0; row < kBlockRows; ++row) {
    const int from = block->first[span.region][row] - span.first, to = block->last[span.region][row] - span.first;
    first[row] = from > 0 ? from : 0;
    last[row] = to < span.count ? to : span.count;
    any |= first[row] < last[row];
    all &= row >= block->rows || (first[row] == 0 && last[row] == kSpanTokens);
    if (block->drafts[row])
      for (int t = first[row]; t < last[row]; ++t) all &= !hides(*block, row, t - drafts);
  }
  if (!any) return;

  const bool exact = span.region != kPaged;
  if (exact || shape.key.bits == 16) {
    dense_keys<R>(shape.key, reinterpret_cast<const uint16_t*>(span.key_codes), span.count, block->query, s.weights);
  } else if (shape.key.bits == 4) {
    quantized_logits<4, R>(shape.key, span, block->query, s);
  } else {
    quantized_logits<2, R>(shape.key, span, block->query, s);
  }
  if (shape.soft_cap != 0) cap_logits(shape.soft_cap, s.weights);
  if (!all) {
    mask_logits(first, last, s.weights);
    for (int row = 0; row < block->rows; ++row)
      for (int t = first[row]; block->drafts[row] && t < last[row]; ++t)
        if (hides(*block, row, t - drafts)) s.weights[4 * t + row] = -kInfinity;
  }
  online_softmax(shape, block, s);
  if (exact || shape.value.bits == 16) {
    const uint16_t* rows = reinterpret_cast<const uint16_t*>(span.value_codes);
    if (all) {
      dense_values<R>(shape.value, rows, s.weights, 0, 0, kSpanTokens, s.out);
    } else {  // 0 * NaN is not 0: a row reads only what it sees
      for (int row = 0; row < block->rows; ++row) {
        for (int t = first[row], end; t < last[row]; t = end + 1) {  // runs between hidden drafts
          for (end = t; end < last[row] && !hides(*block, row, end - drafts);) ++end;
          dense_values<1>(shape.value, rows, s.weights, row, t, end, s.out);
        }
      }
    }
  } else if (shape.value.bits == 4) {
    quantized_values<4, R>(shape.value, span, s);
  } else {
    quantized_values<2, R>(shape.value, span, s);
  }
}

int64_t scratch_floats(const Shape& shape) {
  Scratch s = {};
  return lay_out(shape, nullptr, &s);
}

void begin(const Shape& shape, Block* block) {
  if (block->rows == 1) return begin_rows<1>(shape, block);
  if (block->rows == 2) return begin_rows<2>(shape, block);
  begin_rows<4>(shape, block);
}

void attend(const Shape& shape, const Span& span, Block* block) {
  if (block->rows == 1) return attend_rows<1>(shape, span, block);
  if (block->rows == 2) return attend_rows<2>(shape, span, block);
  attend_rows<4>(shape, span, block);
}

void finish(const Shape& shape, const Block& block, float* out) {
  const Operand& value = shape.value;
  Scratch s = {};
  lay_out(shape, block.scratch, &s);
  for (int c = 0; c < value.dim; ++c) {
    const float* from = s.out + 4 * value_position(value, c);
    const float* offset = s.out_offset + 4 * (value.groups == 1 ? 0 : c / value.group);
    for (int row = 0; row < block.rows; ++row) out[row * value.dim + c] = from[row] + offset[row];
  }
}

}  // namespace
}  // namespace jax_foscar::cpu
