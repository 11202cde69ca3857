// Writing one tile of one KV head by a whole CTA, whatever its tokens, format and types.  A tile is 32 tokens, or 64
// where groups are or many tokens come at once.  The CTA
//   1. loads its tokens that become quantized, from k or v or the ring, into shared memory,
//   2. takes each group's range, stores scale and offset, and keeps them in shared memory,
//   3. packs codes, 16 bytes of the page a thread, and stores those whose tokens are there,
//   4. puts the newest tokens into the ring's slots: write_params.h says why after 1, by this CTA.
// At 16 bits, 1 stores to the page and 2 and 3 are left out; a whole tile may take write_whole.cuh's way.
#pragma once

#include <cstdint>

#include "quantize.h"
#include "write_load.cuh"
#include "write_params.h"
#include "write_whole.cuh"

namespace jax_foscar::cuda {

// Tokens wait as Stage: uint16_t is bfloat16, which is all that formats with exact tokens know.
// Shared memory: tokens [tile_tokens][stage_stride], then the Affine of each group.  A row is padded by 16 bytes,
// so that the lanes of a warp that hold neighbouring pairs of tokens meet other banks.
template <class Stage>
__host__ __device__ constexpr int stage_stride(int dim) {
  return dim + 16 / static_cast<int>(sizeof(Stage));
}
__host__ __device__ constexpr int pairs_of(const OperandFormat& x, int tokens) {
  return x.bits == 16 ? 0 : tokens * x.dim / x.group;
}
template <class Stage>
int shared_bytes(const OperandFormat& x, int tokens) {
  return tokens * stage_stride<Stage>(x.dim) * static_cast<int>(sizeof(Stage)) + 8 * pairs_of(x, tokens);
}

__device__ inline int threads() { return static_cast<int>(blockDim.x); }

// What a CTA works on.
template <class Stage>
struct Tile {
  const WriteParams& params;
  const WriteOperand& x;
  const RowWrite& write;
  int row, head;
  int first;                   // the tile's first token; those below are relative to the row
  int begin, end;              // tokens that are quantized now or new
  int paged_begin, paged_end;  // tokens that become quantized
  int64_t page_head;           // of the page, in the axes [U, L, P, K]
  int in_page;                 // of the tile's first token
  Stage* stage;
  Affine* groups;
  int groups_a_token, channel_shift, token_shift;  // of groups of 1 << shift 32-channel blocks, or tokens

  // Token t of the tile, and whether it becomes quantized.
  __device__ const Stage* token(int t) const { return stage + t * stage_stride<Stage>(x.dim); }
  __device__ bool is_paged(int t) const { return first + t >= paged_begin && first + t < paged_end; }

  __device__ Affine& token_group(int t, int block) const {
    return groups[t * groups_a_token + (block >> channel_shift)];
  }
  __device__ Affine& channel_group(int t, int channel) const { return groups[(t >> token_shift) * x.dim + channel]; }
};

// Packs 4-byte word `at` of a 64-token tile whose token `half` is this tile's first.  Returns a bit for each byte whose
// token becomes quantized; the others are 0 in the word.
//
// Which group a code belongs to is said by its 32-channel block or by its word's first token, which it shares with its
// neighbours, so that the compiler reads a group once.
template <int kBits, bool kChannel, class Stage>
__device__ unsigned pack_keys(const Tile<Stage>& tile, CodeWord at, int half, uint32_t* word) {
  const int dim = tile.x.dim;
  unsigned there = 0;
  *word = 0;
  if (at.tail) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = at.token + key_byte_token(true, i) - half, channel = at.channel + key_byte_channel(true, i);
      if (!tile.is_paged(t)) continue;
      there |= 1u << i;
#pragma unroll
      for (int f = 0; f < 8 / kBits; ++f) {
        const int c = channel + key_field_channel(kBits, true, f);
        if (c >= dim) continue;  // padding
        const Affine group = kChannel ? tile.channel_group(t, c) : tile.token_group(t, at.channel / 32);
        *word |= code(to_float(tile.token(t)[c]), group, kBits) << (8 * i + kBits * f);
      }
    }
    return there;
  }
  const int t = at.token - half;
  if (!tile.is_paged(t)) return 0;
#pragma unroll
  for (int f = 0; f < 8 / kBits; ++f) {
    const int in_block = key_field_channel(kBits, false, f), channel = at.channel + in_block;
    if (channel >= dim) continue;
    float x[4];
    load4(tile.token(t) + channel, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Affine group =
          kChannel ? tile.channel_group(t, channel + i) : tile.token_group(t, at.channel / 32 + in_block / 32);
      *word |= code(x[i], group, kBits) << (8 * i + kBits * f);
    }
  }
  return 15;
}

template <int kBits, bool kChannel, class Stage>
__device__ unsigned pack_values(const Tile<Stage>& tile, CodeWord at, int half, uint32_t* word) {
  const int dim = tile.x.dim, first = at.token - half;
  unsigned there = 0;
  *word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int t = first + value_byte_token(i);
    if (!tile.is_paged(t)) continue;
    there |= 1u << i;
#pragma unroll
    for (int f = 0; f < 8 / kBits; ++f) {
      const int channel = at.channel + value_field_channel(at.tail, f);
      if (channel >= dim) continue;
      const Affine group =
          kChannel ? tile.channel_group(first, channel) : tile.token_group(t, at.channel / 32 + (at.tail ? 0 : f / 2));
      *word |= code(to_float(tile.token(t)[channel]), group, kBits) << (8 * i + kBits * f);
    }
  }
  return there;
}

template <int kBits, bool kValue, bool kChannel, class Stage>
__device__ void pack(const Tile<Stage>& tile) {
  const WriteOperand& x = tile.x;
  const int bytes = token_bytes(kBits, x.dim), half = tile.first % kTileTokens;
  uint8_t* codes =
      x.codes + tile.page_head * x.page_bytes(tile.params.page_size) + int64_t{tile.in_page - half} * bytes;
  for (int unit = threadIdx.x; unit < kTileTokens * bytes / 16; unit += threads()) {
    uint32_t words[4];
    unsigned there[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kValue) {
        there[w] = pack_values<kBits, kChannel>(tile, value_word(kBits, x.dim, 4 * unit + w), half, &words[w]);
      } else {
        there[w] = pack_keys<kBits, kChannel>(tile, key_word(kBits, x.dim, 4 * unit + w), half, &words[w]);
      }
    }
    if ((there[0] & there[1] & there[2] & there[3]) == 15) {
      reinterpret_cast<uint4*>(codes)[unit] = make_uint4(words[0], words[1], words[2], words[3]);
      continue;
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint8_t* to = codes + 16 * unit + 4 * w;
      if (there[w] == 15) {
        *reinterpret_cast<uint32_t*>(to) = words[w];
      } else {
        for (int i = 0; i < 4; ++i)
          if (there[w] >> i & 1) to[i] = static_cast<uint8_t>(words[w] >> 8 * i);
      }
    }
  }
}

// The range of values that `lanes` neighbouring lanes hold parts of.
__device__ inline Range join(Range range, int lanes) {
  for (int lane = 1; lane < lanes; lane *= 2)
    range.merge(__shfl_xor_sync(kAllLanes, range.low, lane), __shfl_xor_sync(kAllLanes, range.high, lane));
  return range;
}

template <class Stage>
__device__ void keep_pair(const Tile<Stage>& tile, int t, int channel, Range range) {
  const WriteOperand& x = tile.x;
  const int64_t page_pairs = tile.page_head * x.page_pairs(tile.params.page_size);
  const Pair pair = make_pair(range, x.bits, tile.params.param_dtype);
  store_pair(pair, tile.params.param_dtype, x.params, page_pairs + x.pair_index(tile.in_page + t, channel));
  (x.per_channel ? tile.channel_group(t, channel) : tile.token_group(t, channel / 32)) = pair.affine;
}

// Ranges per token: eight lanes take a token's group, a warp four tokens that lie two apart.
template <class Stage>
__device__ void token_ranges(const Tile<Stage>& tile, int tile_tokens) {
  const WriteOperand& x = tile.x;
  const int lane = threadIdx.x % 32, items = pairs_of(x, tile_tokens);
  for (int base = threadIdx.x / 32 * 4; base < items; base += threads() / 8) {
    const int token = base % tile_tokens, t = token / 8 * 8 + lane / 8 * 2 + token / 4 % 2;
    const bool there = tile.is_paged(t);
    if (!__any_sync(kAllLanes, there)) continue;
    const int channel = base / tile_tokens * x.group;
    Range range;
    if (there) {
      const Stage* from = tile.token(t) + channel;
      for (int i = lane % 8 * 2; i < x.group; i += 16) range.add(to_float(from[i])), range.add(to_float(from[i + 1]));
    }
    range = join(range, 8);
    if (there && lane % 8 == 0) keep_pair(tile, t, channel, range);
  }
}

// Ranges per channel: four lanes take two channels of a group of tokens, each the tokens of one lane of values.
template <class Stage>
__device__ void channel_ranges(const Tile<Stage>& tile, int tile_tokens) {
  const WriteOperand& x = tile.x;
  const int lane = threadIdx.x % 32, items = pairs_of(x, tile_tokens) / 2;
  for (int base = threadIdx.x / 32 * 8; base < items; base += threads() / 4) {
    const int item = base + lane / 4, channel = item % (x.dim / 2) * 2, group = item / (x.dim / 2) * x.group;
    Range low, high;
    for (int i = lane % 4 * 2; i < x.group; i += i % 2 == 0 ? 1 : 7) {
      const int t = group + i;
      if (!tile.is_paged(t)) continue;
      const Stage* from = tile.token(t) + channel;
      low.add(to_float(from[0])), high.add(to_float(from[1]));
    }
    low = join(low, 4), high = join(high, 4);
    const bool there = tile.first + group + x.group > tile.paged_begin && tile.first + group < tile.paged_end;
    if (there && lane % 4 < 2) keep_pair(tile, group, channel + lane % 4, lane % 4 == 0 ? low : high);
  }
}

// Steps 1 to 3.
template <bool kValue, class Stage>
__device__ void quantize(const Tile<Stage>& tile, int tile_tokens) {
  const WriteParams& p = tile.params;
  const WriteOperand& x = tile.x;
  const int chunks = x.dim / 8;
  for (int i = threadIdx.x; i < (tile.paged_end - tile.paged_begin) * chunks; i += threads()) {
    const int t = tile.paged_begin + i / chunks, channel = i % chunks * 8;
    const bool is_old = t < tile.write.start;
    const void* from = is_old ? x.exact : x.tokens;
    const int64_t at = (is_old ? p.exact_at(tile.row, tile.write, tile.head, p.windows.slot(t), x.dim)
                               : p.new_at(tile.row, tile.write, tile.head, t, x.dim)) +
                       channel;
    const DType dtype = is_old ? DType::kBF16 : x.token_dtype;
    if (x.bits == 16) {
      uint16_t* page = reinterpret_cast<uint16_t*>(x.codes) + tile.page_head * p.page_size * x.dim;
      copy8(page + (tile.in_page + t - tile.first) * x.dim + channel, from, at, dtype);
    } else {
      copy8(tile.stage + (t - tile.first) * stage_stride<Stage>(x.dim) + channel, from, at, dtype);
    }
  }
  if (x.bits == 16) return;
  __syncthreads();
  if (x.per_channel) {
    channel_ranges(tile, tile_tokens);
    __syncthreads();
    x.bits == 2 ? pack<2, kValue, true>(tile) : pack<4, kValue, true>(tile);
  } else {
    token_ranges(tile, tile_tokens);
    __syncthreads();
    x.bits == 2 ? pack<2, kValue, false>(tile) : pack<4, kValue, false>(tile);
  }
}

// Step 4, of sinks or of the ring: several loads of a thread are under way at once.
template <bool kSinks, class Stage>
__device__ __forceinline__ void keep_exact(const Tile<Stage>& tile) {
  constexpr int kAtOnce = 4, kLanes = 16;  // of a token
  const WriteParams& p = tile.params;
  const WriteOperand& x = tile.x;
  // Of slots that hold one of the tokens each, only those of new tokens change.
  const bool is_one = kSinks || tile.write.length - tile.write.first <= p.windows.ring;
  const int begin = is_one ? max(tile.begin, tile.write.start) : tile.begin;
  const int end = kSinks ? min(tile.end, p.windows.sink) : tile.end, rows = threads() / kLanes;
  const int turns = kSinks ? 0 : p.turns_to_newest(tile.write, begin);
  const int slot = kSinks ? begin : p.windows.sink + begin % p.windows.ring;
  uint16_t* const exact = x.exact + p.exact_at(tile.row, tile.write, tile.head, 0, x.dim);
  for (int channel = threadIdx.x % kLanes * 8; channel < x.dim; channel += kLanes * 8) {
    for (int base = threadIdx.x / kLanes; base < end - begin; base += kAtOnce * rows) {
      uint4 held[kAtOnce];
      uint4* to[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        to[i] = nullptr;
        const int at = base + i * rows;
        if (at >= end - begin) continue;
        const int token = kSinks ? begin + at : p.newest_in_slot(tile.write, begin + at, turns);
        if (token < 0) continue;
        const bool wraps = !kSinks && slot + at >= p.windows.sink + p.windows.ring;
        to[i] = reinterpret_cast<uint4*>(exact + (slot + at - (wraps ? p.windows.ring : 0)) * x.dim + channel);
        held[i] =
            load8_bf16(x.tokens, p.new_at(tile.row, tile.write, tile.head, token, x.dim) + channel, x.token_dtype);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (to[i] != nullptr) *to[i] = held[i];
    }
  }
}

template <whole::Kinds kKinds, class Stage>
__device__ __forceinline__ bool quantize_whole(const Tile<Stage>& tile, bool is_value) {
  if constexpr (kKinds == whole::Kinds::kNone) return false;
  const WriteParams& p = tile.params;
  const WriteOperand& x = tile.x;
  const bool is_whole = tile.paged_begin == tile.first && tile.paged_end == tile.first + kTileTokens;
  if (!is_whole || !whole::takes<kKinds>(p, x)) return false;
  const int num_old = kKinds == whole::Kinds::kPlain ? 0 : min(max(tile.write.start - tile.first, 0), kTileTokens);
  const uint16_t* old = nullptr;
  if (num_old > 0) {
    if (tile.first % p.windows.ring + num_old > p.windows.ring) return false;  // in two pieces
    old = x.exact + p.exact_at(tile.row, tile.write, tile.head, p.windows.slot(tile.first), x.dim);
  }
  const int64_t pairs =
      tile.page_head * x.page_pairs(p.page_size) + int64_t{tile.in_page / kTileTokens} * x.tile_pairs();
  // The tokens are under way before the page is looked at.
  const whole::Tile work = {
      static_cast<const uint16_t*>(x.tokens) + p.new_at(tile.row, tile.write, tile.head, tile.first, x.dim),
      old,
      p.num_kv_heads * x.dim,
      x.dim,
      num_old,
      x.group,
      tile.groups_a_token,
      tile.channel_shift,
      x.codes + tile.page_head * x.page_bytes(p.page_size) + int64_t{tile.in_page} * token_bytes(x.bits, x.dim),
      static_cast<uint32_t*>(x.params) + pairs,
      reinterpret_cast<float2*>(tile.groups),
      reinterpret_cast<uint16_t*>(tile.stage),
      stage_stride<Stage>(x.dim)};
  whole::start_loading(work);
  ptx::cp_async_wait<0>();
  __syncthreads();
  if (tile.page_head < 0) return true;
  x.bits == 2 ? whole::quantize<kKinds, 2>(work, is_value, x.per_channel)
              : whole::quantize<kKinds, 4>(work, is_value, x.per_channel);
  return true;
}

// The tile of `tile_tokens` tokens from `first` on, which lies before the row's end.
template <class Stage, whole::Kinds kKinds>
__device__ __forceinline__ void write_tile(const WriteParams& p, const RowWrite& write, int row, int head,
                                           bool is_value, int first, int tile_tokens, void* shared) {
  const WriteOperand& x = is_value ? p.value : p.key;
  const int begin = max(first, write.first), end = first + min(tile_tokens, write.length - first);
  const int paged_begin = max(begin, p.windows.sink), paged_end = min(end, write.last);
  const int number = first / p.page_size;
  const int64_t page = paged_begin < paged_end ? p.page(row, write.layer, number) : -1;
  const int64_t page_head = page < 0 ? -1 : page * p.num_kv_heads + head;
  Tile<Stage> tile = {p,     x,   write,       row,       head,      first,
                      begin, end, paged_begin, paged_end, page_head, first - number * p.page_size};
  tile.stage = static_cast<Stage*>(shared);
  tile.groups = reinterpret_cast<Affine*>(tile.stage + tile_tokens * stage_stride<Stage>(x.dim));
  tile.groups_a_token = x.tile_pairs() / kTileTokens;  // where they are of tokens
  tile.token_shift = __ffs(x.group) - 1;
  tile.channel_shift = x.group == x.dim ? 3 : __ffs(x.group) - 6;  // eight blocks are the largest head
  if (!quantize_whole<kKinds>(tile, is_value) && page >= 0) {
    if (is_value) {
      quantize<true>(tile, tile_tokens);
    } else {
      quantize<false>(tile, tile_tokens);
    }
  }
  if constexpr (kKinds == whole::Kinds::kPlain) return;
  const bool in_sinks = first < p.windows.sink, in_ring = first - write.first < p.windows.ring;
  if (x.exact == nullptr || !(in_sinks || in_ring)) return;
  __syncthreads();
  if (in_sinks) keep_exact<true>(tile);
  if (in_ring) keep_exact<false>(tile);
}

// Sets `overflowed` of a row; by one warp.
__device__ inline void check_pages(const WriteParams& p, const RowWrite& write, int row) {
  bool refused = write.refused;
  for (int i = p.first_page(write) + threadIdx.x % 32; !refused && i < p.end_page(write); i += 32)
    refused = p.page(row, write.layer, i) < 0;
  if (__any_sync(kAllLanes, refused) && threadIdx.x % 32 == 0) p.overflowed[row] = true;
}

}  // namespace jax_foscar::cuda
