// Grid, where query rows of [B, T, N] are few: a CTA each, whose warps share the row's pieces.  Else a warp each, which
// merges the pieces if they are few, then CTAs for rows of many.  Which rows those are only the device knows: an item
// that more than kFewPieces workers share has ranges of work that begin in it, one of them with a number that is a
// multiple of kFewPieces, so that those ranges have CTAs that look for one.  A lane has 4 or 8 channels.  The order of
// a sum is always the same.  Items that one worker had to itself are already written, except for rows without any
// token.
#include <cuda_runtime.h>

#include <type_traits>

#include "combine.h"
#include "launch_overlap.h"
#include "ptx.cuh"
#include "results.cuh"
#include "schedule.cuh"
#include "workspace.h"

namespace jax_foscar::cuda {
namespace {

constexpr int kFewPieces = 8;  // that a warp has under way at once, or half of them where outputs are wide
constexpr int kFewRows = 256;  // that are all resident at once with a CTA each

// Of a CTA: one with a row of its own, or another.
constexpr int warps_of(bool own) { return own ? 16 : 4; }

__device__ float load_query(const DecodeParams& params, int64_t i) {
  if (params.q_dtype == DType::kF32) return static_cast<const float*>(params.q)[i];
  if (params.q_dtype == DType::kF16) return __half2float(static_cast<const __half*>(params.q)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(params.q)[i]);
}

// A row without tokens gives 0 and the sink, or -inf; one that cannot be read, or a query that is not finite, NaN.
__device__ void write_empty(const DecodeParams& params, int64_t index, bool bad, int lane) {
  float max = -INFINITY, sum = 0.0f;
  normalize(params, index, &max, &sum);
  bad |= isnan(sum);
  for (int d = lane; d < params.key.dim; d += 32) bad |= !isfinite(load_query(params, index * params.key.dim + d));
  bad = __any_sync(kAllLanes, bad);
  for (int d = lane; d < params.value.dim; d += 32)
    store_output(params, index * params.value.dim + d, bad ? NAN : 0.0f);
  if (lane == 0) params.lse[index] = bad ? NAN : natural_lse(max, sum);
}

__device__ void write_padding(const DecodeParams& params, int64_t index, int lane) {
  for (int d = lane; d < params.value.dim; d += 32) store_output(params, index * params.value.dim + d, 0.0f);
  if (lane == 0) params.lse[index] = -INFINITY;
}

// What the decode kernel left, and its `ranges` of work a KV head; an item is `rows` query rows, one of a KV head's
// `blocks`.
struct Left {
  const int* row_start;
  const float* pieces;
  int ranges, rows, blocks;
};

// The ranges that share an item; none where the row has no work.
struct Sharers {
  int first = 0, count = 0;

  // Of the units begin .. begin + units - 1.
  __device__ __forceinline__ Sharers(const Cut& cut, int begin, int units) {
    if (units == 0) return;
    first = cut.owner(begin), count = cut.owner(begin + units - 1) - first + 1;
  }
};

// The pieces of one query row.
struct Pieces {
  int64_t index = -1;  // in [B, T, N]
  int count = 0;
  const float* outputs = nullptr;  // of the first piece
  int to_maximum = 0, to_sum = 0;  // from its outputs, in floats
  int64_t second = 0, next = 0;    // from the first piece to the second, from there on to the next

  Pieces() = default;
  __device__ __forceinline__ Pieces(const DecodeParams& params, const Left& left, const Sharers& sharers, int64_t index,
                                    int kv_head, int in_item)
      : index(index), count(sharers.count) {
    const int64_t piece = piece_floats(left.rows, params.value.dim);
    next = int64_t{2} * params.num_kv_heads * piece, second = next - piece;  // slot 1 of the first range, then slots 0
    outputs = left.pieces + sharers.first * next + (2 * kv_head + 1) * piece + in_item * params.value.dim;
    to_maximum = (left.rows - in_item) * params.value.dim + in_item, to_sum = to_maximum + left.rows;
  }
  __device__ __forceinline__ const float* piece(int i) const {
    return outputs + (i == 0 ? 0 : second + (i - 1) * next);
  }
};

// A query row, and what is known of it before the decode kernel has ended.
struct QueryRow {
  int64_t index;  // in [B, T, N]
  int row, kv_head, block, in_item;
  bool there, real;  // in the batch; not padding

  __device__ __forceinline__ QueryRow(const DecodeParams& params, const Left& left, int64_t index) : index(index) {
    const int ratio = params.num_heads / params.num_kv_heads, head = index % params.num_heads;
    const int in_batch = index / params.num_heads, query = in_batch % params.num_queries;
    const int in_kv_head = query * ratio + head % ratio;
    row = in_batch / params.num_queries, kv_head = head / ratio;
    block = in_kv_head / left.rows, in_item = in_kv_head % left.rows;
    there = row < params.batch, real = there && query < params.row_queries(row).count;
  }
};

// Of a query row, if they are at most `most`; writes a row that has none.
__device__ __forceinline__ Pieces find_own(const DecodeParams& params, const Left& left, const QueryRow& query_row,
                                           int most, int lane) {
  if (!query_row.there) return {};
  if (!query_row.real) {
    write_padding(params, query_row.index, lane);
    return {};
  }
  const int row = query_row.row;
  const int before = left.row_start[row], units = left.row_start[row + 1] - before;
  const Cut cut(left.row_start[params.batch] * left.blocks, left.ranges);
  const Sharers sharers(cut, before * left.blocks + query_row.block * units, units);
  if (sharers.count == 0) write_empty(params, query_row.index, row_work(params, row).bad, lane);
  if (sharers.count <= 1 || sharers.count > most) return {};
  return Pieces(params, left, sharers, query_row.index, query_row.kv_head, query_row.in_item);
}

// Of row `in_item` of the item that range `range` begins in, if they are many and this is the first such range.
__device__ __forceinline__ Pieces find_many(const DecodeParams& params, const Left& left, int range, int kv_head,
                                            int in_item) {
  struct Found {
    int row, before, units;
  };
  __shared__ Found found;
  const Cut cut(left.row_start[params.batch] * left.blocks, left.ranges);
  if (cut.count(range) == 0) return {};
  const int unit = cut.begin(range);
  for (int row = threadIdx.x; row < params.batch; row += blockDim.x) {
    const int before = left.row_start[row] * left.blocks, after = left.row_start[row + 1] * left.blocks;
    if (before <= unit && unit < after) found = {row, before, (after - before) / left.blocks};
  }
  __syncthreads();
  const auto [row, before, units] = found;
  const int block = (unit - before) / units;
  const Sharers sharers(cut, before + block * units, units);
  const int after_first = range - sharers.first;
  if (sharers.count <= kFewPieces || after_first < 1 || after_first > kFewPieces) return {};
  const int ratio = params.num_heads / params.num_kv_heads, in_kv_head = block * left.rows + in_item;
  const int query = in_kv_head / ratio;
  if (query >= params.row_queries(row).count) return {};  // padding, or past the last
  const int64_t index =
      (int64_t{row} * params.num_queries + query) * params.num_heads + kv_head * ratio + in_kv_head % ratio;
  return Pieces(params, left, sharers, index, kv_head, in_item);
}

// 2^(from - to), where `to` is at least `from`; 1 where nothing was seen.
__device__ __forceinline__ float scale_to(float from, float to) { return to == -INFINITY ? 1.0f : exp2f(from - to); }

// A softmax over some pieces of a row: base-2 maximum, sum, and weighted outputs of kQuads times 4 channels a lane.
template <int kQuads>
struct Merged {
  float max = -INFINITY, sum = 0.0f;
  float4 outputs[kQuads] = {};

  template <int kCount>
  __device__ __forceinline__ void add(const float (&maxs)[kCount], const float (&sums)[kCount],
                                      const float4 (&others)[kCount][kQuads]) {
    float next = max;
#pragma unroll
    for (int j = 0; j < kCount; ++j) next = fmaxf(next, maxs[j]);
    const float factor = scale_to(max, next);
    max = next, sum *= factor;
#pragma unroll
    for (float4& x : outputs) x.x *= factor, x.y *= factor, x.z *= factor, x.w *= factor;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float weight = scale_to(maxs[j], next);
      sum = fmaf(weight, sums[j], sum);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const float4& y = others[j][quad];
        float4& x = outputs[quad];
        x.x = fmaf(weight, y.x, x.x), x.y = fmaf(weight, y.y, x.y);
        x.z = fmaf(weight, y.z, x.z), x.w = fmaf(weight, y.w, x.w);
      }
    }
  }
};

__device__ __forceinline__ bool has_channels(const DecodeParams& params, int quad, int lane) {
  return 4 * (32 * quad + lane) < params.value.dim;
}

// Every `step`-th piece from `first` on; where there is none, nothing is loaded, but the code has run.
template <int kQuads>
__device__ __forceinline__ Merged<kQuads> merge(const DecodeParams& params, const Pieces& pieces, int first, int step,
                                                int lane) {
  constexpr int kCount = kFewPieces / kQuads;
  Merged<kQuads> merged;
#pragma unroll 1
  do {
    float maxs[kCount], sums[kCount];
    float4 outputs[kCount][kQuads];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int i = first + step * j;
      const bool there = i < pieces.count;
      const float* const piece = pieces.piece(i);
      maxs[j] = there ? piece[pieces.to_maximum] : -INFINITY;
      sums[j] = there ? piece[pieces.to_sum] : 0.0f;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        outputs[j][quad] = {};
        if (there && has_channels(params, quad, lane))
          outputs[j][quad] = reinterpret_cast<const float4*>(piece)[32 * quad + lane];
      }
    }
    merged.add(maxs, sums, outputs);
    first += step * kCount;
  } while (first < pieces.count);
  return merged;
}

template <int kQuads>
__device__ __forceinline__ void store(const DecodeParams& params, int64_t index, int lane, Merged<kQuads>& merged) {
  const float factor = normalize(params, index, &merged.max, &merged.sum);
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    const float4 x = merged.outputs[quad];
    if (has_channels(params, quad, lane))
      store_outputs(params, index * params.value.dim + 4 * (32 * quad + lane),
                    {x.x * factor, x.y * factor, x.z * factor, x.w * factor});
  }
  if (lane == 0) params.lse[index] = natural_lse(merged.max, merged.sum);
}

// kOwn: a CTA has a query row; else `warp_ctas` CTAs have one a warp, and the rest are for rows of many pieces.  With
// seven CTAs an SM those of middling batches are resident at once; for eight, registers would spill.
template <bool kOwn, int kQuads>
__global__ void __launch_bounds__(32 * warps_of(kOwn), kOwn ? 1 : 7 / kQuads)
    combine(const __grid_constant__ DecodeParams params, const __grid_constant__ Left left, int warp_ctas) {
  constexpr int kWarps = warps_of(kOwn);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, cta = blockIdx.x;
  const bool shared = kOwn || cta >= warp_ctas;  // by the CTA's warps
  const QueryRow own(params, left, kOwn ? cta : int64_t{cta} * kWarps + warp);
  // Of a CTA for rows of many pieces.
  const int item = (cta - warp_ctas) / left.rows, in_item = (cta - warp_ctas) % left.rows;
  const int range = (item / params.num_kv_heads + 1) * kFewPieces, kv_head = item % params.num_kv_heads;
  ptx::launch_dependents();  // the next call's decode kernel, which waits likewise
  Pieces pieces;
  Merged<kQuads> merged;
  // A rehearsal without pieces, before the decode kernel has ended: it brings the code to the instruction cache.
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    if (pass == 1) {
      ptx::wait_for_dependency();
      pieces = kOwn || !shared ? find_own(params, left, own, kOwn ? INT32_MAX : kFewPieces, lane)
                               : find_many(params, left, range, kv_head, in_item);
      if (pieces.count == 0) return;
    }
    merged = merge<kQuads>(params, pieces, shared ? warp : 0, shared ? kWarps : 1, lane);
  }
  if (shared) {
    constexpr int kCount = 4;
    __shared__ float4 outputs[kWarps][kQuads][32];
    __shared__ float maxs[kWarps], sums[kWarps];
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) outputs[warp][quad][lane] = merged.outputs[quad];
    if (lane == 0) maxs[warp] = merged.max, sums[warp] = merged.sum;
    __syncthreads();
    if (warp != 0) return;
    merged = {};
#pragma unroll 1
    for (int first = 0; first < kWarps; first += kCount) {
      float warp_maxs[kCount], warp_sums[kCount];
      float4 warp_outputs[kCount][kQuads];
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        warp_maxs[j] = maxs[first + j], warp_sums[j] = sums[first + j];
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) warp_outputs[j][quad] = outputs[first + j][quad][lane];
      }
      merged.add(warp_maxs, warp_sums, warp_outputs);
    }
  }
  store(params, pieces.index, lane, merged);
}

}  // namespace

const char* launch_combine(const DecodeParams& params, const int* row_start, const float* pieces, int workers, int rows,
                           int blocks, bool overlap, CUstream_st* stream) {
  const int64_t query_rows = int64_t{params.batch} * params.num_queries * params.num_heads;
  if (query_rows > INT32_MAX) return "jax_foscar decode_attention: too many query rows for one launch";
  const Left left = {row_start, pieces, workers / params.num_kv_heads, rows, blocks};
  const bool own = query_rows <= kFewRows;
  const auto choose = [own](auto quads) { return own ? combine<true, quads> : combine<false, quads>; };
  const auto kernel =
      params.value.dim <= 128 ? choose(std::integral_constant<int, 1>{}) : choose(std::integral_constant<int, 2>{});
  const int warps = warps_of(own);
  const int warp_ctas = own ? 0 : static_cast<int>((query_rows + warps - 1) / warps);
  const int row_ctas = own ? static_cast<int>(query_rows) : (left.ranges - 1) / kFewPieces * params.num_kv_heads * rows;
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(32 * warps);
  config.gridDim = dim3(warp_ctas + row_ctas);
  config.stream = stream;
  LaunchOverlap attribute;
  if (overlap) attribute.add_to(&config);
  cudaError_t error = cudaLaunchKernelEx(&config, kernel, params, left, warp_ctas);
  if (error == cudaSuccess) error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace jax_foscar::cuda
