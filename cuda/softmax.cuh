// The online softmax of the fast kernel.  `T` is its Traits (decode_mma.cuh).
#pragma once

#include "ptx.cuh"
#include "schedule.cuh"

namespace jax_foscar::cuda {

// The softmax state of the lane's query rows 4 tile + c.
template <int kTiles>
struct Softmax {
  float max[kTiles];  // of the base-2 logits
  float sum[kTiles];  // of the lane's tokens
};

// cap * tanh(x / cap), where a cap is set.
__device__ __forceinline__ float capped(float x, float cap, float inverse) {
  // 1 - 2 / (e^2u + 1); 2.885... = 2 log2(e).
  return fmaf(-2.0f * cap, ptx::reciprocal(ptx::exp2(x * inverse * 2.8853900817779268f) + 1.0f), cap);
}

// How far (base 2) a score may pass the maximum before that is renewed: weights up to 2^kSlack do no harm, and most
// tiles need no exchange between lanes.
inline constexpr float kSlack = 4.0f;

// Turns scores into weights P = 2^(step * score - max), with a new maximum where a score asks for it.
template <class T, int kCount>
__device__ __forceinline__ void exponentiate(const float (&steps)[T::kTiles], float (&scores)[T::kTiles][kCount][2],
                                             Softmax<T::kTiles>& softmax, typename T::Outputs& out) {
#pragma unroll
  for (int tile = 0; tile < T::kTiles; ++tile) {
    const float step = steps[tile];
    float max = scores[tile][0][0];
#pragma unroll
    for (int i = 1; i < 2 * kCount; ++i) max = fmaxf(max, scores[tile][i / 2][i % 2]);
    max *= step;
    if (__any_sync(kAllLanes, max > softmax.max[tile] + kSlack)) {
      max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 4));
      max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 8));
      max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 16));
      max = fmaxf(softmax.max[tile], max);
      // A lane without a new maximum may be at -inf, whose difference would be NaN.
      const float alpha = max > softmax.max[tile] ? ptx::exp2(softmax.max[tile] - max) : 1.0f;
      softmax.max[tile] = max;
      softmax.sum[tile] *= alpha;
#pragma unroll
      for (int group = 0; group < T::kGroups; ++group) out.offsets[tile][group] *= alpha;
#pragma unroll
      for (int u = 0; u < T::Outputs::kRowTiles; ++u) out.sums[tile][u][0] *= alpha, out.sums[tile][u][1] *= alpha;
    }
    const float base = softmax.max[tile] == -INFINITY ? 0.0f : softmax.max[tile];
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) {
      float& p = scores[tile][i / 2][i % 2];
      p = ptx::exp2(fmaf(p, step, -base));
      softmax.sum[tile] += p;
    }
  }
}

// Scores to capped logits (base 2), whose step is 1.
template <class T, int kCount>
__device__ __forceinline__ void cap_scores(const DecodeParams& params, float (&steps)[T::kTiles],
                                           float (&scores)[T::kTiles][kCount][2]) {
  const float cap = params.features.soft_cap * 1.4426950408889634f, inverse = 1.0f / cap;
#pragma unroll
  for (int tile = 0; tile < T::kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) {
      float& score = scores[tile][i / 2][i % 2];
      score = capped(score * steps[tile], cap, inverse);
    }
    steps[tile] = 1.0f;
  }
}

}  // namespace jax_foscar::cuda
