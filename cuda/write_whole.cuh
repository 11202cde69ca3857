// Quantizing a whole tile of 64 bfloat16 tokens of one KV head in registers: to the bit what write_tile.cuh does.
//
// A CTA of two warps takes a tile.  Its tokens wait in shared memory, where whole lines of the device memory become the
// 4 channels (8 bytes) that a lane takes at a time.  It reads them twice: for the groups' ranges, in bfloat16 and two
// channels at once, which is exact; and for the codes.
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
  const uint16_t* tokens;             // the new ones, as if they began with the tile's first
  const uint16_t* old;                // the ring's, from the tile's first on, of which the tile takes num_old
  int stride, dim, num_old;           // of `tokens`; channels
  int group;                          // channels (per token) or tokens (per channel)
  int groups_a_token, channel_shift;  // where they are of tokens: a group is 1 << channel_shift times 32 channels
  uint8_t* codes;                     // of the tile
  uint32_t* pairs;                    // f16 scale and offset of the tile's first group
  float2* groups;                     // shared memory: `scaled` of each group of the tile, in the order of pairs
  uint16_t* stage;                    // shared memory: the tokens, stage_stride apart
  int stage_stride;

  __device__ uint16_t* token(int t) const { return stage + t * stage_stride; }
};

__device__ inline int lane_id() { return threadIdx.x % 32; }
// Tokens go to warps by 32.
__device__ inline int first_token() { return threadIdx.x / 32 * 32; }

// Which of eight tokens a lane takes, where four lanes take one: half a warp, which reads its 8 bytes a lane at once,
// meets every second token and so, at the stage's stride, all banks.
__device__ inline int token_of_lane() { return lane_id() / 4 % 4 * 2 + lane_id() / 16; }

// The tile's tokens into shared memory, 16 bytes a copy.  A thread keeps to its channels: little but additions remains
// for each copy.
__device__ inline void start_loading(const Tile& tile) {
  const int chunks = tile.dim / 8, shift = chunks < 16 ? 3 : 4, rows = kThreads >> shift;
  const int64_t step = int64_t{rows} * tile.stride;
  const uint32_t to_step = rows * tile.stage_stride * static_cast<int>(sizeof(uint16_t));
  for (int chunk = threadIdx.x & ((1 << shift) - 1); chunk < chunks; chunk += 1 << shift) {
    const int first = threadIdx.x >> shift;
    uint32_t to = ptx::shared_address(tile.token(first) + 8 * chunk);
    const uint16_t* old = tile.old + first * tile.dim + 8 * chunk;
    for (int token = first; token < tile.num_old; token += rows, old += rows * tile.dim)
      ptx::cp_async16(ptx::shared_address(tile.token(token) + 8 * chunk), old);
    const uint16_t* from = tile.tokens + int64_t{first} * tile.stride + 8 * chunk;
    for (int token = first; token < kTileTokens; token += 4 * rows)
#pragma unroll
      for (int i = 0; i < 4; ++i, to += to_step, from += step)
        ptx::cp_async16(to, from, token + i * rows >= tile.num_old);
  }
  ptx::cp_async_commit();
}

// --- Ranges and parameters -----------------------------------------------------------------------------------------

// The least low half, and the least of the negated high half: a maximum is kept negated, so that one minimum takes
// both.
__device__ inline uint32_t low_and_high(PairRange x) {
  const uint32_t negated = negate2(x.high);
  return min2(__byte_perm(x.low, negated, 0x5410), __byte_perm(x.low, negated, 0x7632));
}

// Minima over lanes that differ in the bits given, of kCount items that stand in units of kUnit: with each bit a lane
// passes on half of its units, as long as it has two.  Returns the index of the first item that it keeps.
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

template <int kBits>
__device__ void keep_group(const Tile& tile, int index, float low, float high) {
  Range range;
  range.low = low, range.high = high;
  const Pair pair = make_pair(range, kBits, DType::kF16);
  tile.pairs[index] = pair.halves;
  tile.groups[index] = scaled<kBits>(pair.affine);
}

// Four lanes take a token, and in the end one each of the four that they took.
template <int kBits>
__device__ void token_ranges(const Tile& tile) {
  const int c = lane_id() % 4, row = first_token() + token_of_lane();
#pragma unroll 1
  for (int g = 0; g < tile.groups_a_token; ++g) {
    const int end = (g + 1) * tile.group;
    PairRange ranges[4];
#pragma unroll 1
    for (int channel = g * tile.group; channel < end; channel += 32)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint2 x = load_channels(tile.token(row + 8 * (i / 2)) + channel + 16 * (i % 2) + 4 * c);
        ranges[i / 2].add(x.x), ranges[i / 2].add(x.y);
      }
    uint32_t items[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) items[i] = low_and_high(ranges[i]);
    const int token = row + 8 * scatter_minima<4, 1, 1, 2>(items);
    keep_group<kBits>(tile, token * tile.groups_a_token + g, low_half(items[0]), -high_half(items[0]));
  }
}

// Warps take 32 channels in turn; four lanes take a token, and in the end a lane a channel.
template <int kBits>
__device__ void channel_ranges(const Tile& tile) {
  const int c = lane_id() % 4, row = token_of_lane(), odd = lane_id() / 16;
#pragma unroll 1
  for (int first = first_token() + 4 * c; first < tile.dim; first += kThreads) {
#pragma unroll 1
    for (int begin = 0; begin < kTileTokens; begin += tile.group) {
      PairRange ranges[4];
#pragma unroll 1
      for (int token = begin; token < begin + tile.group; token += 32)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const uint2 x = load_channels(tile.token(token + row + 8 * (i / 2)) + first + 16 * (i % 2));
          ranges[i % 2 * 2].add(x.x), ranges[i % 2 * 2 + 1].add(x.y);
        }
      uint32_t items[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) items[2 * i] = ranges[i].low, items[2 * i + 1] = negate2(ranges[i].high);
      const int mine = scatter_minima<8, 2, 4, 8, 16>(items), channel = first + mine / 4 * 16 + mine % 4 + odd;
      const float low = odd ? high_half(items[0]) : low_half(items[0]);
      const float high = odd ? high_half(items[1]) : low_half(items[1]);
      keep_group<kBits>(tile, (begin == 0 ? 0 : tile.dim) + channel, low, -high);
    }
  }
}

// --- Codes: a warp takes 32 tokens -----------------------------------------------------------------------------------

// What stands for the warp's tokens where groups are of tokens.
__device__ inline const float2* channel_groups(const Tile& tile) {
  return tile.groups + first_token() / tile.group * tile.dim;
}

// Four lanes take a token: lane c of them channels 4 c .. 4 c + 3 of each field.
template <int kBits, bool kChannel>
__device__ void pack_keys(const Tile& tile) {
  using Block = Block<kBits, false>;
  const int lane = lane_id(), c = lane % 4, row = first_token() + token_of_lane(), blocks = num_blocks(kBits, tile.dim);
#pragma unroll 1
  for (int b = 0; b < blocks; ++b) {
    Block block;
    if constexpr (kChannel) block.load_channel_groups(channel_groups(tile) + b * Block::kChannels + 4 * c);
    uint16_t* token = tile.token(row) + b * Block::kChannels;
    const float2* group = tile.groups + row * tile.groups_a_token;
#pragma unroll 2
    for (int i = 0; i < 4; ++i, token += 8 * tile.stage_stride, group += 8 * tile.groups_a_token) {
      if constexpr (!kChannel) block.load_token_groups(group, b, tile.channel_shift);
      const typename Block::Token x(token + 4 * c);
      uint32_t word = 0;
#pragma unroll
      for (int byte = 3; byte >= 0; --byte) block.push_byte(word, x, byte);
      // In the place of the tokens' block, which nobody reads again.
      __syncwarp();
      reinterpret_cast<uint32_t*>(token)[c] = word;
    }
  }
  __syncwarp();
  // Whole units at last: their words are of four blocks, in order.
  uint4* to = reinterpret_cast<uint4*>(tile.codes) + first_token() * blocks + lane;
  int token = first_token() + lane / 4, block = 0;
#pragma unroll 2
  for (int i = 0; i < blocks; ++i) {
    uint32_t unit[4];
#pragma unroll
    for (uint32_t& word : unit) {
      word = reinterpret_cast<const uint32_t*>(tile.token(token) + block * Block::kChannels)[c];
      if (++block == blocks) block = 0, token += 8;
    }
    to[32 * i] = make_uint4(unit[0], unit[1], unit[2], unit[3]);
  }
}

// Stores what a lane has of one row block of 32 tokens: words of rows 4 q .. 4 q + 3, whose units also have those of
// the rows 8 further, which the lane of q ^ 2 has.
__device__ inline void store_values(uint8_t* row_block, const uint32_t (&words)[2][4], bool is_there) {
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
  if (!is_there) return;
  uint4* to = reinterpret_cast<uint4*>(row_block) + lane / 4 % 2 * 16 + (upper ? 8 : 0) + lane % 4;
#pragma unroll
  for (int e = 0; e < 2; ++e)
    to[4 * e] = upper ? make_uint4(other[0][e], keep[0][e], other[1][e], keep[1][e])
                      : make_uint4(keep[0][e], other[0][e], keep[1][e], other[1][e]);
}

// Lane 16 z + 4 q + c takes channels 4 q .. 4 q + 3 of each field, of two words of 4 tokens; z counts row blocks.
template <int kBits, bool kChannel>
__device__ void pack_values(const Tile& tile) {
  using Block = Block<kBits, true>;
  const int lane = lane_id(), q = lane / 4 % 4, row = first_token() + lane % 4 * 2;
  const int blocks = num_blocks(kBits, tile.dim);
#pragma unroll 1
  for (int b = lane / 16; b - lane / 16 < blocks; b += 2) {
    const int there = min(b, blocks - 1);
    Block block;
    if constexpr (kChannel) block.load_channel_groups(channel_groups(tile) + there * Block::kChannels + 4 * q);
    const uint16_t* first = tile.token(row) + there * Block::kChannels + 4 * q;
    const float2* groups = tile.groups + row * tile.groups_a_token;
    uint32_t words[2][4] = {};  // of each half of the tokens
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 4; ++e) words[0][e] = words[1][e], words[1][e] = 0;
      // As much code for either width: what is not in the instruction cache is waited for.
#pragma unroll kBits / 2
      for (int pair = 1; pair >= 0; --pair) {
#pragma unroll
        for (int i = 1; i >= 0; --i) {
          const int token = value_byte_token(2 * pair + i);
          if constexpr (!kChannel)
            block.load_token_groups(groups + token * tile.groups_a_token, there, tile.channel_shift);
          const typename Block::Token x(first + token * tile.stage_stride);
#pragma unroll
          for (int e = 0; e < 4; ++e) block.push_byte(words[1][e], x, e);
        }
      }
      first += 16 * tile.stage_stride, groups += 16 * tile.groups_a_token;
    }
    store_values(tile.codes + (first_token() / 32 * blocks + there) * 512, words, b < blocks);
  }
}

// --- Which of them ---------------------------------------------------------------------------------------------------

// Whether `quantize` takes an operand.
template <Kinds kKinds>
__device__ bool takes(const WriteParams& p, const WriteOperand& x) {
  return (x.bits == 4 || (x.bits == 2 && x.dim % 64 == 0)) && x.dim % 32 == 0 && x.token_dtype == DType::kBF16 &&
         p.param_dtype == DType::kF16 && (kKinds == Kinds::kAny || !x.per_channel);
}

template <Kinds kKinds, int kBits>
__device__ void quantize(const Tile& tile, bool is_value, bool per_channel) {
  if constexpr (kKinds == Kinds::kAny) {
    if (per_channel) {
      channel_ranges<kBits>(tile);
      __syncthreads();
      return is_value ? pack_values<kBits, true>(tile) : pack_keys<kBits, true>(tile);
    }
  }
  token_ranges<kBits>(tile);
  __syncwarp();
  is_value ? pack_values<kBits, false>(tile) : pack_keys<kBits, false>(tile);
}

}  // namespace jax_foscar::cuda::whole
