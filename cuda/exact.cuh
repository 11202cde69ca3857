// Exact tokens: sinks and the newest ones, bf16 rows, 8 or 16 at a time through bf16 tensor cores.
//
// Queries and probabilities are split in two bf16 parts each, which share a tile's columns as the integer digits do.
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

// The lane's two tokens of a chunk: number g and 8 + g, or -1.
struct ExactChunk {
  int tokens;  // of a whole chunk, 8 or 16
  int token[2];

  __device__ __forceinline__ ExactChunk(int tokens, const RowWork& work, int chunk, int lane) : tokens(tokens) {
    for (int r = 0; r < 2; ++r) {
      const int i = 8 * r + lane / 4;
      token[r] = i < tokens ? work.exact_token(chunk * tokens + i) : -1;
    }
  }
  // Row i of 16 in shared memory; a chunk of 8 repeats its own, which nobody sees.
  __device__ __forceinline__ int row(int i) const { return i & (tokens - 1); }
};

// The B operand: the even column of a query row has its high parts, the odd one its low parts, of channels 32 step + 8
// c
// .. + 7.
template <int kDim, int kTiles>
struct ExactQueries {
  static constexpr int kSteps = padded_dim(kDim) / 32;
  uint32_t parts[kTiles][kSteps][4];

  __device__ __forceinline__ ExactQueries(const DecodeParams& params, const ItemRows& rows, int lane) {
    const int g = lane / 4, c = lane % 4;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int64_t index = rows.query_index(4 * tile + g / 2);
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) {
        const int channel = i / 4 * 32 + 8 * c + i % 4 * 2;
        const bool there = index >= 0 && (kDim % 32 == 0 || channel < kDim);
        parts[tile][i / 4][i % 4] = there ? bf16_part(load_query_pair(params, index * kDim + channel), g % 2 == 1) : 0;
      }
    }
  }
};

// scores[tile][0][r] = Q . K of the lane's tokens and query row; `keys` is the chunk in shared memory.
template <class Stream, int kDim, int kTiles>
__device__ __forceinline__ void score_exact(const uint8_t* keys, const ExactChunk& chunk,
                                            const ExactQueries<kDim, kTiles>& queries, int lane,
                                            float (&scores)[kTiles][1][2]) {
  const int g = lane / 4, c = lane % 4;
  float sums[kTiles][4] = {};
#pragma unroll
  for (int step = 0; step < ExactQueries<kDim, kTiles>::kSteps; ++step) {
    const int i = 4 * step + c;
    uint4 x[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (kDim % 32 == 0 || 8 * i < kDim)
        x[r] = *reinterpret_cast<const uint4*>(keys + Stream::exact_at(chunk.row(8 * r + g), i));
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      // Which channel is which k is free, as long as keys and queries agree.
      const uint32_t (&q)[4] = queries.parts[tile][step];
      ptx::mma_bf16(sums[tile], {x[0].x, x[1].x, x[0].y, x[1].y}, {q[0], q[1]});
      ptx::mma_bf16(sums[tile], {x[0].z, x[1].z, x[0].w, x[1].w}, {q[2], q[3]});
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int r = 0; r < 2; ++r) scores[tile][0][r] = sums[tile][2 * r] + sums[tile][2 * r + 1];
  }
}

// Keeps the elements of the tokens 2 c and 2 c + 1 whose lanes 4 g + c of `seen` have a bit.
__device__ __forceinline__ uint32_t pair_mask(unsigned seen, int lane) {
  const unsigned pair = seen >> 8 * (lane % 4);
  return ((pair & 0x0f) != 0 ? 0x0000ffffu : 0) | ((pair & 0xf0) != 0 ? 0xffff0000u : 0);
}

// `seen[r][tile]`: bit 4 g + c is set if query row c of the tile sees token 8 r + g.  A value that a query does not see
// may be anything, and 0 * NaN is NaN: where queries differ in what they see, each takes a product of its own.
template <class Stream, int kDim, int kTiles, int kMaxGroups>
__device__ __forceinline__ void add_values_exact(const uint8_t* values, const ExactChunk& chunk,
                                                 const unsigned (&seen)[2][kTiles], const float (&p)[kTiles][1][2],
                                                 int lane, Outputs<kDim, kTiles, kMaxGroups>& out) {
  const int c = lane % 4;
  unsigned by_any[2], differ = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    unsigned by_all = kAllLanes;
    by_any[r] = 0;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) by_any[r] |= seen[r][tile], by_all &= seen[r][tile];
    const unsigned pairs = by_any[r] | by_any[r] >> 1, tokens = (pairs | pairs >> 2) & 0x11111111u;
    differ |= tokens * 15 & ~by_all;
  }
  uint2 b[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    uint32_t parts[2];  // a token's high and low part
    for (int r = 0; r < 2; ++r) {
      const float2 weight = {p[tile][0][r], 0.0f};
      parts[r] = ptx::transpose_b16(bf16_part(weight, false) | bf16_part(weight, true) << 16);
    }
    b[tile] = {parts[0], parts[1]};
  }
  const uint32_t from = ptx::shared_address(values);
  const int token = chunk.row(lane / 16 * 8 + lane % 8), half = lane / 8 % 2;  // of the row that the lane points at
  // The products of the tokens that are asked for, to the outputs where `wanted`.
  const auto add = [&](int tile, unsigned first, unsigned second, bool wanted) {
    const uint32_t masks[2] = {pair_mask(first, lane), pair_mask(second, lane)};
#pragma unroll
    for (int u = 0; u < kDim / 16; ++u) {
      uint32_t x[4];  // channels 16 u + 8 (i % 2) + g of tokens 8 (i / 2) + 2 c, + 1
      ptx::load_transposed_b16(x, from + Stream::exact_at(token, 2 * u + half));
      float sums[4] = {};
      ptx::mma_bf16(sums, {x[0] & masks[0], x[1] & masks[0], x[2] & masks[1], x[3] & masks[1]}, b[tile]);
      if (!wanted) continue;
      out.sums[tile][u][0] += sums[0] + sums[1];
      out.sums[tile][u][1] += sums[2] + sums[3];
    }
  };
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    if (differ == 0) {
      add(tile, by_any[0], by_any[1], true);
    } else {
#pragma unroll 1
      for (int row = 0; row < 4; ++row)
        add(tile, seen[0][tile] & 0x11111111u << row, seen[1][tile] & 0x11111111u << row, row == c);
    }
  }
}

}  // namespace jax_foscar::cuda
