// The portable kernel: dequantize, then FMA, all in f32.  The correctness anchor of the faster ones.
//
// Grid: x = (row * K + KV head) * blocks + block, where a block is up to kRows of the T * N / K query rows of one KV
// head. Each CTA checks its row's page table, then its 8 warps stride over the row's tiles: 64 paged tokens, or 64
// slots of the exact arrays.  A warp scores a tile with one token a lane (twice), runs the online softmax, and adds the
// tile's values with one channel a lane (dim / 32 times); the warps' states merge in shared memory, in warp order.
//
// Not handled: head dims above 256 or not a multiple of 16; per-token groups not a multiple of 4, per-channel groups
// not a multiple of 16; splitting one long row over CTAs.
#include <cuda_runtime.h>

#include <cstdint>

#include "decode_generic.h"
#include "generic_tile.cuh"
#include "ptx.cuh"
#include "sinks.h"

namespace jax_foscar::cuda {
namespace {

constexpr int kWarps = 8;

template <int kRows>
struct Shared {
  alignas(16) float rows[kRows][kMaxDim];  // the queries, then the merged outputs
  alignas(16) float p[kWarps][kTileTokens][kRows];
  Visible visible[kRows];
  bool finite[kRows];
  float max[kWarps][kRows], sum[kWarps][kRows];
};

__device__ float warp_max(float x) {
  for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, lane));
  return x;
}

__device__ float warp_sum(float x) {
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(kAllLanes, x, lane);
  return x;
}

// What exponents are taken relative to: -inf - -inf would be NaN.
__device__ float exp_base(float max) { return max == -INFINITY ? 0.0f : max; }

// Tile `index` of the pages of one row and KV head, and the exact slots from 64 * index.
__device__ Tile paged_tile(const DecodeParams& params, const OperandParams& operand, int64_t page_head, int index) {
  const int first = index * kTileTokens % params.page_size;
  const uint8_t* codes =
      operand.codes + page_head * operand.page_bytes(params.page_size) + first * token_bytes(operand.bits, operand.dim);
  if (operand.bits == 16) return {codes, nullptr, first, kTileTokens};
  const int64_t pair_bytes = params.param_dtype == DType::kF32 ? 8 : 4;
  const void* pairs =
      static_cast<const uint8_t*>(operand.params) + page_head * operand.page_pairs(params.page_size) * pair_bytes;
  return {codes, pairs, first, kTileTokens};
}

__device__ Tile exact_tile(const DecodeParams& params, const OperandParams& operand, int64_t exact_head, int index) {
  const int slots = params.windows.sink + params.windows.ring;
  const uint16_t* rows = operand.exact + (exact_head * slots + index * kTileTokens) * operand.dim;
  return {reinterpret_cast<const uint8_t*>(rows), nullptr, 0, min(kTileTokens, slots - index * kTileTokens)};
}

// The token below n that an exact slot holds, or -1.
__device__ int slot_token(const Windows& windows, int slot, int n) {
  if (slot < windows.sink) return slot;
  if (slot >= windows.sink + windows.ring) return -1;
  const int last = n - 1;
  const int age = last % windows.ring - (slot - windows.sink);
  const int token = last - (age < 0 ? age + windows.ring : age);
  return token < windows.sink ? -1 : token;
}

// A score, scaled and capped.
__device__ float logit(const DecodeParams& params, float score) {
  const float x = score * params.scale, cap = params.features.soft_cap;
  return cap == 0.0f ? x : cap * tanhf(x / cap);
}

template <int kRows>
__global__ void __launch_bounds__(32 * kWarps, 2)
    decode_generic(const __grid_constant__ DecodeParams params, int blocks) {
  __shared__ Shared<kRows> shared;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int kv_heads = params.num_kv_heads, ratio = params.num_heads / kv_heads;
  const int block = blockIdx.x % blocks, kv_head = blockIdx.x / blocks % kv_heads, row = blockIdx.x / blocks / kv_heads;
  const Windows& windows = params.windows;
  const Features& features = params.features;
  const RowQueries queries = params.row_queries(row);
  const int n = queries.length;
  const int layer = params.layer[params.row_entry(row, params.layer_rows)];
  const int32_t* table = params.page_table + int64_t{params.row_entry(row, params.table_rows)} * params.table_width;

  // Query row i of the block is head i % ratio of the KV head's, at query i / ratio.
  const auto result_index = [&](int r) {
    const int i = block * kRows + r;
    return (int64_t{row} * params.num_queries + i / ratio) * params.num_heads + kv_head * ratio + i % ratio;
  };
  const int rows = min(kRows, params.num_queries * ratio - block * kRows);
  const auto query_of = [&](int r) { return (block * kRows + r) / ratio; };
  // Rows past it are padding, or none at all; what stands in q there is not read.
  const int real_rows = min(rows, queries.count * ratio - block * kRows);

  // A row whose cache cannot be read is NaN as a whole.
  bool bad = n > int64_t{params.table_width} * params.page_size || layer < 0 || layer >= params.layers;
  const int quantized = windows.quantized_length(n), first_paged = max(windows.sink, first_visible(features, queries));
  if (!bad && quantized > first_paged) {
    const int last = (quantized - 1) / params.page_size;
    for (int i = first_paged / params.page_size + threadIdx.x; i <= last; i += 32 * kWarps)
      bad |= params.page_index(row, layer, table[i]) < 0;
  }
  bad = __syncthreads_or(bad);

  for (int r = warp; r < kRows; r += kWarps) {
    bool finite = true;
    for (int d = lane; d < params.key.dim; d += 32) {
      const float x = r < real_rows ? load_float(params.q, params.q_dtype, result_index(r) * params.key.dim + d) : 0.0f;
      finite &= isfinite(x);
      shared.rows[r][d] = x;
    }
    finite = __all_sync(kAllLanes, finite);
    if (lane == 0) {
      shared.visible[r] = r < real_rows ? visible(features, windows, queries, query_of(r)) : Visible{};
      shared.finite[r] = finite && !bad;
    }
  }
  __syncthreads();

  int begin = n, end = 0;  // of the paged tokens that any query row sees
  for (int r = 0; r < kRows; ++r) {
    const Visible& v = shared.visible[r];
    begin = min(begin, v.begin < v.end ? max(v.begin, windows.sink) : n), end = max(end, min(v.boundary, v.end));
  }
  const int first_tile = begin / kTileTokens;
  const int paged_end = end > begin ? (end - 1) / kTileTokens + 1 : first_tile;
  const int exact_tiles = windows.ring > 0 ? (windows.sink + windows.ring + kTileTokens - 1) / kTileTokens : 0;
  const int64_t exact_head =
      (int64_t{params.row_entry(row, params.exact_rows)} * params.layers + layer) * kv_heads + kv_head;

  float m[kRows], l[kRows] = {};
  float o[kChannels][kRows] = {};  // local memory, as a variable indexes it; used once a tile, which hardly costs
#pragma unroll
  for (int r = 0; r < kRows; ++r) m[r] = -INFINITY;

  for (int i = first_tile + warp; !bad && i < paged_end + exact_tiles; i += kWarps) {
    const bool exact = i >= paged_end;
    bool any = false;
    unsigned sees[2] = {0, 0};  // bit r: query row r sees the lane's token
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int t = lane + 32 * h + (exact ? i - paged_end : i) * kTileTokens;
      const int token = exact ? slot_token(windows, t, n) : t;
      for (int r = 0; r < kRows; ++r) {
        const Visible& v = shared.visible[r];
        const bool seen = exact ? token >= 0 && v.sees_exact(token, windows.sink) : v.sees_paged(token, windows.sink);
        sees[h] |= static_cast<unsigned>(seen) << r;
      }
      any |= sees[h] != 0;
    }
    if (!__any_sync(kAllLanes, any)) continue;

    Tile key, value;
    if (exact) {
      key = exact_tile(params, params.key, exact_head, i - paged_end);
      value = exact_tile(params, params.value, exact_head, i - paged_end);
    } else {
      const int id = table[i * kTileTokens / params.page_size];
      const int64_t page_head = params.page_index(row, layer, id) * kv_heads + kv_head;
      key = paged_tile(params, params.key, page_head, i);
      value = paged_tile(params, params.value, page_head, i);
    }

    float s[2][kRows] = {};
    switch (exact ? 16 : params.key.bits) {
      case 2: score<2>(params.key, params.param_dtype, key, shared.rows, lane, s); break;
      case 4: score<4>(params.key, params.param_dtype, key, shared.rows, lane, s); break;
      case 16: score<16>(params.key, params.param_dtype, key, shared.rows, lane, s); break;
    }

    float alpha[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool see0 = sees[0] >> r & 1, see1 = sees[1] >> r & 1;
      const float x0 = see0 ? logit(params, s[0][r]) : -INFINITY;
      const float x1 = see1 ? logit(params, s[1][r]) : -INFINITY;
      const float max = fmaxf(m[r], warp_max(fmaxf(x0, x1)));
      const float p0 = see0 ? expf(x0 - exp_base(max)) : -0.0f;
      const float p1 = see1 ? expf(x1 - exp_base(max)) : -0.0f;
      alpha[r] = expf(m[r] - exp_base(max));
      m[r] = max;
      l[r] = fmaf(l[r], alpha[r], p0 + p1);
      shared.p[warp][lane][r] = p0;
      shared.p[warp][lane + 32][r] = p1;
    }
    __syncwarp();
    switch (exact ? 16 : params.value.bits) {
      case 2: accumulate<2>(params.value, params.param_dtype, value, shared.p[warp], alpha, lane, o); break;
      case 4: accumulate<4>(params.value, params.param_dtype, value, shared.p[warp], alpha, lane, o); break;
      case 16: accumulate<16>(params.value, params.param_dtype, value, shared.p[warp], alpha, lane, o); break;
    }
    __syncwarp();
  }

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    l[r] = warp_sum(l[r]);
    if (lane == 0) shared.max[warp][r] = m[r], shared.sum[warp][r] = l[r];
  }
  __syncthreads();

  const auto row_max = [&](int r) {
    float max = shared.max[0][r];
    for (int w = 1; w < kWarps; ++w) max = fmaxf(max, shared.max[w][r]);
    return max;
  };
  for (int w = 0; w < kWarps; ++w) {
    if (warp == w) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float weight = expf(m[r] - exp_base(row_max(r)));
        for (int d = lane; d < params.value.dim; d += 32)
          shared.rows[r][d] = fmaf(o[d / 32][r], weight, w == 0 ? 0.0f : shared.rows[r][d]);
      }
    }
    __syncthreads();
  }

  for (int r = warp; r < rows; r += kWarps) {
    float max = row_max(r), sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum = fmaf(shared.sum[w][r], expf(shared.max[w][r] - exp_base(max)), sum);
    const bool real = r < real_rows;
    float factor = 1.0f;
    if (real && features.sinks != nullptr)
      factor =
          join_sink(params.sink(row, result_index(r) % params.num_heads), &max, &sum, [](float x) { return expf(x); });
    const bool empty = sum == 0.0f;
    // Added, so that it turns a result into NaN or leaves it.
    const float fill = !real || shared.finite[r] ? 0.0f : NAN;
    for (int d = lane; d < params.value.dim; d += 32) {
      const float x = (empty ? 0.0f : shared.rows[r][d] * factor / sum) + fill;
      store_float(params.out, params.q_dtype, result_index(r) * params.value.dim + d, x);
    }
    if (lane == 0) params.lse[result_index(r)] = (empty ? -INFINITY : max + logf(sum)) + fill;
  }
}

template <int kRows>
const char* launch(const DecodeParams& params, CUstream_st* stream) {
  const int64_t query_rows = int64_t{params.num_queries} * (params.num_heads / params.num_kv_heads);
  const int64_t blocks = (query_rows + kRows - 1) / kRows;
  const int64_t grid = int64_t{params.batch} * params.num_kv_heads * blocks;
  if (grid > INT32_MAX) return "jax_foscar decode_attention: too many query rows for one launch";
  decode_generic<kRows><<<static_cast<unsigned>(grid), 32 * kWarps, 0, stream>>>(params, static_cast<int>(blocks));
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* refuse_decode_generic(const DecodeParams& params) {
  for (const OperandParams* operand : {&params.key, &params.value}) {
    if (operand->dim <= 0 || operand->dim > kMaxDim || operand->dim % 16 != 0)
      return "jax_foscar decode_attention: head dims must be multiples of 16, up to 256";
    if (operand->bits != 2 && operand->bits != 4 && operand->bits != 16)
      return "jax_foscar decode_attention: bits must be 2, 4 or 16";
    if (operand->bits != 16 && operand->group % (operand->per_channel ? 16 : 4) != 0)
      return "jax_foscar decode_attention: groups must be multiples of 4 channels or 16 tokens";
  }
  return nullptr;
}

const char* launch_decode_generic(const DecodeParams& params, CUstream_st* stream) {
  const int64_t query_rows = int64_t{params.num_queries} * (params.num_heads / params.num_kv_heads);
  if (query_rows <= 1) return launch<1>(params, stream);
  if (query_rows <= 4) return launch<4>(params, stream);
  return launch<8>(params, stream);
}

}  // namespace jax_foscar::cuda
