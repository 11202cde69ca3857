// Loops whose index is a constant.
#pragma once

#include <type_traits>
#include <utility>

namespace jax_foscar::cuda {

// Calls f with 0 .. kCount - 1 as constants: an index into registers must be one, and the compiler does not unroll
// every loop in time.
template <int... kIndices, typename Call>
__device__ __forceinline__ void for_each(std::integer_sequence<int, kIndices...>, const Call& call) {
  (call(std::integral_constant<int, kIndices>{}), ...);
}
template <int kCount, typename Call>
__device__ __forceinline__ void for_each(const Call& call) {
  for_each(std::make_integer_sequence<int, kCount>{}, call);
}

}  // namespace jax_foscar::cuda
