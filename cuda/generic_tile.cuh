// What decode_generic does with one tile of 64 tokens: scores of the keys, sums of the values, in plain f32 FMAs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "params.h"

namespace jax_foscar::cuda {
namespace {

constexpr int kMaxDim = 256;
constexpr int kChannels = kMaxDim / 32;  // of the values, a lane

// 64 tokens of one operand.
struct Tile {
  const uint8_t* codes;  // of the tile's first token
  const void* params;    // of its page
  int first;             // the first token's place in the page
  int tokens;            // how many may be read: less than 64 only at the end of the exact arrays
};

__device__ float bf16_to_float(uint32_t bits) { return __uint_as_float(bits << 16); }

__device__ float load_float(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return static_cast<const float*>(data)[i];
  if (dtype == DType::kF16) return __half2float(static_cast<const __half*>(data)[i]);
  return bf16_to_float(static_cast<const uint16_t*>(data)[i]);
}

__device__ void store_float(void* data, DType dtype, int64_t i, float x) {
  if (dtype == DType::kF32) static_cast<float*>(data)[i] = x;
  if (dtype == DType::kF16) static_cast<__half*>(data)[i] = __float2half_rn(x);
  if (dtype == DType::kBF16) static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(x);
}

// (scale, offset) number i of a page.
__device__ float2 load_pair(const void* params, DType dtype, int i) {
  return dtype == DType::kF32 ? static_cast<const float2*>(params)[i]
                              : __half22float2(static_cast<const __half2*>(params)[i]);
}

// Channel of field f of a key byte, counted from that of field 0: key_address read backwards.
constexpr __host__ __device__ int key_field_channel(int bits, int field, bool tail) {
  return tail ? 8 * field : bits == 2 ? 32 * (field & 1) + 16 * (field >> 1) : 16 * field;
}
static_assert(key_address(2, 128, 5, 71 + key_field_channel(2, 1, false)).shift == 2 &&
              key_address(2, 128, 5, 71 + key_field_channel(2, 2, false)).shift == 4 &&
              key_address(2, 128, 5, 71 + key_field_channel(2, 3, false)).shift == 6 &&
              key_address(2, 96, 5, 67 + key_field_channel(2, 3, true)).shift == 6 &&
              key_address(4, 128, 5, 39 + key_field_channel(4, 1, false)).shift == 4);

// Token `b` of the four in a value word, counted from its first: value_address read backwards.
constexpr __host__ __device__ int value_word_token(int b) { return 8 * (b % 2) + b / 2; }
static_assert(value_address(4, 64, 4, 9).byte % 4 == 0 && value_address(2, 96, 4, 70).byte % 4 == 0 &&
              value_address(4, 64, 4 + value_word_token(1), 9).byte == value_address(4, 64, 4, 9).byte + 1 &&
              value_address(4, 64, 4 + value_word_token(2), 9).byte == value_address(4, 64, 4, 9).byte + 2 &&
              value_address(4, 64, 4 + value_word_token(3), 9).byte == value_address(4, 64, 4, 9).byte + 3 &&
              value_address(2, 96, 4 + value_word_token(3), 70).byte == value_address(2, 96, 4, 70).byte + 3);

// s[row] += Q[row][channel .. channel + 3] . k
template <int kRows>
__device__ void add_scores(const float (&q)[kRows][kMaxDim], int channel, const float (&k)[2][4],
                           float (&s)[2][kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float4 q4 = *reinterpret_cast<const float4*>(&q[r][channel]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      s[h][r] = fmaf(q4.x, k[h][0], s[h][r]);
      s[h][r] = fmaf(q4.y, k[h][1], s[h][r]);
      s[h][r] = fmaf(q4.z, k[h][2], s[h][r]);
      s[h][r] = fmaf(q4.w, k[h][3], s[h][r]);
    }
  }
}

// s[h][row] = Q[row] . K[lane + 32 h]
template <int kBits, int kRows>
__device__ void score(const OperandParams& key, DType dtype, const Tile& tile, const float (&q)[kRows][kMaxDim],
                      int lane, float (&s)[2][kRows]) {
  if constexpr (kBits == 16) {
    for (int d = 0; d < key.dim; d += 4) {
      float k[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int t = min(lane + 32 * h, tile.tokens - 1);
        const uint2 word = *reinterpret_cast<const uint2*>(tile.codes + 2 * (t * key.dim + d));
        k[h][0] = bf16_to_float(word.x & 0xffff), k[h][1] = bf16_to_float(word.x >> 16);
        k[h][2] = bf16_to_float(word.y & 0xffff), k[h][3] = bf16_to_float(word.y >> 16);
      }
      add_scores(q, d, k, s);
    }
  } else {
    const int blocks = num_blocks(kBits, key.dim);
    for (int w = 0; w < token_bytes(kBits, key.dim) / 4; ++w) {
      const bool tail = kBits == 2 && w >= 4 * blocks;
      const int channel = w / 4 * (128 / kBits) + w % 4 * 4;
      uint32_t word[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint8_t* byte = tile.codes + key_address(kBits, key.dim, lane + 32 * h, channel).byte;
        if (tail) {  // two tokens' bytes alternate every 2 bytes; the next two of this token are in the next lane
          word[h] = *reinterpret_cast<const uint16_t*>(byte) | *reinterpret_cast<const uint16_t*>(byte + 16) << 16;
        } else {
          word[h] = *reinterpret_cast<const uint32_t*>(byte);
        }
      }
#pragma unroll
      for (int f = 0; f < 8 / kBits; ++f) {
        const int d = channel + key_field_channel(kBits, f, tail);
        if (d >= key.dim) continue;  // padding
        float k[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int t = tile.first + lane + 32 * h;
          const int pair = key.per_channel ? t / key.group * key.dim + d : t * (key.dim / key.group) + d / key.group;
          float2 affine = load_pair(tile.params, dtype, pair);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (i > 0 && key.per_channel) affine = load_pair(tile.params, dtype, pair + i);
            const uint32_t code = word[h] >> (8 * i + kBits * f) & ((1 << kBits) - 1);
            k[h][i] = fmaf(affine.x, static_cast<float>(code), affine.y);
          }
        }
        add_scores(q, d, k, s);
      }
    }
  }
}

// sum[row] += p[token b][row] * v[b] for the tokens that follow `first` as `token` says.  A value that is not finite
// must reach only the rows that see its token, and 0 * NaN is NaN: the sign bit of p marks a token that the row does
// not see.
template <int kRows, typename Token>
__device__ void add_values(const float (&p)[kTileTokens][kRows], int first, Token token, const float (&v)[4],
                           float (&sum)[kRows]) {
  const bool finite = isfinite(v[0]) && isfinite(v[1]) && isfinite(v[2]) && isfinite(v[3]);
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const float (&p_token)[kRows] = p[first + token(b)];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float weight = p_token[r];
      if (finite || !signbit(weight)) sum[r] = fmaf(weight, v[b], sum[r]);
    }
  }
}

// o[i][row] = o[i][row] * alpha[row] + sum over the tile's tokens of p[t][row] * V[t][lane + 32 i].  The tile has
// a sum of its own: added one by one to the whole row's, 128K values of mean zero would lose three digits.
template <int kBits, int kRows>
__device__ void accumulate(const OperandParams& value, DType dtype, const Tile& tile,
                           const float (&p)[kTileTokens][kRows], const float (&alpha)[kRows], int lane,
                           float (&o)[kChannels][kRows]) {
#pragma unroll 1
  for (int channel = lane; channel < value.dim; channel += 32) {
    float sum[kRows] = {};
    if constexpr (kBits == 16) {
      const uint16_t* column = reinterpret_cast<const uint16_t*>(tile.codes) + channel;
#pragma unroll 1
      for (int t = 0; t < tile.tokens; t += 4) {
        float v[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) v[b] = t + b < tile.tokens ? bf16_to_float(column[(t + b) * value.dim]) : 0.0f;
        add_values(p, t, [](int b) { return b; }, v, sum);
      }
    } else {
      const int group = value.per_channel ? 0 : channel / value.group;
      const int groups = value.per_channel ? 0 : value.dim / value.group;
#pragma unroll 1
      for (int word = 0; word < kTileTokens / 4; ++word) {
        const int first = word / 4 * 16 + word % 4 * 2;
        const CodeAddress at = value_address(kBits, value.dim, first, channel);
        const uint32_t codes = *reinterpret_cast<const uint32_t*>(tile.codes + at.byte) >> at.shift;
        float2 affine;
        if (value.per_channel)
          affine = load_pair(tile.params, dtype, (tile.first + first) / value.group * value.dim + channel);
        float v[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const int t = tile.first + first + value_word_token(b);
          if (!value.per_channel) affine = load_pair(tile.params, dtype, t * groups + group);
          v[b] = fmaf(affine.x, static_cast<float>(codes >> 8 * b & ((1 << kBits) - 1)), affine.y);
        }
        add_values(p, first, [](int b) { return value_word_token(b); }, v, sum);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) o[channel / 32][r] = fmaf(o[channel / 32][r], alpha[r], sum[r]);
  }
}

}  // namespace
}  // namespace jax_foscar::cuda
