// Quantizing a whole tile of 64 bfloat16 tokens of one KV head in registers: to the bit what write_tile.cuh does.
//
// A CTA of two warps takes a tile.  Its tokens wait in shared memory, where whole lines of the device memory become the
// 4 channels (8 bytes) that a lane takes at a time.  Turns of loops are 32 codes a lane.  Ranges are taken in bfloat16,
// two channels at once, which is exact.
#pragma once

#include <cstdint>

#include "ptx.cuh"
#include "quantize.h"
#include "write_codes.cuh"
#include "write_params.h"

namespace jax_foscar::cuda::whole {

constexpr int kThreads = 64;

// What a kernel knows: no whole tiles, those of formats without exact tokens (all are per token), or all.
enum class Kinds { kNone, kPlain, kAny };

struct Tile {
  const uint16_t* tokens;    // the new ones, as if they began with the tile's first
  const uint16_t* old;       // the ring's, from the tile's first on, of which the tile takes num_old
  int stride, dim, num_old;  // of `tokens`; channels
  uint8_t* codes;            // of the tile
  uint32_t* pairs;           // f16 scale and offset of the tile's first group
  float2* groups;            // shared memory: `scaled` of each group of the tile, in the order of pairs
  uint16_t* stage;           // shared memory: the tokens, stage_stride apart
  int stage_stride;

  // Channels `channel` .. channel + 3 of a token that waits.
  __device__ uint2 load4(int token, int channel) const {
    return *reinterpret_cast<const uint2*>(stage + token * stage_stride + channel);
  }
};

__device__ inline int lane_id() { return threadIdx.x % 32; }
__device__ inline int warp_id() { return threadIdx.x / 32; }

// Which of eight tokens a lane takes, where four lanes take one: half a warp, which reads its 8 bytes a lane at once,
// meets every second token and so, at the stage's stride, all banks.
__device__ inline int token_of_lane() { return lane_id() / 4 % 4 * 2 + lane_id() / 16; }

// --- Ranges and parameters -----------------------------------------------------------------------------------------

// The least low half, and the least of the negated high half: a maximum is kept negated, so that one minimum takes
// both.
__device__ inline uint32_t low_and_high(uint32_t low2, uint32_t high2) {
  const uint32_t negated = negate2(high2);
  return min2(__byte_perm(low2, negated, 0x5410), __byte_perm(low2, negated, 0x7632));
}

// Minima over lanes that differ in the bits given, of kCount items that stand in units of kUnit: with each bit a lane
// passes on half of its units, as long as it has two.  Returns the index of the first item that it keeps; there are
// `kept_items` from then on.
template <int kCount, int kUnit, int kBit, int... kRest, int kSize>
__device__ int scatter_minima(uint32_t (&items)[kSize]) {
  constexpr bool kHalve = kCount > kUnit;
  constexpr int kKept = kHalve ? kCount / 2 : kCount;
  const bool upper = kHalve && (lane_id() & kBit) != 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    uint32_t keep = items[i], send = items[i];
    if constexpr (kHalve) keep = upper ? items[i + kKept] : items[i], send = upper ? items[i] : items[i + kKept];
    items[i] = min2(keep, __shfl_xor_sync(kAllLanes, send, kBit));
  }
  int first = upper ? kKept : 0;
  if constexpr (sizeof...(kRest) > 0) first += scatter_minima<kKept, kUnit, kRest...>(items);
  return first;
}

// The tile's tokens into shared memory, 16 bytes a copy.  A thread keeps to its channels, even where a few threads are
// then left over: nothing but additions remains for each copy.
__device__ inline void start_loading(const Tile& tile) {
  const int chunks = tile.dim / 8, rows = kThreads / chunks, channel = threadIdx.x % chunks * 8;
  int token = threadIdx.x / chunks;
  if (token < rows) {
    uint32_t to = ptx::shared_address(tile.stage + token * tile.stage_stride + channel);
    const uint32_t to_step = rows * tile.stage_stride * static_cast<int>(sizeof(uint16_t));
    for (; token < tile.num_old; token += rows, to += to_step)
      ptx::cp_async16(to, tile.old + token * tile.dim + channel);
    const int64_t step = int64_t{rows} * tile.stride;
    const uint16_t* from = tile.tokens + int64_t{token} * tile.stride + channel;
#pragma unroll 4
    for (; token < kTileTokens; token += rows, to += to_step, from += step) ptx::cp_async16(to, from);
  }
  ptx::cp_async_commit();
}

template <int kBits>
__device__ float2 keep_group(const Tile& tile, int index, float low, float high, bool is_owner) {
  Range range;
  range.low = low, range.high = high;
  const Pair pair = make_pair(range, kBits, DType::kF16);
  if (is_owner) tile.pairs[index] = pair.halves;
  return scaled<kBits>(pair.affine);
}

// --- Per token -------------------------------------------------------------------------------------------------------

// Four lanes take a token: lane c of them its channels 4 c .. 4 c + 3 of 16.  Stores parameters, and codes of keys.
template <int kBits, int kDim, int kGroup, bool kValue>
__device__ void by_token(const Tile& tile) {
  constexpr int kFields = 8 / kBits, kBlocks = num_blocks(kBits, kDim), kGroups = kDim / kGroup;
  constexpr int kLoads = kDim / 16, kGroupLoads = kLoads / kGroups;
  const int c = lane_id() % 4, row = token_of_lane();
#pragma unroll 1
  for (int j = 0; j < 4; ++j) {
    const int token = warp_id() * 32 + 8 * j + row;
    uint2 x[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) x[i] = tile.load4(token, 16 * i + 4 * c);
    uint32_t ranges[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      uint32_t low = x[g * kGroupLoads].x, high = low;
#pragma unroll
      for (int i = g * kGroupLoads; i < (g + 1) * kGroupLoads; ++i)
        low = min2(min2(low, x[i].x), x[i].y), high = max2(max2(high, x[i].x), x[i].y);
      ranges[g] = low_and_high(low, high);
    }
    scatter_minima<kGroups, kGroups, 1, 2>(ranges);
    float2 groups[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      groups[g] = keep_group<kBits>(tile, token * kGroups + g, low_half(ranges[g]), -high_half(ranges[g]), c == 0);
      if (kValue && c == 0) tile.groups[token * kGroups + g] = groups[g];
    }
    if constexpr (!kValue) {
      uint32_t words[kBlocks];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        words[b] = 0;
#pragma unroll
        for (int f = 0; f < kFields; ++f) {
          const int i = b * (8 / kBits) + key_field_channel(kBits, false, f) / 16;
          words[b] += four_codes<kBits>(x[i], Groups(groups[i / kGroupLoads])) << (kBits * f);
        }
      }
      const int n = token / 8 * kBlocks;
      uint32_t* to = reinterpret_cast<uint32_t*>(tile.codes) + (n / 4 * 32 + 4 * row + c) * 4 + n % 4;
      if constexpr (kBlocks == 4) {
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
      } else if constexpr (kBlocks == 2) {
        *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
      } else {
        *to = words[0];
      }
    }
  }
}

// --- Values: lane 16 z + 4 q + c has channels 4 q .. 4 q + 3 of each field, of 8 of 32 tokens -----------------------

// Token i (0 .. 7) of a lane: words of 4 tokens, 16 apart.
__device__ inline int value_token(int i) { return lane_id() % 4 * 2 + i / 4 * 16 + value_byte_token(i % 4); }

// Stores what a lane has of one row block of 32 tokens: words of rows 4 q .. 4 q + 3, whose units also have those of
// the rows 8 further, which the lane of q ^ 2 has.
__device__ inline void store_values(uint8_t* row_block, const uint32_t (&words)[2][4]) {
  const int lane = lane_id();
  const bool upper = (lane & 8) != 0;
  uint32_t keep[2][2], other[2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      keep[half][e] = upper ? words[half][2 + e] : words[half][e];
      other[half][e] = __shfl_xor_sync(kAllLanes, upper ? words[half][e] : words[half][2 + e], 8);
    }
  uint4* to = reinterpret_cast<uint4*>(row_block) + lane / 4 % 2 * 16 + (upper ? 8 : 0) + lane % 4;
#pragma unroll
  for (int e = 0; e < 2; ++e)
    to[4 * e] = upper ? make_uint4(other[0][e], keep[0][e], other[1][e], keep[1][e])
                      : make_uint4(keep[0][e], other[0][e], keep[1][e], other[1][e]);
}

// A warp takes 32 tokens, z counts row blocks.
template <int kBits, int kDim, int kGroup>
__device__ void values_by_token(const Tile& tile) {
  constexpr int kFields = 8 / kBits, kBlocks = num_blocks(kBits, kDim), kGroups = kDim / kGroup;
  by_token<kBits, kDim, kGroup, true>(tile);
  __syncwarp();
  const int lane = lane_id(), q = lane / 4 % 4, first = warp_id() * 32;
#pragma unroll 1
  for (int b = lane / 16; b < kBlocks; b += 2) {
    uint32_t words[2][4] = {};
#pragma unroll 1
    for (int f = 0; f < kFields; ++f) {
      const float2* groups = tile.groups + first * kGroups + b * (128 / kBits) / kGroup;
      uint32_t bytes[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint2 x = tile.load4(first + value_token(i), b * (128 / kBits) + 16 * f + 4 * q);
        uint32_t (&word)[4] = bytes[i / 4];
        if (i % 4 == 0) word[0] = word[1] = word[2] = word[3] = kEmpty;
        add_codes<kBits>(word, i % 4, x, Groups(groups[value_token(i) * kGroups]));
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) words[i / 4][i % 4] += bytes[i / 4][i % 4] << (kBits * f);
    }
    store_values(tile.codes + (warp_id() * kBlocks + b) * 512, words);
  }
}

// --- Per channel: warps take blocks in turn, a turn is one field -----------------------------------------------------

// Minima and negated maxima of two pairs of channels over kCount of a lane's tokens.
template <int kCount>
__device__ void pair_ranges(const uint2* x, uint32_t* ranges) {
  uint2 low = x[0], high = low;
#pragma unroll
  for (int i = 1; i < kCount; ++i) {
    low.x = min2(low.x, x[i].x), low.y = min2(low.y, x[i].y);
    high.x = max2(high.x, x[i].x), high.y = max2(high.y, x[i].y);
  }
  ranges[0] = low.x, ranges[1] = negate2(high.x), ranges[2] = low.y, ranges[3] = negate2(high.y);
}

// Keeps one group of the pair whose ranges a lane has.
template <int kBits>
__device__ void keep_channel(const Tile& tile, int index, const uint32_t* ranges, bool odd, bool is_owner) {
  const float low = odd ? high_half(ranges[0]) : low_half(ranges[0]);
  const float high = odd ? high_half(ranges[1]) : low_half(ranges[1]);
  const float2 group = keep_group<kBits>(tile, index + odd, low, -high, is_owner);
  if (is_owner) tile.groups[index + odd] = group;
}

// Four lanes take a token: lane c of them channels 4 c .. 4 c + 3 of each field.
template <int kBits, int kGroup>
__device__ void keys_by_channel(const Tile& tile) {
  constexpr int kFields = 8 / kBits, kGroups = kTileTokens / kGroup, kCount = 8 / kGroups;
  const int lane = lane_id(), c = lane % 4, row = token_of_lane(), blocks = num_blocks(kBits, tile.dim);
  const auto word = [&tile](int token, int block, int c) -> uint32_t& {
    return reinterpret_cast<uint32_t*>(tile.stage + token * tile.stage_stride + block * (128 / kBits))[c];
  };
  uint32_t words[8] = {};  // of tokens row + 8 j
  int b = warp_id(), f = 0;
#pragma unroll 1
  while (b < blocks) {
    const int first = b * (128 / kBits) + key_field_channel(kBits, false, f) + 4 * c;
    uint2 x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = tile.load4(row + 8 * j, first);

    uint32_t ranges[4 * kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) pair_ranges<kCount>(x + g * kCount, ranges + 4 * g);
    const int mine = scatter_minima<4 * kGroups, 2, 4, 8, 16>(ranges);
    keep_channel<kBits>(tile, mine / 4 * tile.dim + first + mine % 4, ranges, lane & (kGroups == 1 ? 8 : 16),
                        kGroups == 2 || lane < 16);
    __syncwarp();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const Groups groups(tile.groups + g * tile.dim + first);
#pragma unroll
      for (int j = g * kCount; j < (g + 1) * kCount; ++j) words[j] += four_codes<kBits>(x[j], groups) << (kBits * f);
    }
    f = (f + 1) % kFields;
    if (f == 0) {
      // In place of the block's tokens, which nobody reads again.
#pragma unroll
      for (int j = 0; j < 8; ++j) word(row + 8 * j, b, c) = words[j], words[j] = 0;
      b += kThreads / 32;
    }
  }
  // Whole units at last: their words are of all blocks.  A warp stores those of 32 tokens.
  __syncthreads();
  int token = 32 * warp_id() + lane / 4, block = 0;
#pragma unroll 2
  for (int i = 0; i < blocks; ++i) {
    uint32_t unit[4];
#pragma unroll
    for (uint32_t& out : unit) {
      out = word(token, block, c);
      if (++block == blocks) block = 0, token += 8;
    }
    reinterpret_cast<uint4*>(tile.codes)[(warp_id() * blocks + i) * 32 + lane] =
        make_uint4(unit[0], unit[1], unit[2], unit[3]);
  }
}

// z is the half of the tile.
template <int kBits, int kGroup>
__device__ void values_by_channel(const Tile& tile) {
  constexpr int kFields = 8 / kBits;
  const int lane = lane_id(), q = lane / 4 % 4, z = lane / 16, blocks = num_blocks(kBits, tile.dim);
  uint32_t words[2][4] = {};
  int b = warp_id(), f = 0;
#pragma unroll 1
  while (b < blocks) {
    const int channel = b * (128 / kBits) + 16 * f + 4 * q, first = (kGroup == 64 ? 0 : z * tile.dim) + channel;
    uint2 x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = tile.load4(32 * z + value_token(i), channel);

    uint32_t ranges[4];
    pair_ranges<8>(x, ranges);
    int mine;
    if constexpr (kGroup == 64) {
      mine = scatter_minima<4, 2, 1, 2, 16>(ranges);
    } else {
      mine = scatter_minima<4, 2, 1, 2>(ranges);
    }
    keep_channel<kBits>(tile, first + mine, ranges, lane & 2, kGroup == 32 || lane < 16);
    __syncwarp();
    const Groups groups(tile.groups + first);
    uint32_t bytes[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t (&word)[4] = bytes[i / 4];
      if (i % 4 == 0) word[0] = word[1] = word[2] = word[3] = kEmpty;
      add_codes<kBits>(word, i % 4, x[i], groups);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i / 4][i % 4] += bytes[i / 4][i % 4] << (kBits * f);
    f = (f + 1) % kFields;
    if (f == 0) {
      store_values(tile.codes + (z * blocks + b) * 512, words);
#pragma unroll
      for (int i = 0; i < 8; ++i) words[i / 4][i % 4] = 0;
      b += kThreads / 32;
    }
  }
}

// --- Which of them ---------------------------------------------------------------------------------------------------

// Whether `quantize` takes an operand.
template <Kinds kKinds>
__device__ bool takes(const WriteParams& p, const WriteOperand& x, bool is_value) {
  if (x.bits == 16 || x.token_dtype != DType::kBF16 || p.param_dtype != DType::kF16) return false;
  if (x.per_channel) return kKinds == Kinds::kAny && x.dim % (x.bits == 2 ? 64 : 32) == 0;
  return (x.dim == 128 && x.group >= 64) || (x.dim == 64 && x.group == 64 && !(is_value && x.bits == 2));
}

template <Kinds kKinds, int kBits, bool kValue>
__device__ void quantize(const Tile& tile, const OperandFormat& x) {
  if constexpr (kKinds == Kinds::kAny) {
    if (x.per_channel && kValue)
      return x.group == 64 ? values_by_channel<kBits, 64>(tile) : values_by_channel<kBits, 32>(tile);
    if (x.per_channel) return x.group == 64 ? keys_by_channel<kBits, 64>(tile) : keys_by_channel<kBits, 32>(tile);
  }
  if constexpr (kValue) {
    if constexpr (kBits == 4) {
      if (x.dim == 64) return values_by_token<kBits, 64, 64>(tile);
    }
    x.group == 64 ? values_by_token<kBits, 128, 64>(tile) : values_by_token<kBits, 128, 128>(tile);
  } else {
    if (x.dim == 64) return by_token<kBits, 64, 64, false>(tile);
    x.group == 64 ? by_token<kBits, 128, 64, false>(tile) : by_token<kBits, 128, 128, false>(tile);
  }
}

}  // namespace jax_foscar::cuda::whole
