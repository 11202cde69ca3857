// One call of decode_attention as Python hands it over (tests/emulators.py), for the emulators of both kernels.
#pragma once

#include <cstdint>

#include "params.h"

namespace emulator {

using namespace jax_foscar;

struct CallSizes {
  int64_t batch, num_queries, num_heads, num_kv_heads, pools, layers, pages, page_size, table_width, dim;
  int64_t key_bits, key_per_channel, key_group, value_bits, value_per_channel, value_group;
  int64_t sink, recent, token_group, ring, causal, window_left;
};
struct Arrays {
  const void* q;
  const uint8_t *key_codes, *value_codes;
  const void *key_params, *value_params;
  const uint16_t *key_exact, *value_exact;
  const int32_t *page_table, *length, *layer;
  void* out;
  float* lse;
};

inline DecodeParams decode_params(const CallSizes& s, const Arrays& a, float scale) {
  const auto i = [](int64_t x) { return static_cast<int>(x); };
  DecodeParams p = {};
  p.batch = i(s.batch), p.num_kv_heads = i(s.num_kv_heads), p.num_heads = i(s.num_heads);
  p.num_queries = i(s.num_queries), p.pools = i(s.pools), p.layers = i(s.layers), p.pages = i(s.pages);
  p.page_size = i(s.page_size), p.table_width = i(s.table_width);
  p.windows = {i(s.sink), i(s.recent), i(s.token_group), i(s.ring)};
  p.param_dtype = DType::kF16, p.q_dtype = DType::kF32;
  static_cast<OperandFormat&>(p.key) = {i(s.key_bits), i(s.dim), i(s.key_group), s.key_per_channel != 0};
  static_cast<OperandFormat&>(p.value) = {i(s.value_bits), i(s.dim), i(s.value_group), s.value_per_channel != 0};
  p.key.codes = a.key_codes, p.key.params = a.key_params, p.key.exact = a.key_exact;
  p.value.codes = a.value_codes, p.value.params = a.value_params, p.value.exact = a.value_exact;
  p.q = a.q, p.page_table = a.page_table, p.length = a.length, p.layer = a.layer, p.out = a.out, p.lse = a.lse;
  p.table_rows = p.length_rows = p.exact_rows = p.batch, p.layer_rows = 1;
  p.features.causal = s.causal != 0;
  p.features.window_left = i(s.window_left), p.features.window_right = kUnbounded;
  p.scale = scale;
  return p;
}

}  // namespace emulator
