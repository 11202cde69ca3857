// How results leave: the output's dtype, and the log-sum-exp from a base-2 maximum and a sum.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "params.h"
#include "sinks.h"

namespace jax_foscar::cuda {

__device__ __forceinline__ void convert(float x, float* to) { *to = x; }
__device__ __forceinline__ void convert(float x, __nv_bfloat16* to) { *to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void convert(float x, __half* to) { *to = __float2half_rn(x); }

// Calls `store` with where output number i is, of its type.
template <typename Store>
__device__ __forceinline__ void with_output(const DecodeParams& params, int64_t i, const Store& store) {
  if (params.q_dtype == DType::kBF16) {
    store(static_cast<__nv_bfloat16*>(params.out) + i);
  } else if (params.q_dtype == DType::kF16) {
    store(static_cast<__half*>(params.out) + i);
  } else {
    store(static_cast<float*>(params.out) + i);
  }
}

__device__ __forceinline__ void store_output(const DecodeParams& params, int64_t i, float x) {
  with_output(params, i, [x](auto* to) { convert(x, to); });
}

// Four neighbouring channels, i being a multiple of 4.
__device__ __forceinline__ void store_outputs(const DecodeParams& params, int64_t i, float4 x) {
  if (params.q_dtype == DType::kF32) {
    reinterpret_cast<float4*>(params.out)[i / 4] = x;
    return;
  }
  uint2 packed;
  if (params.q_dtype == DType::kBF16) {
    const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(x.x, x.y), __floats2bfloat162_rn(x.z, x.w)};
    memcpy(&packed, pairs, sizeof packed);
  } else {
    const __half2 pairs[2] = {__floats2half2_rn(x.x, x.y), __floats2half2_rn(x.z, x.w)};
    memcpy(&packed, pairs, sizeof packed);
  }
  reinterpret_cast<uint2*>(params.out)[i / 4] = packed;
}

// Joins the head's sink, where there are sinks, to a softmax of base-2 maximum and sum; returns what an output's sum is
// multiplied by.  `index` is that of [B, T, N].
__device__ __forceinline__ float normalize(const DecodeParams& params, int64_t index, float* max, float* sum) {
  float factor = 1.0f;
  if (params.features.sinks != nullptr) {
    const int head = static_cast<int>(index % params.num_heads);
    const int row = static_cast<int>(index / params.num_heads / params.num_queries);
    factor = join_sink(params.sink(row, head) * 1.4426950408889634f, max, sum, [](float x) { return exp2f(x); });
  }
  return *sum == 0.0f ? 0.0f : factor / *sum;
}

// -inf where no token was seen, NaN where the sum is.
__device__ __forceinline__ float natural_lse(float max, float sum) {
  return sum == 0.0f ? -INFINITY : fmaf(max, 0.69314718055994531f, logf(sum));
}

}  // namespace jax_foscar::cuda
