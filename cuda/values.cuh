// Values: the A operand straight from packed codes, the probabilities as its integer B operand, and the outputs' sums.
//
// mma.sync m16n8k32 multiplies 16 channels x 32 tokens of u8 codes with 32 tokens x 8 columns: 4 query rows, each row's
// weights as 16-bit integers in two u8 digits.  The weights (P * scale, or P itself where values are quantized per
// channel) are scaled by their own maximum over the tile; the int32 sums are exact and leave for f32 registers after
// every tile, so that nothing drifts over a long row.  Lane 4 g + c then holds query row c at channels 16 u + g and
// 16 u + 8 + g.
//
// A negative weight does not fit the unsigned digits: where a scale is negative (the quantizer makes none) the outputs
// are NaN.
#pragma once

#include "keys.cuh"
#include "unroll.cuh"

namespace jax_foscar::cuda {

// The packed words of 16 channels x 64 tokens, masked in place.
template <int kBits, int kDim>
class ValueWords {
 public:
  static constexpr int kFields = 8 / kBits;
  static constexpr int kBlocks = num_blocks(kBits, kDim);
  static constexpr uint32_t kMask = kBits == 2 ? 0x03030303u : 0x0f0f0f0fu;

  // 2-bit head dims that are not a multiple of 64: rows 0..7 are field f and rows 8..15 field f + 1 of the same word.
  __device__ static constexpr bool tail(int u) { return u >= kBlocks * kFields; }
  // The field that row tile u, rows 8 r .. 8 r + 7, reads; its codes keep a factor of 2^(kBits * field).
  __device__ static constexpr int field(int u, int r) {
    return tail(u) ? 2 * (u - kBlocks * kFields) + r : u % kFields;
  }

  // Loads the words that row tile u shares with its neighbours.
  __device__ __forceinline__ void load(const uint8_t* tile, int u, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (tail(u)) {
        const uint2 word = *reinterpret_cast<const uint2*>(tile + kTileTokens * 16 * kBlocks + (half * 32 + lane) * 8);
        words_[half] = {word.x, word.x, word.y, word.y};
      } else {
        words_[half] = *reinterpret_cast<const uint4*>(tile + ((half * kBlocks + u / kFields) * 32 + lane) * 16);
      }
    }
  }

  // The A operand of row tile u, tokens 32 half .. 32 half + 31.
  __device__ __forceinline__ void operand(int u, int half, uint32_t (&a)[4]) const {
    const uint32_t low = kMask << (kBits * field(u, 0)), high = kMask << (kBits * field(u, 1));
    a[0] = words_[half].x & low, a[1] = words_[half].y & high, a[2] = words_[half].z & low,
    a[3] = words_[half].w & high;
  }

 private:
  uint4 words_[2];
};

__device__ __forceinline__ float max_over_tokens(float x) {
  x = ptx::max_nan(x, __shfl_xor_sync(kAllLanes, x, 4));
  x = ptx::max_nan(x, __shfl_xor_sync(kAllLanes, x, 8));
  return ptx::max_nan(x, __shfl_xor_sync(kAllLanes, x, 16));
}

__device__ __forceinline__ float sum_over_tokens(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 4);
  x += __shfl_xor_sync(kAllLanes, x, 8);
  return x + __shfl_xor_sync(kAllLanes, x, 16);
}

// Two weights of 16 tokens (tokens g and 8 + g of query row c) -> a B register: lane 4 g + c holds tokens 2c, 8 + 2c,
// 2c + 1, 9 + 2c of column g.  Adding 2^23 leaves the rounded integer in a float's low bits.  What is transposed is
// pairs of digits: both tokens' high one in the even column, both low ones in the odd. The bits are gathered in `seen`:
// those of a negative weight have some of kNegative.
inline constexpr uint32_t kNegative = 0x00ff0000u;
__device__ __forceinline__ uint32_t pack_weights(float w0, float w1, float inverse, uint32_t& seen) {
  const uint32_t x0 = __float_as_uint(fmaf(w0, inverse, 8388608.0f));
  const uint32_t x1 = __float_as_uint(fmaf(w1, inverse, 8388608.0f));
  seen |= x0 | x1;
  return ptx::transpose_b16(__byte_perm(x0, x1, 0x4051));
}

// A tile's weights as the B operand, and the factor that takes its products back, a field of the codes each.
template <int kBits, int kTiles>
struct Weights {
  static constexpr int kFields = 8 / kBits;
  uint32_t b[kTiles][4];
  float back[kTiles][kFields];

  __device__ __forceinline__ void pack(int tile, const float (&weights)[4][2], float max, uint32_t& seen) {
    const float inverse = max > 1e-33f ? 65535.0f * ptx::reciprocal(max) : 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) b[tile][i] = pack_weights(weights[i][0], weights[i][1], inverse, seen);
#pragma unroll
    for (int f = 0; f < kFields; ++f) back[tile][f] = max * (1.0f / 65535.0f / (1 << (kBits * f)));  // keeps a NaN
  }
};

// Products of one row tile with the weights.
template <int kTiles>
struct ValueProducts {
  int sums[kTiles][4] = {};

  template <class Words, int kBits>
  __device__ __forceinline__ void add(const Words& words, int u, int half, const Weights<kBits, kTiles>& weights) {
    uint32_t a[4];
    words.operand(u, half, a);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      ptx::mma_u8_u8(sums[tile], a, make_uint2(weights.b[tile][2 * half], weights.b[tile][2 * half + 1]));
  }
  __device__ __forceinline__ float get(int tile, int r) const {
    return static_cast<float>(sums[tile][2 * r] * 256 + sums[tile][2 * r + 1]);
  }
};

template <int kDim, int kTiles, int kGroups>
struct Outputs {
  static constexpr int kRowTiles = padded_dim(kDim) / 16;
  float sums[kTiles][kRowTiles][2];       // channel 16 u + 8 r + g, of all lanes' tokens
  float offsets[kTiles][kGroups];         // sum of P * offset of a channel group, of the lane's tokens
  uint32_t weight_bits[kTiles][kGroups];  // of the lane's integer weights, gathered
};

// The weights of one channel group.  kMasked: a weight of 0 hides its token's parameters, which may be NaN.
template <int kBits, int kPairBytes, bool kMasked, int kTiles, int kMaxGroups>
__device__ __forceinline__ void weigh_per_token(const uint8_t* pairs, int groups, int group,
                                                const float (&p)[kTiles][4][2], int lane,
                                                Weights<kBits, kTiles>& weights, float (&offsets)[kTiles][kMaxGroups],
                                                uint32_t (&seen)[kTiles][kMaxGroups]) {
  float2 affine[4][2];
#pragma unroll
  for (int i = 0; i < 8; ++i) affine[i / 2][i % 2] = load_pair<kPairBytes>(pairs, (8 * i + lane / 4) * groups + group);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    float products[4][2], max = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float weight = p[tile][i / 2][i % 2];
      float2 pair = affine[i / 2][i % 2];
      if (kMasked && weight == 0.0f) pair = {0.0f, 0.0f};
      products[i / 2][i % 2] = weight * pair.x;
      max = ptx::max_nan(max, fabsf(products[i / 2][i % 2]));
      offsets[tile][group] = fmaf(weight, pair.y, offsets[tile][group]);
    }
    weights.pack(tile, products, max_over_tokens(max), seen[tile][group]);
  }
}

// Adds a tile's values, per token quantized.
template <int kBits, int kGroup, int kPairBytes, int kDim, int kTiles, int kMaxGroups>
__device__ __forceinline__ void add_values_per_token(const uint8_t* codes, const uint8_t* pairs, bool masked,
                                                     const float (&p)[kTiles][4][2], int lane,
                                                     Outputs<kDim, kTiles, kMaxGroups>& out) {
  using Words = ValueWords<kBits, kDim>;
  constexpr int kGroups = padded_dim(kDim) / kGroup, kGroupTiles = kGroup / 16;
  Words words;
  for_each<kGroups>([&](auto group_constant) {
    constexpr int group = group_constant;
    Weights<kBits, kTiles> weights;
    if (masked) {
      weigh_per_token<kBits, kPairBytes, true>(pairs, kGroups, group, p, lane, weights, out.offsets, out.weight_bits);
    } else {
      weigh_per_token<kBits, kPairBytes, false>(pairs, kGroups, group, p, lane, weights, out.offsets, out.weight_bits);
    }
#pragma unroll
    for (int u = group * kGroupTiles; u < (group + 1) * kGroupTiles; ++u) {
      if (u % Words::kFields == 0) words.load(codes, u, lane);
      ValueProducts<kTiles> products;
      products.add(words, u, 0, weights);
      products.add(words, u, 1, weights);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& sum = out.sums[tile][u][r];
          sum = fmaf(products.get(tile, r), weights.back[tile][Words::field(u, r)], sum);
        }
      }
    }
  });
}

// Adds a tile's values, quantized per channel in groups of 32 or 64 tokens; `begin` and `end` are the quantized tokens'
// places in the tile: a group outside them has no parameters.
template <int kBits, int kPairBytes, int kDim, int kTiles, int kMaxGroups>
__device__ __forceinline__ void add_values_per_channel(const uint8_t* codes, const uint8_t* pairs, int group_tokens,
                                                       int begin, int end, const float (&p)[kTiles][4][2], int lane,
                                                       Outputs<kDim, kTiles, kMaxGroups>& out) {
  using Words = ValueWords<kBits, kDim>;
  Weights<kBits, kTiles> weights;
  float total[kTiles][2];  // of P over each half of the tile
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    float max = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) max = ptx::max_nan(max, p[tile][i / 2][i % 2]);
    weights.pack(tile, p[tile], max_over_tokens(max), out.weight_bits[tile][0]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[tile][half] = sum_over_tokens(p[tile][2 * half][0] + p[tile][2 * half][1] + p[tile][2 * half + 1][0] +
                                          p[tile][2 * half + 1][1]);
    }
  }
#pragma unroll 1
  for (int first = 0; first < kTileTokens; first += group_tokens, pairs += kDim * kPairBytes) {
    if (first >= end || first + group_tokens <= begin) continue;
    const bool halves[2] = {first == 0, first + group_tokens == kTileTokens};
    Words words;
#pragma unroll
    for (int u = 0; u < Outputs<kDim, kTiles, kMaxGroups>::kRowTiles; ++u) {
      if (u % Words::kFields == 0) words.load(codes, u, lane);
      ValueProducts<kTiles> products;
      if (halves[0]) products.add(words, u, 0, weights);
      if (halves[1]) products.add(words, u, 1, weights);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int channel = 16 * u + 8 * r + lane / 4;
        if (kDim % 32 != 0 && channel >= kDim) continue;
        const float2 affine = load_pair<kPairBytes>(pairs, channel);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const float of_group = (halves[0] ? total[tile][0] : 0.0f) + (halves[1] ? total[tile][1] : 0.0f);
          float& sum = out.sums[tile][u][r];
          const float product = products.get(tile, r) * weights.back[tile][Words::field(u, r)];
          sum = fmaf(affine.x, product, fmaf(affine.y, of_group, sum));
        }
      }
    }
  }
}

}  // namespace jax_foscar::cuda
