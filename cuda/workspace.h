// The scratch memory of one decode-attention call, sized without device facts: XLA allocates it before it knows the
// GPU.
//
//   row_start  i32 [B + 1]        where each row's work begins in the flattened list (schedule.cuh)
//   pieces     f32 [workers, 2]   what a worker has of an item that it shares with others: slot 0 of one that began
//              before its range, slot 1 of one that begins in it; each [rows, D_v] outputs, [rows] maxima, [rows] sums
//
// It arrives uninitialised; the decode kernel writes what the combine kernel reads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "params.h"

namespace jax_foscar {

inline constexpr int kMaxWorkers = 2048;  // warps of the whole grid

// Query rows that one item of work carries: 4 a tensor-core tile, up to 4 tiles, or 2 where outputs are wide.
constexpr int item_rows(int64_t rows_a_kv_head, int64_t value_dim) {
  return rows_a_kv_head <= 4 ? 4 : rows_a_kv_head <= 8 || value_dim > 128 ? 8 : 16;
}

constexpr int64_t workspace_header_bytes(int64_t batch) { return (batch + 1 + 3) / 4 * 16; }

constexpr int64_t piece_floats(int rows, int64_t value_dim) { return rows * (value_dim + 2); }

// Sizes: B rows, T queries a row, N query heads, K KV heads, D_v value head dim.
constexpr int64_t workspace_bytes(int64_t batch, int64_t num_queries, int64_t num_heads, int64_t num_kv_heads,
                                  int64_t value_dim) {
  const int rows = item_rows(num_queries * (num_heads / num_kv_heads), value_dim);
  return workspace_header_bytes(batch) + 4 * 2 * kMaxWorkers * piece_floats(rows, value_dim);
}

// Its parts; null where it is too small for the call.
struct Workspace {
  int* row_start = nullptr;
  float* pieces = nullptr;

  Workspace(const DecodeParams& params, void* memory, size_t bytes) {
    const int64_t needed =
        workspace_bytes(params.batch, params.num_queries, params.num_heads, params.num_kv_heads, params.value.dim);
    if (memory == nullptr || static_cast<int64_t>(bytes) < needed) return;
    row_start = static_cast<int*>(memory);
    pieces = reinterpret_cast<float*>(static_cast<uint8_t*>(memory) + workspace_header_bytes(params.batch));
  }
};

}  // namespace jax_foscar
