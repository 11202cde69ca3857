// Host side of one variant of the fast kernel: the launch, and its line in the table.
#pragma once

#include <cuda_runtime.h>

#include <iterator>

#include "decode_mma.cuh"
#include "decode_variants.h"
#include "launch_overlap.h"
#include "shared_limit.h"

namespace jax_foscar::cuda {

template <class T>
const char* launch_variant(const DecodeParams& params, const Plan& plan, int grid, int warps, int shared, bool overlap,
                           CUstream_st* stream) {
  static SharedLimit limit;
  cudaError_t error = limit.raise(decode_mma<T>);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(32 * warps);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  LaunchOverlap attribute;
  if (overlap) attribute.add_to(&config);
  error = cudaLaunchKernelEx(&config, decode_mma<T>, params, plan);
  if (error == cudaSuccess) error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class T>
constexpr DecodeVariant variant() {
  return {T::kDim,         T::kRows,          T::kTeam,     T::kPairBytes,     T::Keys::kTable, T::Values::kTable,
          T::Keys::kCount, T::Values::kCount, T::kMaxWarps, T::Sizes::kStages, T::kWarpBytes,   launch_variant<T>};
}

// Kinds by name: per token with `group` channels (0: the whole head), per channel with `group` tokens (0: 32 or 64).
template <int kBits, int kGroup = 0>
using Token = Kind<kBits, false, kGroup>;
template <int kBits, int kGroup = 0>
using Channel = Kind<kBits, true, kGroup>;

// Every kind, and those without groups of 64 channels, for head dims that these do not divide, or that are one.
using AllKinds =
    KindList<Token<4>, Token<2>, Token<4, 64>, Token<2, 64>, Token<4, 32>, Token<2, 32>, Channel<4>, Channel<2>>;
using KindsTo32 = KindList<Token<4>, Token<2>, Token<4, 32>, Token<2, 32>, Channel<4>, Channel<2>>;

// The same kinds for keys and values, chosen at run time.
template <class Kinds, int kDim, int kRows, int kPairBytes = 4>
constexpr DecodeVariant any_kind() {
  return variant<Traits<Kinds, Kinds, kDim, kRows, kPairBytes>>();
}

// One kind of keys and one of values: nothing to choose.
template <class Key, class Value, int kDim, int kRows>
constexpr DecodeVariant one_kind() {
  return variant<Traits<KindList<Key>, KindList<Value>, kDim, kRows, 4>>();
}

}  // namespace jax_foscar::cuda
