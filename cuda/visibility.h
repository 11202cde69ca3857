// Which tokens a query sees (causal rule, local window, ragged queries, draft trees) and what else a call asks for,
// answered once for all kernels.  jax_foscar/visibility.py states the same rules in Python.
#pragma once

#include <cstdint>

#include "windows.h"

namespace jax_foscar {

inline constexpr int kUnbounded = 0x7fffffff;  // a window's side without a limit

// What a call asks for beyond plain causal attention.  Operands that were not given are null and have 0 rows.
struct Features {
  bool causal;
  int window_left, window_right;  // tokens before and after the query's position that it sees; right: if not causal
  float soft_cap;                 // logits become soft_cap * tanh(logit / soft_cap); 0: as they are
  const float* sinks;             // [sink_rows, N], one more logit a head, without a value
  const int32_t* query_lengths;   // [query_length_rows], real queries a row, clipped to [0, T]
  const uint8_t* tree_mask;       // [tree_mask_rows, T, T], 0 or 1: query j sees the draft token i
  int sink_rows, query_length_rows, tree_mask_rows;
};

// The queries of one row: the first `count` of its T are real, the newest tokens; the others are padding.
struct RowQueries {
  int length;           // tokens cached
  int count;            // real queries
  int first;            // length - count, query 0's place; negative where there are more queries than tokens
  int stride;           // T
  const uint8_t* tree;  // [T, T] of the row, or null
};

// What one query sees: the tokens begin <= t < end, drafts (t >= first_draft) only where the tree lets it.
struct Visible {
  int begin, end;         // empty if begin >= end
  int boundary;           // the tokens from here on, and the sink tokens, are read from the exact arrays
  int first_draft;        // only of a meaning with `drafts`
  const uint8_t* drafts;  // of the query: draft token first_draft + i is seen iff drafts[i]; null: all are

  JF_HOST_DEVICE constexpr bool sees(int t) const {
    return begin <= t && t < end && (drafts == nullptr || t < first_draft || drafts[t - first_draft] != 0);
  }
  JF_HOST_DEVICE constexpr bool sees_paged(int t, int sink) const { return t >= sink && t < boundary && sees(t); }
  JF_HOST_DEVICE constexpr bool sees_exact(int t, int sink) const { return (t < sink || t >= boundary) && sees(t); }
};

// First token in a window that reaches `left` tokens back from a position.  No difference overflows: a compiler may
// take max(position - left, 0) for the choice, and did.
JF_HOST_DEVICE constexpr int window_begin(int position, int left) {
  const int at = position > 0 ? position : 0;
  return at > left ? at - left : 0;
}

// First token that any query of the row may see; pages wholly before it are not read, and their ids may be anything.
JF_HOST_DEVICE constexpr int first_visible(const Features& features, const RowQueries& row) {
  if (row.count == 0) return row.length;
  return window_begin(row.first, features.window_left);
}

// What query j of a row sees.  In a tree its position is that of its depth: as many tokens further as it sees drafts,
// the newest of them standing for itself; the window counts along that path.  A tree that is a chain is the causal
// rule.
JF_HOST_DEVICE constexpr Visible visible(const Features& features, const Windows& windows, const RowQueries& row,
                                         int query) {
  Visible v = {};
  if (query >= row.count) return v;
  const int n = row.length, left = features.window_left, right = features.window_right;
  int position = row.first + query, oldest_draft = 0;
  if (row.tree != nullptr) {
    v.drafts = row.tree + int64_t{query} * row.stride;
    v.first_draft = row.first;
    const int first = row.first > 0 ? row.first : 0;
    int seen = 0;
    v.end = first;
    for (int t = n - 1; t >= first; --t) {  // n - first <= T
      if (v.drafts[t - row.first] == 0) continue;
      if (seen == 0) v.end = t + 1;
      if (seen <= left) oldest_draft = t;
      ++seen;
    }
    position = first + (seen > 0 ? seen - 1 : 0);
    v.begin = seen > left ? oldest_draft : window_begin(position, left);
  } else {
    v.begin = window_begin(position, left);
    v.end = features.causal ? position + 1 : right < n - 1 - position ? position + 1 + right : n;
    if (v.end < 0) v.end = 0;
  }
  v.boundary = windows.ring == 0 ? n : windows.boundary(features.causal ? position : n - 1, n);
  return v;
}

}  // namespace jax_foscar
