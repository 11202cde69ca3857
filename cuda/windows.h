// Which tokens of a row are exact and which are quantized: pure functions of its length (DESIGN: "positions alone
// decide").  jax_foscar/windows.py states the same rules in Python.
#pragma once

#include "page_format.h"

namespace jax_foscar {

// The static part of the rule, from the cache's format.
struct Windows {
  int sink;    // the first `sink` tokens are always exact
  int recent;  // at least the last `recent` tokens are exact
  int group;   // tokens are quantized `group` at a time: lcm of the token groups of K and V, 1 if both are per token;
               // a power of two
  int ring;    // ring slots a row and layer; 0 when the format keeps no exact tokens

  // Tokens [sink, quantized_length(n)) are quantized once n tokens are cached.
  JF_HOST_DEVICE constexpr int quantized_length(int n) const { return n > recent ? (n - recent) & -group : 0; }

  // First token the query at position p, in a row of n tokens, reads from the exact arrays: what a cache of p + 1
  // tokens would hold, but never older than the ring (queries further back than the ring read quantized tokens
  // instead).
  JF_HOST_DEVICE constexpr int boundary(int p, int n) const {
    const int own = quantized_length(p + 1);
    const int oldest = n > ring ? (n - ring + group - 1) & -group : 0;
    return ring > 0 && oldest > own ? oldest : own;
  }

  // Slot of an exact token in the [sink + ring] axis of the exact arrays.
  JF_HOST_DEVICE constexpr int slot(int t) const { return t < sink ? t : sink + t % ring; }
};

}  // namespace jax_foscar
