// Keys per channel: scales differ between the channels of one sum, so they go into the queries, anew for every token
// group.
//
// mma.sync m16n8k16 multiplies 16 tokens x 16 channels of codes as f16 subnormals (a field of a half with exponent 0 is
// code * 2^(position - 24)) with Q * scale as two halves each, high and low: the columns of a tile are 4 query rows x
// {high, low}, so that scores lie as in keys.cuh.  A lane makes its own B registers: f16 products with their exact
// remainders cost a third of what integer digits did, which lanes had to exchange.  One more MMA with the offsets as
// the A operand sums Q * offset.
#pragma once

#include "keys.cuh"
#include "unroll.cuh"

namespace jax_foscar::cuda {

// Which channels an m16n8k16 step stands for: lane 4 g + c holds two pairs of neighbouring ones, the first and the
// second of both pairs in one register each, and the mask leaves a power of two on the codes of a pair.
//
// At 2 bits, where instructions count most, the queries are kept divided by that power, and most scales need no factor;
// but in a tail, whose two pairs differ in it.  At 4 bits, that would take the fields of all blocks in turn, whose
// words do not fit the registers.
template <int kBits, int kDim>
struct HalfChannels {
  static constexpr int kSteps = padded_dim(kDim) / 16;
  static constexpr int kFields = 8 / kBits;

  __device__ static constexpr bool tail(int step) { return step / kFields >= num_blocks(kBits, kDim); }
  __device__ static constexpr int pair(int step, int i, int c) {
    const int block = step / kFields * (128 / kBits), f = step % kFields;
    if (tail(step)) return block + 16 * f + 8 * i + 2 * c;
    return block + key_field_channel(kBits, false, f) + 4 * c + 2 * i;
  }
  __device__ static constexpr int shift(int step, int i) {
    const int f = step % kFields;
    return kBits * (tail(step) ? 2 * f + i : f);
  }
  static constexpr bool kDivides = kBits == 2;
  // By what power of two the queries are divided, and by what the scales still have to be.
  __device__ static constexpr int divided(int step) { return !kDivides || tail(step) ? 0 : shift(step, 0); }
  __device__ static constexpr int left(int step, int i) { return shift(step, i) - divided(step); }
  // The i-th step to take: where queries are divided, those of the highest fields first, a tail's at the end.
  __device__ static constexpr int in_order(int i) {
    constexpr int kBlocks = num_blocks(kBits, kDim);
    return kDivides && i < kBlocks * kFields ? i % kBlocks * kFields + kFields - 1 - i / kBlocks : i;
  }
};

__device__ __forceinline__ uint32_t half_bits(float x, float y) {
  const __half2 halves = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&halves);
}
__device__ __forceinline__ __half2 halves_of(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }
__device__ __forceinline__ uint32_t bits_of(__half2 halves) { return *reinterpret_cast<const uint32_t*>(&halves); }
__device__ __forceinline__ float2 sum_of_halves(uint32_t x, uint32_t y) {
  const float2 first = __half22float2(halves_of(x)), second = __half22float2(halves_of(y));
  return {first.x + second.x, first.y + second.y};
}
__device__ __forceinline__ float4 as_floats(uint4 x) {
  return {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
}

// The queries of an item; a power of two brings a row's largest to [2^6, 2^7).
template <int kBits, int kDim, int kTiles, bool kAnyPerChannel>
__device__ __noinline__ void load_channel_queries(const DecodeParams& params, const ItemRows rows, int lane,
                                                  Queries<kDim, kTiles, kAnyPerChannel>& queries) {
  using Channels = HalfChannels<kBits, kDim>;
  const int g = lane / 4, c = lane % 4;
  __syncwarp();
#pragma unroll 1
  for (int tile = 0; tile < kTiles; ++tile) {
    // Every other step of row g / 2.
    float2 x[Channels::kSteps];
    load_query_pairs<kDim>(
        params, rows.query_index(4 * tile + g / 2),
        [g, c](int i) { return Channels::pair(i / 2 * 2 + g % 2, i % 2, c); }, x);
    float max = 0.0f;
#pragma unroll
    for (const float2 pair : x) max = ptx::max_nan(max, ptx::max_nan(fabsf(pair.x), fabsf(pair.y)));
    max = max_over_row(max);
    const int exponent = __float_as_int(max) >> 23;
    const bool usable = exponent > 127 - 100 && max < INFINITY;
    const float factor = usable ? __int_as_float((2 * 127 + 6 - exponent) << 23) : 0.0f;
    if (g % 2 == 0 && c == 0) {
      auto& row = queries.rows[4 * tile + g / 2];
      row.finite = max < INFINITY;
      row.step = usable ? params.scale * 1.4426950408889634f / factor : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < Channels::kSteps; i += 2) {
      const int step = i + g % 2, at = 4 * (g / 2) + c;
      const float by = factor * __int_as_float((127 - Channels::divided(step)) << 23);
      const float2 first = {x[i].x * by, x[i + 1].x * by}, second = {x[i].y * by, x[i + 1].y * by};
      const __half2 high[2] = {__float22half2_rn(first), __float22half2_rn(second)};
      const float2 kept[2] = {__half22float2(high[0]), __half22float2(high[1])};
      queries.halves.high[tile][step][at] = {bits_of(high[0]), bits_of(high[1])};
      queries.halves.low[tile][step][at] = {half_bits(first.x - kept[0].x, first.y - kept[0].y),
                                            half_bits(second.x - kept[1].x, second.y - kept[1].y)};
    }
  }
  __syncwarp();
}

// The largest scale of a token group as an exponent, biased as a float's: scales times 2^(127 - exponent) are below 2,
// or, since there is an end to a half's exponents, below 2^9, so that their products with queries fit a half.
template <int kPairBytes, int kDim>
__device__ __forceinline__ int scale_exponent(const uint8_t* pairs, int lane) {
  uint32_t max = 0;
#pragma unroll
  for (int i = 0; i < kDim * kPairBytes; i += 16 * 32) {
    if (kDim * kPairBytes - i < 16 * 32 && 16 * lane >= kDim * kPairBytes - i) continue;
    const uint4 load = *reinterpret_cast<const uint4*>(pairs + i + 16 * lane);
    if constexpr (kPairBytes == 8) {
      max = ::max(max, ::max(load.x & 0x7fffffffu, load.z & 0x7fffffffu));
    } else {
      max = ::max(max, ::max(::max(load.x & 0x7fffu, load.y & 0x7fffu), ::max(load.z & 0x7fffu, load.w & 0x7fffu)));
    }
  }
  max = __reduce_max_sync(kAllLanes, max);
  if constexpr (kPairBytes == 8) return ::min(::max(static_cast<int>(max >> 23), 1), 253);
  return ::min(static_cast<int>(max >> 10), 23) + 127 - 15;
}

// The (scale, offset) pairs of two neighbouring channels, f16 in x and y, or f32.
template <int kPairBytes>
__device__ __forceinline__ uint4 load_two_pairs(const uint8_t* pairs, int channel) {
  if constexpr (kPairBytes == 8) return *reinterpret_cast<const uint4*>(pairs + 8 * channel);
  const uint2 halves = *reinterpret_cast<const uint2*>(pairs + 4 * channel);
  return {halves.x, halves.y, 0, 0};
}

// Queries times scales for a B register: the high part, or the low one where the lane's column is a low one: `minus` is
// then -1, else 0.
__device__ __forceinline__ uint32_t scale_queries(uint32_t high, uint32_t scales, float minus) {
  const __half2 product = __hmul2(halves_of(high), halves_of(scales));
  const __half2 taken = __hmul2(product, __float2half2_rn(minus));
  return bits_of(__hfma2(halves_of(high), halves_of(scales), taken));
}
__device__ __forceinline__ uint32_t add_low(uint32_t low, uint32_t scales, uint32_t part) {
  return bits_of(__hfma2(halves_of(low), halves_of(scales), halves_of(part)));
}
__device__ __forceinline__ uint32_t scale_queries(float2 queries, float2 scales, float minus) {
  const float2 product = {queries.x * scales.x, queries.y * scales.y};
  const float2 high = __half22float2(halves_of(half_bits(product.x, product.y)));
  return half_bits(fmaf(minus, high.x, product.x), fmaf(minus, high.y, product.y));
}

// kHalves: 2 for groups of 64 tokens, 1 for 32, of which `half` says which.  kHasLow: queries have low parts; only
// those in f32 do.  kScaled: scales are divided by a power of two, their `exponent`; else that is 127.
template <int kBits, int kHalves, bool kHasLow, bool kScaled, int kPairBytes, int kDim, int kTiles, bool kAnyPerChannel>
__device__ __forceinline__ void score_scaled(const uint8_t* codes, const uint8_t* pairs, int half, int exponent,
                                             int lane, const Queries<kDim, kTiles, kAnyPerChannel>& queries,
                                             float (&scores)[kTiles][2 * kHalves][2]) {
  using Channels = HalfChannels<kBits, kDim>;
  const int g = lane / 4, c = lane % 4, at = 4 * (g / 2) + c;
  const float minus = g % 2 == 1 ? -1.0f : 0.0f;
  KeyWords<kBits, kDim> words[kHalves];
#pragma unroll
  for (int i = 0; i < kHalves; ++i) words[i].load(codes, half + i, lane);
  float sums[kTiles][2 * kHalves][4] = {}, offsets[kTiles][4] = {};
  for_each<Channels::kSteps>([&](auto i_constant) {
    constexpr int step = Channels::in_order(i_constant);
    uint4 load[2];  // (scale, offset) of two neighbouring channels each, f16 in x and y
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int channel = Channels::pair(step, i, c);
      load[i] = {};
      if (kDim % 32 == 0 || channel < kDim) load[i] = load_two_pairs<kPairBytes>(pairs, channel);
    }
    uint2 b[kTiles];
    if constexpr (kPairBytes == 4) {
      const uint32_t packed[2] = {__byte_perm(load[0].x, load[1].x, 0x5410), __byte_perm(load[0].y, load[1].y, 0x5410)};
      constexpr uint32_t kLeft = Channels::left(step, 0) << 10 | Channels::left(step, 1) << 26;
      uint32_t scales[2] = {packed[0], packed[1]};
      if constexpr (kScaled || kLeft > 0) {
        const __half2 factor = halves_of((127 + 15 - exponent) * 0x04000400u - kLeft);
        scales[0] = bits_of(__hmul2(halves_of(packed[0]), factor));
        scales[1] = bits_of(__hmul2(halves_of(packed[1]), factor));
      }
      const uint32_t first = __byte_perm(load[0].x, load[1].x, 0x7632);
      const uint32_t second = __byte_perm(load[0].y, load[1].y, 0x7632);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint2 high = queries.halves.high[tile][step][at];
        b[tile] = {scale_queries(high.x, scales[0], minus), scale_queries(high.y, scales[1], minus)};
        // Tokens g alone count: the others get what stands beside in registers.
        ptx::mma_f16(offsets[tile], {first, packed[0], second, packed[1]}, high);
        if constexpr (kHasLow) {
          const uint2 low = queries.halves.low[tile][step][at];
          const uint32_t mask = g % 2 == 1 ? 0xffffffffu : 0;
          b[tile] = {add_low(low.x & mask, scales[0], b[tile].x), add_low(low.y & mask, scales[1], b[tile].y)};
          ptx::mma_f16(offsets[tile], {first, packed[0], second, packed[1]}, low);
        }
      }
    } else {
      const float factor = __int_as_float((254 - exponent) << 23);
      constexpr float kFirst = 1.0f / (1 << Channels::left(step, 0)), kSecond = 1.0f / (1 << Channels::left(step, 1));
      const float4 x = as_floats(load[0]), y = as_floats(load[1]);
      const float2 scales[2] = {{x.x * factor * kFirst, y.x * factor * kSecond},
                                {x.z * factor * kFirst, y.z * factor * kSecond}};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint2 high = queries.halves.high[tile][step][at], low = queries.halves.low[tile][step][at];
        const float2 first = sum_of_halves(high.x, low.x), second = sum_of_halves(high.y, low.y);
        b[tile] = {scale_queries(first, scales[0], minus), scale_queries(second, scales[1], minus)};
        float& sum = offsets[tile][0];
        sum = fmaf(first.x, x.y, fmaf(first.y, y.y, fmaf(second.x, x.w, fmaf(second.y, y.w, sum))));
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {
      uint32_t a[4];
      words[i / 2].half_operand(i % 2, step, a);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) ptx::mma_f16(sums[tile][i], a, b[tile]);
    }
    // The offsets' sums, of divided queries too, are that of the highest field, times 2^bits, and so on.
    constexpr int kNext = i_constant + 1 < Channels::kSteps ? Channels::in_order(i_constant + 1) : step;
    if constexpr (Channels::divided(step) > Channels::divided(kNext)) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) offsets[tile][0] *= 1 << kBits;
    }
  });
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const float step = queries.rows[4 * tile + c].step;
    float offset = offsets[tile][0];
    if constexpr (kPairBytes == 8) {  // lane 4 g + c has summed its channels of row g / 2
      offset += __shfl_xor_sync(kAllLanes, offset, 1);
      offset += __shfl_xor_sync(kAllLanes, offset, 2);
      offset = __shfl_sync(kAllLanes, offset, 8 * c);
    }
    const float product_step = __int_as_float(exponent << 23) * (step * 0x1p24f);
#pragma unroll
    for (int i = 0; i < 4 * kHalves; ++i) {
      const float product = sums[tile][i / 2][i % 2 * 2] + sums[tile][i / 2][i % 2 * 2 + 1];
      scores[tile][i / 2][i % 2] = fmaf(product, product_step, offset * step);
    }
  }
}

// kOneKind: of a kernel for one kind of keys, which is worth a second way.
template <int kBits, int kHalves, bool kHasLow, bool kOneKind, int kPairBytes, int kDim, int kTiles,
          bool kAnyPerChannel>
__device__ __forceinline__ void score_group(const uint8_t* codes, const uint8_t* pairs, int half, int lane,
                                            const Queries<kDim, kTiles, kAnyPerChannel>& queries,
                                            float (&scores)[kTiles][2 * kHalves][2]) {
  const int exponent = scale_exponent<kPairBytes, kDim>(pairs, lane);
  // Queries are below 2^7: most scales need no factor that keeps products in a half's range and above its subnormals.
  if constexpr (HalfChannels<kBits, kDim>::kDivides && kPairBytes == 4 && !kHasLow && kOneKind) {
    if (127 - 6 <= exponent && exponent <= 127 + 7) [[likely]]
      return score_scaled<kBits, kHalves, kHasLow, false, kPairBytes>(codes, pairs, half, 127, lane, queries, scores);
  }
  score_scaled<kBits, kHalves, kHasLow, true, kPairBytes>(codes, pairs, half, exponent, lane, queries, scores);
}

// scores[tile][i][r] = the logits (base 2) of token 16 i + 8 r + g and the lane's query row.  kGroup: 64 tokens, or 0
// where the launch says whether 32 or 64.
template <int kBits, int kGroup, bool kHasLow, int kPairBytes, int kDim, int kTiles, bool kAnyPerChannel>
__device__ __forceinline__ void score_groups(int group, const uint8_t* codes, const uint8_t* pairs, int lane,
                                             const Queries<kDim, kTiles, kAnyPerChannel>& queries,
                                             float (&scores)[kTiles][4][2]) {
  // With 16 query rows, registers hold the sums of 32 tokens, and queries are scaled twice.
  constexpr bool kWhole = kTiles <= 2 && kGroup == 64;
  if (kWhole || (kTiles <= 2 && group == 64)) {
    score_group<kBits, 2, kHasLow, kGroup != 0, kPairBytes>(codes, pairs, 0, lane, queries, scores);
  } else if constexpr (!kWhole) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const uint8_t* const own_pairs = pairs + half * 32 / group * kDim * kPairBytes;
      float of_half[kTiles][2][2];
      score_group<kBits, 1, kHasLow, kGroup != 0, kPairBytes>(codes, own_pairs, half, lane, queries, of_half);
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) {
        // No variable may index registers.
        const float score = of_half[i / 4][i / 2 % 2][i % 2];
        if (half == 0) scores[i / 4][i / 2 % 2][i % 2] = score;
        if (half == 1) scores[i / 4][2 + i / 2 % 2][i % 2] = score;
      }
    }
  }
}

template <int kBits, int kGroup, int kPairBytes, int kDim, int kTiles, bool kAnyPerChannel>
__device__ __forceinline__ void score_per_channel(const DecodeParams& params, const uint8_t* codes,
                                                  const uint8_t* pairs, int lane,
                                                  const Queries<kDim, kTiles, kAnyPerChannel>& queries,
                                                  float (&scores)[kTiles][4][2]) {
  if (kPairBytes == 8 || params.q_dtype == DType::kF32) {
    score_groups<kBits, kGroup, true, kPairBytes>(params.key.group, codes, pairs, lane, queries, scores);
  } else {
    score_groups<kBits, kGroup, false, kPairBytes>(params.key.group, codes, pairs, lane, queries, scores);
  }
}

}  // namespace jax_foscar::cuda
