// Writing new tokens into the cache: one launch, whatever the number of tokens.  A few go to write_few.cu.
//
// Grid: x = K or V and the KV head, y = row, z = as many tiles as a row's T tokens can touch: the first tiles of all
// rows come first, since they may have exact tokens to store as well.  Each CTA writes one tile, or leaves if that has
// nothing to do.  The first of a row also checks its page table.
//
// Compiled with -fmad=false -ftz=true: quantize.h says why.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "write.h"
#include "write_few.h"
#include "write_tile.cuh"

namespace jax_foscar::cuda {
namespace {

using whole::Kinds;

// Whole tiles are the work of two warps.
constexpr int threads_of(Kinds kinds) { return kinds == Kinds::kNone ? 128 : whole::kThreads; }
constexpr int ctas_of(Kinds kinds) { return kinds == Kinds::kNone ? 6 : 10; }

template <class Stage, Kinds kKinds>
__global__ void __launch_bounds__(threads_of(kKinds), ctas_of(kKinds))
    write_tokens(const __grid_constant__ WriteParams p, int tile_tokens) {
  extern __shared__ uint4 shared[];
  const int heads = p.num_kv_heads, row = blockIdx.y;
  const bool is_value = blockIdx.x >= heads;
  const RowWrite write = p.plan(row);
  if (blockIdx.x == 0 && blockIdx.z == 0 && threadIdx.x < 32) check_pages(p, write, row);
  if constexpr (kKinds != Kinds::kNone) tile_tokens = kTileTokens;
  const int start = write.first & -tile_tokens, skipped = blockIdx.z * tile_tokens;
  if (skipped >= write.length - start) return;
  const int head = is_value ? blockIdx.x - heads : blockIdx.x;
  write_tile<Stage, kKinds>(p, write, row, head, is_value, start + skipped, tile_tokens, shared);
}

template <class Stage, Kinds kKinds>
const char* launch(const WriteParams& p, int tile_tokens, CUstream_st* stream) {
  // Tokens [first, length) of a row: the T new ones and, in the ring, up to recent + group - 1 older ones; first is a
  // multiple of the group and so at most tile - group tokens into its tile.
  const int64_t tiles = (int64_t{tile_tokens} + p.windows.recent + p.num_tokens - 2) / tile_tokens + 1;
  constexpr int kMost = 65535;  // of a grid's y and z
  if (tiles > kMost || p.batch > kMost) return "jax_foscar write: too many rows or tokens for one launch";
  const dim3 grid(2 * p.num_kv_heads, p.batch, static_cast<unsigned>(tiles));
  const int shared = std::max(shared_bytes<Stage>(p.key, tile_tokens), shared_bytes<Stage>(p.value, tile_tokens));
  write_tokens<Stage, kKinds><<<grid, threads_of(kKinds), shared, stream>>>(p, tile_tokens);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

bool misaligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 != 0; }

}  // namespace

const char* write(const WriteParams& p, CUstream_st* stream) {
  if (p.batch <= 0 || p.num_tokens <= 0 || p.num_kv_heads <= 0) return nullptr;
  bool half = true;
  for (const WriteOperand* x : {&p.key, &p.value}) {
    if (misaligned(x->codes) || misaligned(x->params) || misaligned(x->exact) || misaligned(x->tokens))
      return "jax_foscar write: k, v and the cache's arrays must be 16-byte aligned";
    half &= x->exact != nullptr || x->token_dtype == DType::kBF16;
  }
  if (p.num_tokens <= kFewTokens) return write_few(p, stream);
  if (!half) return launch<float, Kinds::kNone>(p, 32, stream);
  if (p.num_tokens < kTileTokens) return launch<uint16_t, Kinds::kNone>(p, std::max(p.windows.group, 32), stream);
  if (p.key.exact != nullptr) return launch<uint16_t, Kinds::kAny>(p, kTileTokens, stream);
  return launch<uint16_t, Kinds::kPlain>(p, kTileTokens, stream);
}

}  // namespace jax_foscar::cuda
