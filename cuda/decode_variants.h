// The compiled variants of the fast kernel, and what a launch hands to them.
#pragma once

#include <cstdint>

#include "params.h"

struct CUstream_st;

namespace jax_foscar::cuda {

inline constexpr int kMaxStages = 4;

// Bytes of one tile of 64 tokens of one KV head, and where its parts lie in a stage.
struct TileBytes {
  int key_codes, value_codes, key_params, value_params;

  JF_HOST_DEVICE constexpr int value_codes_at() const { return key_codes; }
  JF_HOST_DEVICE constexpr int key_params_at() const { return key_codes + value_codes; }
  JF_HOST_DEVICE constexpr int value_params_at() const { return key_params_at() + key_params; }
  JF_HOST_DEVICE constexpr int total() const { return value_params_at() + value_params; }
};

// What a launch knows beside the call's parameters.
struct Plan {
  int blocks;                // blocks of query rows a KV head
  int page_tiles;            // tiles a page
  int stages;                // of a worker's ring
  int key_kind, value_kind;  // lines of the kernel's own lists
  TileBytes bytes;
  int* row_start;  // [B + 1], workspace.h
  float* pieces;   // [workers, 2, piece_floats]
};

// One way to quantize keys or values.  `group` counts channels, 0 for the whole head; per channel, tokens, 0 for 32 or
// 64 as the launch says.
struct QuantKind {
  int bits;
  bool per_channel;
  int group;

  constexpr int channel_groups(int dim) const { return per_channel || group == 0 ? 1 : dim / group; }
};

// One kernel.
struct DecodeVariant {
  int dim;         // of keys and values
  int rows;        // query rows of an item
  int team;        // warps that share a worker's ring, each with some of the rows
  int pair_bytes;  // a (scale, offset) pair
  const QuantKind *keys, *values;
  int num_keys, num_values;
  int max_warps;
  int stages;      // of a worker's ring, 0 where the launch chooses
  int warp_bytes;  // shared memory of a warp beside the ring
  const char* (*launch)(const DecodeParams& params, const Plan& plan, int grid, int warps, int shared, bool overlap,
                        CUstream_st* stream);
};

struct DecodeVariants {
  const DecodeVariant* begin;
  const DecodeVariant* end;
};

// One table a source file; the first variant that serves a call runs, so tuned ones come before those of any kind.
DecodeVariants decode_variants_d128();      // one kind each
DecodeVariants decode_variants_d128_any();  // all kinds
DecodeVariants decode_variants_d64();
DecodeVariants decode_variants_d80_d96();
DecodeVariants decode_variants_d192();
DecodeVariants decode_variants_d256();

}  // namespace jax_foscar::cuda
