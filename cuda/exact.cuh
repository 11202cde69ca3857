// Exact tokens: sinks and the newest ones, bf16 rows straight from global memory, 16 at a time through bf16 tensor
// cores.
//
// Queries and probabilities are split in two bf16 parts each, which share a tile's columns as the integer digits do.  A
// few hundred tokens a row at most, so nothing here is tuned.
#pragma once

#include <cuda_bf16.h>

#include "values.cuh"

namespace jax_foscar::cuda {

// bf16 parts of a pair: x = high + low.
__device__ __forceinline__ uint32_t bf16_part(float2 x, bool low) {
  __nv_bfloat162 high = __floats2bfloat162_rn(x.x, x.y);
  if (low) high = __floats2bfloat162_rn(x.x - __low2float(high), x.y - __high2float(high));
  return *reinterpret_cast<const uint32_t*>(&high);
}

// Two neighbouring channels of a query, of any dtype.
__device__ __forceinline__ float2 load_query_pair(const DecodeParams& params, int64_t i) {
  if (params.q_dtype == DType::kBF16) return load_query_pair<DType::kBF16>(params.q, i);
  if (params.q_dtype == DType::kF16) return load_query_pair<DType::kF16>(params.q, i);
  return load_query_pair<DType::kF32>(params.q, i);
}

// The lane's two tokens of a chunk: their slots, or -1.
struct ExactChunk {
  int token[2];  // number g and 8 + g
  int slot[2];

  __device__ ExactChunk(const RowWork& work, const Windows& windows, int chunk, int lane) {
    const int count = work.exact_sinks + max(work.length - work.exact_begin, 0);
    for (int r = 0; r < 2; ++r) {
      const int i = chunk * kExactTokens + 8 * r + lane / 4;
      token[r] = i < work.exact_sinks ? i : work.exact_begin + i - work.exact_sinks;
      slot[r] = i < count ? windows.slot(token[r]) : -1;
    }
  }
};

// scores[tile][0][r] = Q . K of the lane's tokens and query row.  `head_slots` is the head's first slot in [.., S + W].
template <int kDim, int kTiles>
__device__ __forceinline__ void score_exact(const DecodeParams& params, const ItemRows& rows, const ExactChunk& chunk,
                                            int64_t head_slots, int lane, float (&scores)[kTiles][1][2]) {
  const int g = lane / 4, c = lane % 4;
  constexpr int kSteps = padded_dim(kDim) / 32;
  uint4 keys[kSteps][2];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int channel = 32 * step + 8 * c;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      keys[step][r] = {};
      if ((kDim % 32 == 0 || channel < kDim) && chunk.slot[r] >= 0)
        keys[step][r] =
            *reinterpret_cast<const uint4*>(params.key.exact + (head_slots + chunk.slot[r]) * kDim + channel);
    }
  }
  float sums[kTiles][4] = {};
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int64_t index = rows.query_index(4 * tile + g / 2);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int channel = 32 * step + 8 * c;
      uint32_t q[4] = {};
      if ((kDim % 32 == 0 || channel < kDim) && index >= 0) {
        for (int i = 0; i < 4; ++i)
          q[i] = bf16_part(load_query_pair(params, index * kDim + channel + 2 * i), g % 2 == 1);
      }
      // Which channel is which k is free, as long as keys and queries agree.
      const uint4 first = keys[step][0], second = keys[step][1];
      ptx::mma_bf16(sums[tile], {first.x, second.x, first.y, second.y}, {q[0], q[1]});
      ptx::mma_bf16(sums[tile], {first.z, second.z, first.w, second.w}, {q[2], q[3]});
    }
  }
  for (int tile = 0; tile < kTiles; ++tile) {
    for (int r = 0; r < 2; ++r) scores[tile][0][r] = sums[tile][2 * r] + sums[tile][2 * r + 1];
  }
}

// The values of a chunk's tokens, read before the scores are made so that they come with the keys: pairs of channels
// 16 u + 8 (i % 2) + 2 c of the lane's token i / 2.
template <int kDim>
struct ExactValues {
  uint32_t values[kDim / 16][4];

  __device__ __forceinline__ ExactValues(const DecodeParams& params, const ExactChunk& chunk, int64_t head_slots,
                                         int lane) {
#pragma unroll
    for (int u = 0; u < kDim / 16; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int slot = chunk.slot[i / 2], channel = 16 * u + 8 * (i % 2) + 2 * (lane % 4);
        values[u][i] = 0;
        if (slot >= 0)
          values[u][i] = *reinterpret_cast<const uint32_t*>(params.value.exact + (head_slots + slot) * kDim + channel);
      }
    }
  }
};

// `seen`: of the lane's two tokens, by its query rows, one bit a tile.  A value that a query does not see may be
// anything, and 0 * NaN is NaN: where queries differ in what they see, each takes a product of its own.
template <int kDim, int kTiles, int kMaxGroups>
__device__ __forceinline__ void add_values_exact(const ExactValues<kDim>& chunk, const unsigned (&seen)[2],
                                                 const float (&p)[kTiles][1][2], int lane,
                                                 Outputs<kDim, kTiles, kMaxGroups>& out) {
  constexpr unsigned kAllTiles = (1u << kTiles) - 1;
  const int c = lane % 4;
  uint2 b[kTiles];
  unsigned seen_by_any[2];
  bool differ = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const unsigned pair = seen[r] | __shfl_xor_sync(kAllLanes, seen[r], 1);
    seen_by_any[r] = pair | __shfl_xor_sync(kAllLanes, pair, 2);
    differ |= seen_by_any[r] != 0 && seen[r] != kAllTiles;
  }
  differ = __any_sync(kAllLanes, differ);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    uint32_t parts[2];  // a token's high and low part
    for (int r = 0; r < 2; ++r) {
      const float2 weight = {p[tile][0][r], 0.0f};
      parts[r] = ptx::transpose_b16(bf16_part(weight, false) | bf16_part(weight, true) << 16);
    }
    b[tile] = {parts[0], parts[1]};
  }
  // The values of 16 channels, of the tokens that are asked for.
  const auto values = [&](int u, bool first, bool second, uint32_t (&a)[4]) {
    for (int i = 0; i < 4; ++i) a[i] = ptx::transpose_b16((i / 2 == 0 ? first : second) ? chunk.values[u][i] : 0);
  };
  const auto add = [&](int u, int tile, const uint32_t (&a)[4], bool wanted) {
    float sums[4] = {};
    ptx::mma_bf16(sums, a, b[tile]);
    if (!wanted) return;
    out.sums[tile][u][0] += sums[0] + sums[1];
    out.sums[tile][u][1] += sums[2] + sums[3];
  };
#pragma unroll
  for (int u = 0; u < kDim / 16; ++u) {
    uint32_t a[4];
    if (!differ) {
      values(u, seen_by_any[0] != 0, seen_by_any[1] != 0, a);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) add(u, tile, a, true);
    } else {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        for (int row = 0; row < 4; ++row) {
          const unsigned first = __shfl_sync(kAllLanes, seen[0], (lane & ~3) + row);
          const unsigned second = __shfl_sync(kAllLanes, seen[1], (lane & ~3) + row);
          values(u, first >> tile & 1, second >> tile & 1, a);
          add(u, tile, a, row == c);
        }
      }
    }
  }
}

}  // namespace jax_foscar::cuda
