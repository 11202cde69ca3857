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

// The exact tokens that all of a warp's query rows see: from `begin` and, but for the sinks, `boundary` on, up to
// `end`.
struct SeenByAll {
  int begin = 0, boundary = 0, end = INT32_MAX;

  __device__ __forceinline__ void meet(const Visible& visible) {
    begin = max(begin, visible.begin), boundary = max(boundary, visible.boundary), end = min(end, visible.end);
    if (visible.drafts != nullptr) end = min(end, visible.first_draft);
  }
  // With the rows of the other lanes.
  __device__ __forceinline__ void meet_lanes() {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      begin = max(begin, __shfl_xor_sync(kAllLanes, begin, distance));
      boundary = max(boundary, __shfl_xor_sync(kAllLanes, boundary, distance));
      end = min(end, __shfl_xor_sync(kAllLanes, end, distance));
    }
  }
  // True for a full chunk whose tokens are all among them.
  __device__ __forceinline__ bool has_chunk(const RowWork& work, int number) const {
    const int first = work.exact_token(number * kExactTokens);
    const int last = work.exact_token(number * kExactTokens + kExactTokens - 1);
    return first >= begin && last >= first && last < end && (last < work.exact_sinks || first >= boundary);
  }
};

// A row of the chunk in shared memory, its keys or values, which lie `at` bytes into the stage, from channels 8 unit ..
// 8 unit + 7 on, where `unit` is 0 or 1.  Rows without a token have those of others, which nobody sees.
template <class Stream>
struct ExactRow {
  uint32_t first;

  __device__ __forceinline__ ExactRow(const Stream& stream, int at, int row, int unit)
      : first(ptx::shared_address(stream.stage()) + at + Stream::exact_at(row, unit)) {}
  // The address 16 i channels further.
  __device__ __forceinline__ uint32_t address(int i) const { return Stream::exact_behind(first, 0, 2 * i); }
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
      float2 x[2 * kSteps];
      load_query_pairs<kDim>(params, rows.query_index(4 * tile + g / 2), [c](int i) { return 8 * i + 2 * c; }, x);
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        parts[tile][step] = {bf16_part(x[2 * step], g % 2 == 1), bf16_part(x[2 * step + 1], g % 2 == 1)};
    }
  }
};

// scores[tile][0][r] = Q . K of the lane's tokens and query row.  `row` is number lane % 16, from unit lane / 16 on.
template <class Stream, int kDim, int kTiles>
__device__ __forceinline__ void score_exact(const ExactRow<Stream>& row, const ExactQueries<kDim, kTiles>& queries,
                                            float (&scores)[kTiles][1][2]) {
  float sums[kTiles][4] = {};
#pragma unroll
  for (int step = 0; step < ExactQueries<kDim, kTiles>::kSteps; ++step) {
    uint32_t x[4];  // channels 8 (i / 2) + 2 c, + 1 of tokens 8 (i % 2) + g
    ptx::load_b16(x, row.address(step));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) ptx::mma_bf16(sums[tile], x, queries.parts[tile][step]);
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

// `row` is number lane / 16 * 8 + lane % 8, from unit lane / 8 % 2 on.  If `masked`, bit 4 g + c of `seen[r][tile]` is
// set where query row c of the tile sees token 8 r + g.  A value that a query does not see may be anything, and 0 * NaN
// is NaN, so that each query row then takes a product of its own.
template <class Stream, int kDim, int kTiles, int kMaxGroups>
__device__ __forceinline__ void add_values_exact(const ExactRow<Stream>& row, bool masked,
                                                 const unsigned (&seen)[2][kTiles], const float (&p)[kTiles][1][2],
                                                 int lane, Outputs<kDim, kTiles, kMaxGroups>& out) {
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
  // Products for a tile of query rows, to the outputs where `wanted`.
  const auto add = [&](int tile, const auto& mask, bool wanted) {
#pragma unroll
    for (int u = 0; u < kDim / 16; ++u) {
      uint32_t x[4];  // channels 16 u + 8 (i % 2) + g of tokens 8 (i / 2) + 2 c, + 1
      ptx::load_transposed_b16(x, row.address(u));
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = mask(x[i], i / 2);
      float sums[4] = {};
      ptx::mma_bf16(sums, x, b[tile]);
      if (!wanted) continue;
      out.sums[tile][u][0] += sums[0] + sums[1];
      out.sums[tile][u][1] += sums[2] + sums[3];
    }
  };
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    if (!masked) {
      add(tile, [](uint32_t pair, int) { return pair; }, true);
    } else {
#pragma unroll 1
      for (int row = 0; row < 4; ++row) {
        const unsigned bits = 0x11111111u << row;
        const uint32_t masks[2] = {pair_mask(seen[0][tile] & bits, lane), pair_mask(seen[1][tile] & bits, lane)};
        add(tile, [&masks](uint32_t pair, int r) { return pair & masks[r]; }, row == lane % 4);
      }
    }
  }
}

}  // namespace jax_foscar::cuda
