// What one write of new tokens hands to a kernel, on either platform, and what it comes to for each row and token.
//
// Sizes as in params.h, with T tokens handed over a row.  All arrays but k and v belong to the cache and are updated in
// place; a vmapped axis stands in front of U and of B.
#pragma once

#include "params.h"

namespace jax_foscar {

// Keys or values, to write.
struct WriteOperand : OperandFormat {
  uint8_t* codes;      // as in OperandParams
  void* params;        // as in OperandParams
  uint16_t* exact;     // bf16 [B, L, K, S + W, dim], null when the format keeps no exact tokens
  const void* tokens;  // token_dtype [B, T, K, dim]: k or v
  DType token_dtype;
};

// What a write does to one row.
struct RowWrite {
  int layer;
  int start, length;  // the new tokens, counted from the row's beginning; none where the write is refused as a whole
  int first, last;    // tokens that become quantized: a whole number of token groups, older tokens of the ring included
  bool refused;       // sets `overflowed`; so does a page that cannot be written
};

struct WriteParams : CacheShape {
  WriteOperand key;
  WriteOperand value;
  bool* overflowed;           // [B]
  const int32_t* page_table;  // [B, M]
  const int32_t* length;      // [B], the new tokens counted in
  const int32_t* num_new;     // [B]
  const int32_t* layer;       // [layer_rows]
  int num_tokens;             // T
  int layer_rows;

  JF_HOST_DEVICE RowWrite plan(int row) const {
    const int n = length[row], count = num_new[row], index = layer[row_entry(row, layer_rows)];
    const bool good = count <= num_tokens && count <= n && index >= 0 && index < layers;
    if (count <= 0 || !good) return {0, 0, 0, 0, 0, count > 0};
    return {index,
            n - count,
            n,
            windows.quantized_length(n - count),
            windows.quantized_length(n),
            n > int64_t{table_width} * page_size};
  }

  // First page of a row (as its table counts) that a write touches, and the one after the last.
  JF_HOST_DEVICE constexpr int first_page(const RowWrite& w) const { return first_paged(w) / page_size; }
  JF_HOST_DEVICE constexpr int end_page(const RowWrite& w) const {
    return first_paged(w) < w.last ? (w.last - 1) / page_size + 1 : first_page(w);
  }
  // Tokens [first_paged, last) go to pages: sinks do not.
  JF_HOST_DEVICE constexpr int first_paged(const RowWrite& w) const {
    return w.first > windows.sink ? w.first : windows.sink;
  }

  // Page `number` of a row, as an index of the leading [U, L, P] axes, or -1 if it cannot be written.
  JF_HOST_DEVICE int64_t page(int row, int layer_index, int number) const {
    return number < table_width ? page_index(row, layer_index, page_table[int64_t{row} * table_width + number]) : -1;
  }

  // Where a token stands in k or v, in elements, and in the exact arrays.
  JF_HOST_DEVICE constexpr int64_t new_at(int row, const RowWrite& w, int head, int token, int dim) const {
    return ((int64_t{row} * num_tokens + token - w.start) * num_kv_heads + head) * dim;
  }
  JF_HOST_DEVICE constexpr int64_t exact_at(int row, const RowWrite& w, int head, int slot, int dim) const {
    const int64_t slots = windows.sink + windows.ring;
    return (((int64_t{row} * layers + w.layer) * num_kv_heads + head) * slots + slot) * dim;
  }

  // The race that the order of a write must avoid: a new token overwrites the slot of an older one that is quantized
  // now.  All those older ones lie in [first, first + ring), where every slot has one token.  So whoever quantizes
  // token t of these also stores, afterwards, the token that its slot holds in the end: the newest t + i * ring.
  // Returns that token if it is new and no sink, else -1.
  JF_HOST_DEVICE constexpr int newest_in_slot(const RowWrite& w, int t) const {
    return newest_in_slot(w, t, turns_to_newest(w, t));
  }
  // How far before the newest in its slot a token is.
  JF_HOST_DEVICE constexpr int turns_to_newest(const RowWrite& w, int t) const {
    return (w.length - 1 - t) / windows.ring * windows.ring;
  }
  // newest_in_slot from the turns of t, or of a token before it by less than the ring.
  JF_HOST_DEVICE constexpr int newest_in_slot(const RowWrite& w, int t, int turns) const {
    if (t - w.first >= windows.ring) return -1;
    const int newest = t + turns < w.length ? t + turns : t + turns - windows.ring;
    return newest >= w.start && newest >= windows.sink ? newest : -1;
  }
};

}  // namespace jax_foscar
