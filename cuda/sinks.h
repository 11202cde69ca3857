// Attention sinks: one learned logit a head that takes part in the softmax's denominator and brings no value.
#pragma once

#include <cmath>

#include "page_format.h"

namespace jax_foscar {

// Joins a sink to a softmax with maximum `max` (-inf: no token was seen) and sum of exp(logit - max): both become those
// with the sink, and the factor for what was summed up under the old maximum is returned.  A sink that is NaN or +inf
// makes the sum NaN.  `exp` is of the base that sink and maximum are logarithms of.
template <typename Exp>
JF_HOST_DEVICE inline float join_sink(float sink, float* max, float* sum, Exp exp) {
  const float top = sink > *max ? sink : *max;
  const float base = top == -INFINITY ? 0.0f : top;
  const float factor = exp(*max - base);
  *sum = *sum * factor + exp(sink - base);
  *max = top;
  return factor;
}

}  // namespace jax_foscar
