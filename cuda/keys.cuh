// Keys: the A operand straight from packed codes, and, for keys per token, a tile's scores.
//
// mma.sync m16n8k32 multiplies 16 tokens x 32 channels of u8 codes with the queries' digits (queries.cuh).  A mask
// leaves a field of the packed word where it is; one shift a word keeps the power of two on a code at 4 or less, which
// the query gives up.  Lane 4 g + c then holds query row c at tokens g and 8 + g, so that softmax needs no data
// movement.
#pragma once

#include "queries.cuh"

namespace jax_foscar::cuda {

// (scale, offset) number i; kPairBytes is 4 for f16, 8 for f32.
template <int kPairBytes>
__device__ __forceinline__ float2 load_pair(const uint8_t* pairs, int i) {
  if constexpr (kPairBytes == 8) return reinterpret_cast<const float2*>(pairs)[i];
  return __half22float2(reinterpret_cast<const __half2*>(pairs)[i]);
}

// The packed words of 32 tokens: lane 4 g + c holds bytes 4 c .. 4 c + 3 of every block of tokens g, 8 + g, 16 + g, 24
// + g.
template <int kBits, int kDim>
class KeyWords {
 public:
  static constexpr int kBlocks = num_blocks(kBits, kDim);
  static constexpr bool kTail = kBits == 2 && padded_dim(kDim) % 64 != 0;

  __device__ __forceinline__ void load(const uint8_t* tile, int half, int lane) {
    const uint4* loads = reinterpret_cast<const uint4*>(tile) + half * kBlocks * 32 + lane;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const uint4 load = loads[32 * i];
      words_[4 * i] = load.x, words_[4 * i + 1] = load.y, words_[4 * i + 2] = load.z, words_[4 * i + 3] = load.w;
    }
    if constexpr (kTail) {
      tail_ = *reinterpret_cast<const uint2*>(tile + kTileTokens * 16 * kBlocks + lane * 16 + half * 8);
    }
  }

  // The A operand of tokens 16 i .. 16 i + 15 and channels 32 step .. 32 step + 31, in bytes.
  __device__ __forceinline__ void operand(int i, int step, uint32_t (&a)[4]) const {
    uint32_t low, high, mask = 0x0f0f0f0fu;
    if constexpr (kBits == 4) {
      low = words_[2 * i * kBlocks + step], high = words_[(2 * i + 1) * kBlocks + step];
    } else if (kTail && step == 2 * kBlocks) {
      const uint32_t word = i == 0 ? tail_.x : tail_.y;
      low = __byte_perm(word, word, 0x1010), high = __byte_perm(word, word, 0x3232), mask = 0x0c0c0303u;
    } else {
      low = words_[2 * i * kBlocks + step / 2], high = words_[(2 * i + 1) * kBlocks + step / 2];
      mask = step % 2 == 0 ? 0x03030303u : 0x0c0c0c0cu;
    }
    a[0] = low & mask, a[1] = high & mask, a[2] = low >> 4 & mask, a[3] = high >> 4 & mask;
  }

  // The same of 16 channels, a field of a block or two of the tail, in halves (channel_keys.cuh).
  __device__ __forceinline__ void half_operand(int i, int step, uint32_t (&a)[4]) const {
    constexpr int kFields = 8 / kBits;
    const int block = step / kFields, f = step % kFields;
    uint32_t low, high, mask;
    if (kTail && block == kBlocks) {
      const uint32_t word = i == 0 ? tail_.x : tail_.y;
      low = __byte_perm(word, word, 0x1010), high = __byte_perm(word, word, 0x3232), mask = 0x000c0003u << (4 * f);
    } else {
      low = words_[2 * i * kBlocks + block], high = words_[(2 * i + 1) * kBlocks + block];
      mask = (kBits == 2 ? 0x00030003u : 0x000f000fu) << (kBits * f);
    }
    a[0] = low & mask, a[1] = high & mask, a[2] = low >> 8 & mask, a[3] = high >> 8 & mask;
  }

 private:
  uint32_t words_[4 * kBlocks];
  uint2 tail_;
};

// The integer products of 16 tokens with the queries' digits.
template <int kTiles>
struct Products {
  int upper[kTiles][4] = {};
  int low[(kTiles + 1) / 2][4] = {};

  template <class Words, class Queries>
  __device__ __forceinline__ void add(const Words& words, int i, int step, const Queries& queries, int lane) {
    uint32_t a[4];
    words.operand(i, step, a);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) ptx::mma_u8_s8(upper[tile], a, queries.integers.upper[tile][step][lane]);
#pragma unroll
    for (int pair = 0; pair < (kTiles + 1) / 2; ++pair)
      ptx::mma_u8_s8(low[pair], a, queries.integers.low[pair][step][Queries::low_lane(lane)]);
  }

  // Of token 8 r + g.
  __device__ __forceinline__ float get(int tile, int r) const {
    const int high = upper[tile][2 * r] * 256 + upper[tile][2 * r + 1];
    return static_cast<float>(high * 256 + low[tile / 2][2 * r + tile % 2]);
  }
};

// scores[tile][i][r] of token 16 i + 8 r + g and the lane's query row, keys per token; logit (base 2) = step * score.
template <int kBits, int kGroup, int kPairBytes, int kDim, int kTiles, bool kAnyPerChannel>
__device__ __forceinline__ void score_per_token(const uint8_t* codes, const uint8_t* pairs,
                                                const Queries<kDim, kTiles, kAnyPerChannel>& queries, int lane,
                                                float (&scores)[kTiles][4][2]) {
  constexpr int kSteps = padded_dim(kDim) / 32, kGroups = padded_dim(kDim) / kGroup;
  constexpr int kGroupSteps = kSteps / kGroups;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    KeyWords<kBits, kDim> words;
    words.load(codes, half, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        Products<kTiles> products;
#pragma unroll
        for (int s = group * kGroupSteps; s < (group + 1) * kGroupSteps; ++s) products.add(words, i, s, queries, lane);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int token = 32 * half + 16 * i + 8 * r + lane / 4;
          const float2 affine = load_pair<kPairBytes>(pairs, token * kGroups + group);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            float& score = scores[tile][2 * half + i][r];
            const float offset = affine.y * queries.rows[4 * tile + lane % 4].sums[group];
            score = fmaf(affine.x, products.get(tile, r), group == 0 ? offset : offset + score);
          }
        }
      }
    }
  }
}

}  // namespace jax_foscar::cuda
