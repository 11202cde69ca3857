// What the Blackwell kernel serves.
#pragma once

#include "roles.h"

namespace jax_foscar::blackwell {

// Null, or why not.
inline const char* refuse_shape(const DecodeParams& params) {
  const int64_t rows = int64_t{params.num_queries} * (params.num_heads / params.num_kv_heads);
  const int dim = params.key.dim;
  if (dim != params.value.dim || (dim != 64 && dim != 128))
    return "the tcgen05 kernel does not take head dims other than 64 and 128";
  if (rows > 8) return "the tcgen05 kernel does not take more than 8 query rows a KV head";
  if (params.param_dtype != DType::kF16) return "the tcgen05 kernel does not take parameters that are not float16";
  if (params.windows.ring != 0) return "the tcgen05 kernel does not take exact tokens";
  const Features& f = params.features;
  if (f.window_left != kUnbounded || (!f.causal && f.window_right != kUnbounded))
    return "the tcgen05 kernel does not take a local window";
  if (f.soft_cap != 0.0f || f.sinks != nullptr || f.query_lengths != nullptr || f.tree_mask != nullptr)
    return "the tcgen05 kernel does not take a soft cap, sinks, query lengths or a draft tree";
  for (const OperandParams* operand : {&params.key, &params.value}) {
    if (operand->bits != 2 && operand->bits != 4) return "the tcgen05 kernel does not take 16-bit keys or values";
    if (operand->group % 32 != 0 || (operand->per_channel ? kTileTokens : dim) % operand->group != 0)
      return "the tcgen05 kernel does not take groups other than 32, 64 or the whole head";
  }
  return nullptr;
}

JF_HOST_DEVICE constexpr int kernel_rows(int64_t rows_a_kv_head) { return rows_a_kv_head <= 4 ? 4 : 8; }

// Everything of a launch but the workspace; false where a CTA's `capacity` of shared memory is too small.
template <int kRows>
bool plan_launch(const DecodeParams& params, int capacity, Launch* launch) {
  launch->shared = shared_plan(params.key, params.value, kRows, sizeof(Own<kRows>), capacity);
  launch->page_tiles = params.page_size / kTileTokens;
  return launch->shared.stages >= 2;
}

}  // namespace jax_foscar::blackwell
