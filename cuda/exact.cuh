// Exact tokens: sinks and the newest ones, bf16 rows, 16 at a time through bf16 tensor cores.
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

// Up to 16 tokens that go through tensor cores at once: a unit of 16, or two units of 8 in two stages, or what is left.
struct ExactChunk {
  int stage_tokens, units;
  int token[2];  // the lane's, number g and 8 + g of the chunk, or -1

  // From unit `first` on, of which `left` are the warp's.
  __device__ __forceinline__ ExactChunk(int stage_tokens, const RowWork& work, int first, int left, int lane)
      : stage_tokens(stage_tokens), units(stage_tokens == 8 && left > 1 ? 2 : 1) {
    for (int r = 0; r < 2; ++r) {
      const int i = 8 * r + lane / 4;
      token[r] = i < stage_tokens * units ? work.exact_token(first * stage_tokens + i) : -1;
    }
  }
};

// Row 0 .. 15 of the chunk in shared memory, its keys or values, which lie `at` bytes into a stage.  Rows without a
// token have those of others, which nobody sees.
template <class Stream>
struct ExactRow {
  uint32_t stage;
  int token;

  __device__ __forceinline__ ExactRow(const Stream& stream, const ExactChunk& chunk, int row, int at)
      : stage(ptx::shared_address(row >= 8 && chunk.units == 2 ? stream.next_stage() : stream.stage()) + at),
        token(row & (chunk.stage_tokens - 1)) {}
  // The address of channels 8 i .. 8 i + 7.
  __device__ __forceinline__ uint32_t address(int i) const { return stage + Stream::exact_at(token, i); }
};

// The B operand: the even column of a query row has its high parts, the odd one its low parts, of channels 16 step +
// 8 half + 2 c, + 1.
template <int kDim, int kTiles>
struct ExactQueries {
  static constexpr int kSteps = kDim / 16;
  uint2 parts[kTiles][kSteps];

  __device__ __forceinline__ ExactQueries(const DecodeParams& params, const ItemRows& rows, int lane) {
    const int g = lane / 4, c = lane % 4;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int64_t index = rows.query_index(4 * tile + g / 2);
      const auto part = [&](int channel) {
        return index >= 0 ? bf16_part(load_query_pair(params, index * kDim + channel), g % 2 == 1) : 0;
      };
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        parts[tile][step] = {part(16 * step + 2 * c), part(16 * step + 8 + 2 * c)};
    }
  }
};

// scores[tile][0][r] = Q . K of the lane's tokens and query row.  `row` is number lane % 16.
template <class Stream, int kDim, int kTiles>
__device__ __forceinline__ void score_exact(const ExactRow<Stream>& row, const ExactQueries<kDim, kTiles>& queries,
                                            int lane, float (&scores)[kTiles][1][2]) {
  float sums[kTiles][4] = {};
#pragma unroll
  for (int step = 0; step < ExactQueries<kDim, kTiles>::kSteps; ++step) {
    uint32_t x[4];  // channels 8 (i / 2) + 2 c, + 1 of tokens 8 (i % 2) + g
    ptx::load_b16(x, row.address(2 * step + lane / 16));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      ptx::mma_bf16(sums[tile], {x[0], x[1], x[2], x[3]}, queries.parts[tile][step]);
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

// `row` is number lane / 16 * 8 + lane % 8.  `seen[r][tile]`: bit 4 g + c is set if query row c of the tile sees token
// 8 r + g.  A value that a query does not see
// may be anything, and 0 * NaN is NaN: where queries differ in what they see, each takes a product of its own.
template <class Stream, int kDim, int kTiles, int kMaxGroups>
__device__ __forceinline__ void add_values_exact(const ExactRow<Stream>& row, const unsigned (&seen)[2][kTiles],
                                                 const float (&p)[kTiles][1][2], int lane,
                                                 Outputs<kDim, kTiles, kMaxGroups>& out) {
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
  // The products of the tokens that are asked for, to the outputs where `wanted`.
  const auto add = [&](int tile, unsigned first, unsigned second, bool wanted) {
    const uint32_t masks[2] = {pair_mask(first, lane), pair_mask(second, lane)};
#pragma unroll
    for (int u = 0; u < kDim / 16; ++u) {
      uint32_t x[4];  // channels 16 u + 8 (i % 2) + g of tokens 8 (i / 2) + 2 c, + 1
      ptx::load_transposed_b16(x, row.address(2 * u + lane / 8 % 2));
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
