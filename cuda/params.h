// What one decode-attention call hands to a kernel, on either platform: plain pointers, each with its shape.
//
// Sizes: B rows, T queries a row, N query heads, K KV heads, U pools, L layers, P pages a pool and layer, M page-table
// entries a row, S sink slots, W ring slots.  Row rule: row r of B uses entry r * X / B of an operand with X rows.
#pragma once

#include <cstdint>

#include "page_format.h"
#include "visibility.h"
#include "windows.h"

namespace jax_foscar {

enum class DType { kF32, kBF16, kF16 };

// How keys or values are stored.
struct OperandFormat {
  int bits;   // 2, 4 or 16
  int dim;    // head dim
  int group;  // channels (per token) or tokens (per channel) that share one scale and offset
  bool per_channel;

  // Pairs of (scale, offset) that a tile of one head holds, and a page, and the pair of a code of the page.
  JF_HOST_DEVICE constexpr int tile_pairs() const { return kTileTokens * dim / group; }
  JF_HOST_DEVICE constexpr int64_t page_pairs(int page_size) const {
    return int64_t{page_size / kTileTokens} * tile_pairs();
  }
  JF_HOST_DEVICE constexpr int pair_index(int token, int channel) const {
    return per_channel ? token / group * dim + channel : token * (dim / group) + channel / group;
  }
  JF_HOST_DEVICE constexpr int64_t page_bytes(int page_size) const {
    return int64_t{page_size} * token_bytes(bits, dim);
  }
};

// Keys or values, to read.
struct OperandParams : OperandFormat {
  const uint8_t* codes;   // [U, L, P, K, page_size, token_bytes(bits, dim)]
  const void* params;     // (scale, offset) pairs of param_dtype, null at 16 bits:
                          //   per token    [U, L, P, K, page_size, dim / group, 2]
                          //   per channel  [U, L, P, K, page_size / group, dim, 2]
  const uint16_t* exact;  // bf16 [exact_rows, L, K, S + W, dim], null when the format keeps no exact tokens
};

// Not inlined: a 64-bit division takes a GPU 0.3 us and 50 instructions.
JF_HOST_DEVICE JF_NOINLINE inline int spread_row(int row, int rows, int batch) {
  return static_cast<int>(int64_t{row} * rows / batch);
}

// The sizes that every call on a cache has.
struct CacheShape {
  int batch, num_kv_heads;                           // B, K
  int pools, layers, pages, page_size, table_width;  // U, L, P, tokens, M
  Windows windows;
  DType param_dtype;  // kF16 or kF32

  // Index of page `id` of the row's pool in the leading [U, L, P] axes, or -1 if the id or the layer is out of range.
  JF_HOST_DEVICE int64_t page_index(int row, int layer_index, int id) const {
    if (id < 0 || id >= pages || layer_index < 0 || layer_index >= layers) return -1;
    return (int64_t{row_entry(row, pools)} * layers + layer_index) * pages + id;
  }

  // Entry of a row in an operand that has `rows` of them.
  JF_HOST_DEVICE int row_entry(int row, int rows) const {
    // Most operands have a row each, or one for all.
    return rows == batch ? row : rows == 1 ? 0 : spread_row(row, rows, batch);
  }
};

struct DecodeParams : CacheShape {
  const void* q;  // q_dtype [B, T, N, key.dim]
  OperandParams key;
  OperandParams value;
  const int32_t* page_table;  // [table_rows, M], ids in [0, P) of the row's own pool
  const int32_t* length;      // [length_rows], tokens cached, the T queries' own included
  const int32_t* layer;       // [layer_rows]
  void* out;                  // q_dtype [B, T, N, value.dim]
  float* lse;                 // [B, T, N], natural log

  int num_queries, num_heads;  // T, N
  int table_rows, length_rows, layer_rows, exact_rows;
  Features features;
  float scale;  // multiplies the logits
  DType q_dtype;

  // Query rows that share a KV head.
  JF_HOST_DEVICE constexpr int64_t rows_a_kv_head() const { return int64_t{num_queries} * (num_heads / num_kv_heads); }

  // The queries of a row, in a cache whose length is not yet held against its capacity.
  JF_HOST_DEVICE RowQueries row_queries(int row) const { return row_queries(row, length[row_entry(row, length_rows)]); }
  // The same where the row's length has been read.
  JF_HOST_DEVICE RowQueries row_queries(int row, int n) const {
    const Features& f = features;
    int count = num_queries;
    if (n < 0) n = 0;
    if (f.query_lengths != nullptr) {
      const int given = f.query_lengths[row_entry(row, f.query_length_rows)];
      count = given < 0 ? 0 : given < count ? given : count;
    }
    const int64_t tree_size = int64_t{num_queries} * num_queries;
    const uint8_t* tree = f.tree_mask;
    if (tree != nullptr) tree += row_entry(row, f.tree_mask_rows) * tree_size;
    return {n, count, n - count, num_queries, tree};
  }

  // The sink of a row's query head; only where there are sinks.
  JF_HOST_DEVICE float sink(int row, int head) const {
    return features.sinks[int64_t{row_entry(row, features.sink_rows)} * num_heads + head];
  }
};

}  // namespace jax_foscar
