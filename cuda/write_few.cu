// Writing a few new tokens a row, one of them a decode step's: a warp a row, KV head and K or V, in registers.
//
// Grid: x = row, y = K or V and the KV head, a few to a CTA, z = the new token where tokens need no order; those of a
// format with exact tokens are one warp's, which quantizes before it overwrites the ring's slots.  Where tokens become
// quantized in groups, the rare step that completes one is done by the whole CTA, tile by tile: so it is as large as
// whole tiles want it.
//
// Compiled with -fmad=false -ftz=true: quantize.h says why.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "write_few.h"
#include "write_tile.cuh"

namespace jax_foscar::cuda {
namespace {

constexpr int warps_of(bool exact) { return exact ? whole::kThreads / 32 : 4; }

// A lane's channels of one token: 4 lane + i, and 128 + 4 lane + i in larger heads.
constexpr int kParts = 2;
struct Token {
  float x[kParts][4];
};

// What a warp works on.
struct Head {
  const WriteParams& params;
  const WriteOperand& x;
  const RowWrite& write;
  int row, head, lane;

  __device__ int channel(int part) const { return 128 * part + 4 * lane; }
};

__device__ void load4(const void* from, int64_t at, DType dtype, float (&x)[4]) {
  if (dtype == DType::kF32) {
    jax_foscar::cuda::load4(static_cast<const float*>(from) + at, x);
  } else if (dtype == DType::kBF16) {
    jax_foscar::cuda::load4(static_cast<const uint16_t*>(from) + at, x);
  } else {
    const uint2 pairs = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(from) + at);
    x[0] = f16_to_float(pairs.x & 0xffff), x[1] = f16_to_float(pairs.x >> 16);
    x[2] = f16_to_float(pairs.y & 0xffff), x[3] = f16_to_float(pairs.y >> 16);
  }
}

__device__ void store4(uint16_t* to, const float (&x)[4]) {
  uint2 pairs;
  pairs.x = float_to_bf16(x[0]) | uint32_t{float_to_bf16(x[1])} << 16;
  pairs.y = float_to_bf16(x[2]) | uint32_t{float_to_bf16(x[3])} << 16;
  *reinterpret_cast<uint2*>(to) = pairs;
}

__device__ Token load(const WriteOperand& x, const void* from, int64_t at, DType dtype, int lane) {
  Token token = {};
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    if (128 * part + 4 * lane < x.dim) load4(from, at + 128 * part + 4 * lane, dtype, token.x[part]);
  return token;
}

// Token `index` of the new ones.  Formats with exact tokens know bfloat16 alone.
__device__ Token load_new(const WriteParams& p, const WriteOperand& x, int row, int head, int index, int lane) {
  const int64_t at = ((int64_t{row} * p.num_tokens + index) * p.num_kv_heads + head) * x.dim;
  Token token = load(x, x.tokens, at, x.token_dtype, lane);
  if (x.exact != nullptr && x.token_dtype != DType::kBF16) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (float& value : token.x[part]) value = bf16_to_float(float_to_bf16(value));
  }
  return token;
}

// Codes of a token: fields of a byte are `step` and 2 * step lanes apart; each lane then has four bytes.
template <int kBits, bool kValue>
__device__ void store_codes(const Head& work, uint8_t* page, int in_page, int channel, const float (&x)[4],
                            Affine group) {
  constexpr int kFields = 8 / kBits;
  const int dim = work.x.dim;
  const bool tail = channel / (128 / kBits) == num_blocks(kBits, dim);
  const CodeAddress at =
      kValue ? value_address(kBits, dim, in_page, channel) : key_address(kBits, dim, in_page, channel);
  uint32_t word = 0;
  if (channel < dim) {
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= code(x[i], group, kBits) << (8 * i);
  }
  word <<= at.shift;
  const int step = tail ? 2 : 4;
  word |= __shfl_sync(kAllLanes, word, work.lane ^ step);
  if constexpr (kBits == 2) word |= __shfl_sync(kAllLanes, word, work.lane ^ 2 * step);
  if (channel >= padded_dim(dim)) return;
  const int share = work.lane / step % kFields;
  if (!kValue && !tail) {
    if (share == 0) *reinterpret_cast<uint32_t*>(page + at.byte) = word;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i % kFields != share) continue;
    const int apart = kValue ? (tail ? 32 : 64) * i : i / 2 * 16 + i % 2;
    page[at.byte + apart] = static_cast<uint8_t>(word >> 8 * i);
  }
}

__device__ Range range_of(const float (&x)[4]) {
  Range range;
#pragma unroll
  for (float value : x) range.add(value);
  return range;
}

// A token into its page, per token.
template <int kBits, bool kValue>
__device__ void quantize_token(const Head& work, int64_t page_head, int in_page, const Token& token) {
  const WriteParams& p = work.params;
  const WriteOperand& x = work.x;
  const bool is_whole = x.group == x.dim;
  const int shift = __ffs(x.group) - 1, groups = is_whole ? 1 : x.dim >> shift;
  Range ranges[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    if (work.channel(part) < x.dim) ranges[part] = range_of(token.x[part]);
  if (is_whole) {
    ranges[0].merge(ranges[1].low, ranges[1].high);
    ranges[0] = ranges[1] = join(ranges[0], 32);
  } else {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      if (128 * part < x.dim) ranges[part] = join(ranges[part], x.group / 4);
  }
  uint8_t* page = x.codes + page_head * x.page_bytes(p.page_size);
  const int64_t first_pair = (page_head * p.page_size + in_page) * groups;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (128 * part >= x.dim) break;
    const int channel = work.channel(part), group = is_whole ? 0 : channel >> shift;
    const Pair pair = make_pair(ranges[part], kBits, p.param_dtype);
    const bool is_first = is_whole ? channel == 0 : channel < x.dim && channel == group << shift;
    if (is_first) store_pair(pair, p.param_dtype, x.params, first_pair + group);
    store_codes<kBits, kValue>(work, page, in_page, channel, token.x[part], pair.affine);
  }
}

__device__ void store_token(const Head& work, bool is_value, int t, const Token& token) {
  const WriteParams& p = work.params;
  const WriteOperand& x = work.x;
  const int64_t page = p.page(work.row, work.write.layer, t / p.page_size);
  if (page < 0) return;
  const int64_t page_head = page * p.num_kv_heads + work.head;
  const int in_page = t % p.page_size;
  if (x.bits == 16) {
    uint16_t* to = reinterpret_cast<uint16_t*>(x.codes) + (page_head * p.page_size + in_page) * x.dim;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      if (work.channel(part) < x.dim) store4(to + work.channel(part), token.x[part]);
  } else if (x.bits == 2) {
    is_value ? quantize_token<2, true>(work, page_head, in_page, token)
             : quantize_token<2, false>(work, page_head, in_page, token);
  } else {
    is_value ? quantize_token<4, true>(work, page_head, in_page, token)
             : quantize_token<4, false>(work, page_head, in_page, token);
  }
}

// What becomes quantized in groups of tokens, and the newest tokens: a CTA's heads one after the other.
__device__ __noinline__ void write_groups(const WriteParams& p, const RowWrite& write, int tile_tokens, void* shared) {
  constexpr int kWarps = warps_of(true);
  const int heads = p.num_kv_heads, begin = blockIdx.y * kWarps, end = min(begin + kWarps, 2 * heads);
  for (int i = begin; i < end; ++i) {
    const int start = write.first & -tile_tokens;
    for (int skipped = 0; skipped < write.length - start; skipped += tile_tokens) {
      write_tile<uint16_t, whole::Kinds::kAny>(p, write, blockIdx.x, i < heads ? i : i - heads, i >= heads,
                                               start + skipped, tile_tokens, shared);
      __syncthreads();
    }
  }
}

// kExact: the format has exact tokens.
template <bool kExact>
__global__ void __launch_bounds__(32 * warps_of(kExact), 8)
    write_few_tokens(const __grid_constant__ WriteParams p, int tile_tokens) {
  extern __shared__ uint4 shared[];
  const int heads = p.num_kv_heads, row = blockIdx.x, lane = threadIdx.x % 32;
  const int index = blockIdx.y * warps_of(kExact) + threadIdx.x / 32;
  const bool is_there = index < 2 * heads, is_value = index >= heads;
  const int head = is_value ? index - heads : index;
  const WriteOperand& x = is_value ? p.value : p.key;
  // Before it is known what becomes of it: all that a decode step has.
  Token first_new = {};
  if (is_there) first_new = load_new(p, x, row, head, blockIdx.z, lane);

  const RowWrite write = p.plan(row);
  if (index == 0 && blockIdx.z == 0) check_pages(p, write, row);
  if constexpr (kExact) {
    if (p.windows.group > 1 && write.first < write.last) return write_groups(p, write, tile_tokens, shared);
  }
  if (!is_there) return;

  const Head work = {p, x, write, row, head, lane};
  const int step = gridDim.z;
  for (int t = p.first_paged(write) + blockIdx.z; t < write.last; t += step) {
    Token token = first_new;
    if (kExact && t < write.start) {
      token = load(x, x.exact, p.exact_at(row, write, head, p.windows.slot(t), x.dim), DType::kBF16, lane);
    } else if (t - write.start != blockIdx.z) {
      token = load_new(p, x, row, head, t - write.start, lane);
    }
    store_token(work, is_value, t, token);
  }
  if constexpr (!kExact) return;
  // The newest of each slot.
  for (int t = write.start; t < write.length; ++t) {
    if (t >= p.windows.sink && write.length - t > p.windows.ring) continue;
    Token token = first_new;
    if (t != write.start) token = load_new(p, x, row, head, t - write.start, lane);
    uint16_t* to = x.exact + p.exact_at(row, write, head, p.windows.slot(t), x.dim);
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      if (work.channel(part) < x.dim) store4(to + work.channel(part), token.x[part]);
  }
}

}  // namespace

const char* write_few(const WriteParams& p, CUstream_st* stream) {
  const int tile_tokens = std::max(p.windows.group, 32);
  const bool exact = p.key.exact != nullptr;
  const int warps = warps_of(exact);
  const dim3 grid(p.batch, (2 * p.num_kv_heads + warps - 1) / warps, exact ? 1 : p.num_tokens);
  int shared = 0;
  if (p.windows.group > 1)
    shared = std::max(shared_bytes<uint16_t>(p.key, tile_tokens), shared_bytes<uint16_t>(p.value, tile_tokens));
  const auto kernel = exact ? write_few_tokens<true> : write_few_tokens<false>;
  kernel<<<grid, 32 * warps, shared, stream>>>(p, tile_tokens);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace jax_foscar::cuda
