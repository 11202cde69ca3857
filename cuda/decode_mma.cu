// Host side of the fast decode-attention kernel: which variant serves a call, its shared memory, and the two launches.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "combine.h"
#include "decode_mma.h"
#include "decode_variants.h"
#include "device_facts.h"
#include "schedule.cuh"
#include "workspace.h"

namespace jax_foscar::cuda {
namespace {

constexpr DecodeVariants (*kTables[])() = {decode_variants_d128,    decode_variants_d128_any, decode_variants_d64,
                                           decode_variants_d80_d96, decode_variants_d192,     decode_variants_d256};

// A variant, and the lines of its lists.
struct Choice {
  const DecodeVariant* variant = nullptr;
  int key_kind = 0, value_kind = 0;
};

int find_kind(const QuantKind* kinds, int count, const OperandParams& operand) {
  const int group = !operand.per_channel && operand.group == operand.dim ? 0 : operand.group;
  for (int i = 0; i < count; ++i) {
    const QuantKind& kind = kinds[i];
    if (kind.bits == operand.bits && kind.per_channel == operand.per_channel &&
        (kind.group == group || (kind.per_channel && kind.group == 0)))
      return i;
  }
  return -1;
}

Choice choose(const DecodeParams& params) {
  const int rows = item_rows(params.rows_a_kv_head(), params.value.dim);
  const int pair_bytes = params.param_dtype == DType::kF32 ? 8 : 4;
  for (const auto table : kTables) {
    const DecodeVariants variants = table();
    for (const DecodeVariant* v = variants.begin; v != variants.end; ++v) {
      if (v->dim != params.key.dim || v->dim != params.value.dim || v->rows != rows || v->pair_bytes != pair_bytes)
        continue;
      const int key_kind = find_kind(v->keys, v->num_keys, params.key);
      const int value_kind = find_kind(v->values, v->num_values, params.value);
      if (key_kind >= 0 && value_kind >= 0) return {v, key_kind, value_kind};
    }
  }
  return {};
}

TileBytes tile_bytes(const DecodeParams& params, int pair_bytes) {
  const auto codes = [](const OperandParams& operand) { return kTileTokens * token_bytes(operand.bits, operand.dim); };
  const auto pairs = [&](const OperandParams& operand) { return operand.tile_pairs() * pair_bytes; };
  return {codes(params.key), codes(params.value), pairs(params.key), pairs(params.value)};
}

}  // namespace

const char* refuse_decode_mma(const DecodeParams& params) {
  const Choice choice = choose(params);
  if (choice.variant == nullptr) return "jax_foscar decode_attention: the fast kernel has no such variant";
  // The schedule counts in 32 bits; a row and item has at most this many units.
  const int64_t most_units = int64_t{params.table_width} * params.page_size / kTileTokens +
                             (params.windows.sink + params.windows.ring + 1) / 8 + 2 + kIdleUnits;
  const int64_t rows = choice.variant->rows, blocks = (params.rows_a_kv_head() + rows - 1) / rows;
  if (most_units * params.batch * params.num_kv_heads * blocks > INT32_MAX)
    return "jax_foscar decode_attention: too much work for the fast kernel's 32-bit counts";
  if (int64_t{params.pools} * params.layers * params.pages * params.num_kv_heads * params.page_size / kTileTokens >
      INT32_MAX)
    return "jax_foscar decode_attention: too many pages for the fast kernel's 32-bit counts";
  if (int64_t{params.exact_rows} * params.layers * params.num_kv_heads * (params.windows.sink + params.windows.ring) >
      INT32_MAX)
    return "jax_foscar decode_attention: too many exact tokens for the fast kernel's 32-bit counts";
  for (const OperandParams* operand : {&params.key, &params.value}) {
    if (operand->per_channel && operand->group != 32 && operand->group != 64)
      return "jax_foscar decode_attention: the fast kernel takes token groups of 32 or 64";
  }
  return nullptr;
}

const char* launch_decode_mma(const DecodeParams& params, void* workspace, size_t workspace_bytes,
                              CUstream_st* stream) {
  const Choice choice = choose(params);
  const DecodeVariant& variant = *choice.variant;
  const Workspace parts(params, workspace, workspace_bytes);
  if (parts.pieces == nullptr) return "jax_foscar decode_attention: the workspace is too small";
  DeviceFacts facts = {};
  const cudaError_t error = device_facts(&facts);
  if (error != cudaSuccess) return cudaGetErrorString(error);

  const int rows = variant.rows;
  Plan plan = {};
  plan.blocks = static_cast<int>((params.rows_a_kv_head() + rows - 1) / rows);
  plan.page_tiles = params.page_size / kTileTokens;
  plan.key_kind = choice.key_kind, plan.value_kind = choice.value_kind;
  plan.bytes = tile_bytes(params, variant.pair_bytes);
  plan.row_start = parts.row_start, plan.pieces = parts.pieces;
  // As many teams as shared memory holds, with two stages each where the number is free, then as many stages.
  const auto shared = [&](int stages) { return stages * plan.bytes.total() + variant.team * variant.warp_bytes; };
  plan.stages = variant.stages > 0 ? variant.stages : 2;
  const int teams = std::min(variant.max_warps / variant.team, facts.shared / shared(plan.stages));
  if (teams == 0) return "jax_foscar decode_attention: a tile does not fit the device's shared memory";
  while (variant.stages == 0 && plan.stages < kMaxStages && teams * shared(plan.stages + 1) <= facts.shared)
    ++plan.stages;

  const int grid = std::min(facts.sms, kMaxWorkers / teams);
  if (grid * teams < params.num_kv_heads)
    return "jax_foscar decode_attention: more KV heads than the device runs warps";
  const bool overlap = facts.major >= 9;
  const char* failure =
      variant.launch(params, plan, grid, teams * variant.team, teams * shared(plan.stages), overlap, stream);
  if (failure != nullptr) return failure;
  return launch_combine(params, plan.row_start, plan.pieces, grid * teams, rows, plan.blocks, overlap, stream);
}

}  // namespace jax_foscar::cuda
