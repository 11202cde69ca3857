// Queries in shared memory; for keys per token, as the integer B operand of mma.sync m16n8k32: 20-bit integers in three
// s8 digits.
//
// The columns of a tile's first operand are 4 query rows x {high, middle} digit, so that lane 4 g + c of the product
// has row c; the low digits of two tiles share a second one (even columns the even tile's, odd columns the odd tile's).
// 16 bits would do for random data; with one head or channel far above the others, output errors pass 1e-3.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "params.h"
#include "ptx.cuh"
#include "schedule.cuh"

namespace jax_foscar::cuda {

inline constexpr float kQueryMax = 520000.0f;  // times 15 codes times 256 channels stays inside an int32

// Which channels an operand's bytes stand for: register `half` (0 or 1) of k-step `step` in lane 4 g + c holds two
// pairs of neighbouring channels, and the mask leaves a power of two on their codes.
template <int kBits, int kDim>
struct KeyChannels {
  static constexpr int kSteps = padded_dim(kDim) / 32;

  __device__ static constexpr bool tail(int step) { return kBits == 2 && kDim % 64 != 0 && step == kSteps - 1; }
  __device__ static constexpr int first(int step, int half, int pair, int c) {
    return 32 * step + 16 * half + (tail(step) ? 8 * pair + 2 * c : 4 * c + 2 * pair);
  }
  __device__ static constexpr int power(int step, int pair) {
    if (kBits == 4) return 1;
    return tail(step) ? (pair == 0 ? 1 : 4) : step % 2 == 0 ? 1 : 4;
  }
};

// Two neighbouring channels of a query.
template <DType kDType>
__device__ __forceinline__ float2 load_query_pair(const void* q, int64_t i) {
  if (kDType == DType::kF32) return *reinterpret_cast<const float2*>(static_cast<const float*>(q) + i);
  const uint32_t bits = *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(q) + i);
  if (kDType == DType::kF16) return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

// Pairs of neighbouring channels of row `index` of [B, T, N], zeros for -1; pair i is at channel_of(i), past the head
// dim zeros.  One dtype's loads are all under way at once.
template <int kDim, int kPairs, class Channel>
__device__ __forceinline__ void load_query_pairs(const DecodeParams& params, int64_t index, const Channel& channel_of,
                                                 float2 (&x)[kPairs]) {
  const auto load_as = [&](auto dtype) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int channel = channel_of(i);
      x[i] = {0.0f, 0.0f};
      if (kDim % 32 == 0 || channel < kDim) x[i] = load_query_pair<dtype>(params.q, index * kDim + channel);
    }
  };
  if (index < 0) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) x[i] = {0.0f, 0.0f};
  } else if (params.q_dtype == DType::kBF16) {
    load_as(std::integral_constant<DType, DType::kBF16>{});
  } else if (params.q_dtype == DType::kF16) {
    load_as(std::integral_constant<DType, DType::kF16>{});
  } else {
    load_as(std::integral_constant<DType, DType::kF32>{});
  }
}

// Over a query row's eight lanes, NaN if any is.
__device__ __forceinline__ float max_over_row(float x) {
  x = ptx::max_nan(x, __shfl_xor_sync(kAllLanes, x, 1));
  x = ptx::max_nan(x, __shfl_xor_sync(kAllLanes, x, 2));
  return ptx::max_nan(x, __shfl_xor_sync(kAllLanes, x, 4));
}

// What lane 4 g + c prepares: of query row g / 2, the channels that register `half` = g % 2 of lanes 4 g' + c holds.
template <int kBits, int kDim>
struct LaneChannels {
  using Channels = KeyChannels<kBits, kDim>;
  static constexpr int kSteps = Channels::kSteps;
  float2 x[2 * kSteps];  // pair 2 step + pair

  // Row `index` of [B, T, N]; zeros for -1.
  __device__ __forceinline__ void load(const DecodeParams& params, int64_t index, int lane) {
    const int half = lane / 4 % 2, c = lane % 4;
    load_query_pairs<kDim>(params, index, [&](int i) { return Channels::first(i / 2, half, i % 2, c); }, x);
  }

  // The largest magnitude over the row's eight lanes, NaN if any is.
  __device__ __forceinline__ float max() const {
    float max = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      max = ptx::max_nan(max, ptx::max_nan(fabsf(x[i].x), fabsf(x[i].y)));
    }
    return max_over_row(max);
  }
};

// Over a query row's eight lanes.
template <typename Number>
__device__ __forceinline__ Number sum_over_row(Number x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  x += __shfl_xor_sync(kAllLanes, x, 2);
  return x + __shfl_xor_sync(kAllLanes, x, 4);
}

// Four integers' digits.  Adding kBias to a product rounds it and leaves 0x408080 + integer in the float's low 24 bits,
// whose bytes are digits but for a constant each.
struct Digits {
  static constexpr float kBias = 8388608.0f + 0x408080;
  uint32_t bits[4];

  __device__ __forceinline__ Digits(float2 x, float scale_x, float2 y, float scale_y) {
    bits[0] = __float_as_uint(fmaf(x.x, scale_x, kBias)), bits[1] = __float_as_uint(fmaf(x.y, scale_x, kBias));
    bits[2] = __float_as_uint(fmaf(y.x, scale_y, kBias)), bits[3] = __float_as_uint(fmaf(y.y, scale_y, kBias));
  }
  // Of the first two integers, and of the last two.
  __device__ __forceinline__ int sum(int pair) const {
    return static_cast<int>(bits[2 * pair] + bits[2 * pair + 1] - 2 * 0x4b408080u);
  }
  // Digit 0 (low), 1 or 2 of each, as four s8.
  template <int kDigit>
  __device__ __forceinline__ uint32_t digit() const {
    constexpr uint32_t kSelect = kDigit | (4 + kDigit) << 4;
    const uint32_t bytes =
        __byte_perm(__byte_perm(bits[0], bits[1], kSelect), __byte_perm(bits[2], bits[3], kSelect), 0x5410);
    return (bytes + (kDigit == 2 ? 0x40404040u : 0)) ^ 0x80808080u;
  }
};

// Sets what each of an item's rows sees; called behind load_queries, whose first __syncwarp serves both.
template <class Row, int kRows>
__device__ __noinline__ void load_visible(const DecodeParams& params, const ItemRows rows, const RowQueries queries,
                                          int lane, Row (&numbers)[kRows]) {
  if (lane < kRows) {
    const int query = (rows.first + lane) / rows.ratio;
    numbers[lane].visible = rows.is_real(lane) ? visible(params.features, params.windows, queries, query) : Visible{};
  }
  __syncwarp();
}

// Up to 4 kTiles query rows of one KV head, in the warp's shared memory.
template <int kDim, int kTiles, bool kAnyPerChannel>
struct Queries {
  static constexpr int kSteps = padded_dim(kDim) / 32;
  static constexpr int kMaxGroups = kSteps;
  static constexpr int kPairs = (kTiles + 1) / 2;

  struct Row {
    float step;  // logit (base 2) = step * score; keys per channel: step * Q . K
    bool finite;
    float sums[kMaxGroups];  // of the group's integers, for the offsets
    Visible visible;         // nothing, for padding
  };

  static constexpr int kLowLanes = kTiles == 1 ? 16 : 32;  // of one tile, what stands in the odd columns is not used

  // Of keys per token.  Lane 4 g + c reads the two registers of column g.
  struct Integers {
    uint2 upper[kTiles][kSteps][32];  // high and middle digits
    uint2 low[kPairs][kSteps][kLowLanes];
  };
  // Of keys per channel (channel_keys.cuh): row r of a tile, for lanes 4 g + c, at [4 r + c].
  struct Halves {
    uint2 high[kTiles][2 * kSteps][16];
    uint2 low[kTiles][2 * kSteps][16];
  };
  union {
    Integers integers;
    std::conditional_t<kAnyPerChannel, Halves, Integers> halves;
  };
  Row rows[4 * kTiles];

  // Puts the digits of row g / 2's channels where their columns' lanes read them.
  __device__ __forceinline__ void store(int tile, int step, int lane, const Digits& digits) {
    const int half = lane / 4 % 2, even = lane & ~4;  // the lane of the row's even column
    const auto put = [half](uint2& registers, uint32_t word) { (half == 0 ? registers.x : registers.y) = word; };
    put(integers.upper[tile][step][even], digits.digit<2>());
    put(integers.upper[tile][step][even + 4], digits.digit<1>());
    put(integers.low[tile / 2][step][low_lane(even + 4 * (tile % 2))], digits.digit<0>());
  }

  __device__ __forceinline__ static int low_lane(int lane) { return kTiles == 1 ? lane / 8 * 4 + lane % 4 : lane; }
};

// What makes a row with magnitudes up to `max` 20-bit integers, and the way back; the logits' scale is part of it.  A
// step of 0 would make masked logits NaN, so a row of zeros has step 1.
struct QueryStep {
  float inverse, step;
};

__device__ __forceinline__ QueryStep query_step(float max, float scale) {
  const float step = max * (fabsf(scale) * 1.4426950408889634f / kQueryMax);
  const bool usable = step > 0.0f && max > 1e-30f && max < INFINITY;
  return {usable ? copysignf(kQueryMax, scale) / max : 0.0f, usable ? step : 1.0f};
}

// The queries of an item, for keys per token: integers, which hold for the whole item.
template <int kBits, int kGroup, int kDim, int kTiles, bool kAnyPerChannel>
__device__ __noinline__ void load_queries(const DecodeParams& params, const ItemRows rows, int lane,
                                          Queries<kDim, kTiles, kAnyPerChannel>& queries) {
  using Channels = KeyChannels<kBits, kDim>;
  constexpr int kSteps = Channels::kSteps, kGroups = padded_dim(kDim) / kGroup;
  const int g = lane / 4, c = lane % 4;
  __syncwarp();
#pragma unroll 1
  for (int tile = 0; tile < kTiles; ++tile) {
    LaneChannels<kBits, kDim> channels;
    channels.load(params, rows.query_index(4 * tile + g / 2), lane);
    const float max = channels.max();
    auto& row = queries.rows[4 * tile + g / 2];
    const bool writes = g % 2 == 0 && c == 0;
    const QueryStep step = query_step(max, params.scale);
    int sums[kGroups] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const Digits digits(channels.x[2 * s], step.inverse / Channels::power(s, 0), channels.x[2 * s + 1],
                          step.inverse / Channels::power(s, 1));
      sums[s * 32 / kGroup] += digits.sum(0) * Channels::power(s, 0) + digits.sum(1) * Channels::power(s, 1);
      queries.store(tile, s, lane, digits);
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int total = sum_over_row(sums[group]);
      if (writes) row.sums[group] = static_cast<float>(total);
    }
    if (writes) row.finite = max < INFINITY, row.step = step.step;
  }
  __syncwarp();
}

}  // namespace jax_foscar::cuda
