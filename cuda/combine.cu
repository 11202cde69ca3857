// Grid: kWarps warps a query row of [B, T, N], the more the more pieces a row has.  A row's warps find the workers that
// share its item (schedule.cuh), weigh their pieces by their maxima, and take every kWarps-th of them; a lane sums 4 or
// 8 channels.  The order of a sum is always the same.  Items that one worker had to itself are already written, except
// for rows without any token.
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

constexpr int kBatch = 8;  // loads under way

constexpr int threads(int warps) { return warps <= 4 ? 128 : 32 * warps; }

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

// 2^(from - to), where `to` is at least `from`; 1 where nothing was seen.
__device__ float scale_to(float from, float to) { return to == -INFINITY ? 1.0f : exp2f(from - to); }

__device__ void write_padding(const DecodeParams& params, int64_t index, int lane) {
  for (int d = lane; d < params.value.dim; d += 32) store_output(params, index * params.value.dim + d, 0.0f);
  if (lane == 0) params.lse[index] = -INFINITY;
}

// kQuads: of 4 channels each, what a lane takes.
template <int kWarps, int kQuads>
__global__ void __launch_bounds__(threads(kWarps))
    combine(const __grid_constant__ DecodeParams params, const int* row_start, const float* pieces, int workers,
            int rows, int blocks) {
  __shared__ float4 partial[kWarps > 1 ? kWarps : 1][kWarps > 1 ? 32 * kQuads : 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarps;
  const int index = (blockIdx.x * threads(kWarps) + threadIdx.x) / (32 * kWarps);
  const int ratio = params.num_heads / params.num_kv_heads;
  const int head = index % params.num_heads, query = index / params.num_heads % params.num_queries;
  const int row = index / params.num_heads / params.num_queries;
  if (row >= params.batch) return;
  const int in_kv_head = query * ratio + head % ratio;
  const int block = in_kv_head / rows, in_item = in_kv_head % rows;
  ptx::launch_dependents();  // the next call's decode kernel, which waits likewise
  ptx::wait_for_dependency();

  if (query >= params.row_queries(row).count) {
    if (warp == 0) write_padding(params, index, lane);
    return;
  }
  const int before = row_start[row], after = row_start[row + 1], all = row_start[params.batch];
  const int count = after - before;  // units of the item
  if (count == 0) {
    if (warp == 0) write_empty(params, index, row_work(params, row).bad, lane);
    return;
  }
  const Cut cut(all * blocks, workers / params.num_kv_heads);
  const int begin = before * blocks + block * count;
  const int first = cut.owner(begin), num_pieces = cut.owner(begin + count - 1) - first + 1;
  if (num_pieces == 1) return;
  const int64_t piece_size = piece_floats(rows, params.value.dim);
  const float* const own = pieces + (int64_t{first} * params.num_kv_heads + head / ratio) * 2 * piece_size;
  const auto piece = [&](int i) { return own + i * params.num_kv_heads * 2 * piece_size + (i == 0 ? piece_size : 0); };

  // Each lane of its pieces, then all of all; many loads at a time, for each takes most of a microsecond.
  const int maxima = rows * params.value.dim + in_item;
  float max = -INFINITY, sum = 0.0f;
  for (int first_piece = lane; first_piece < num_pieces; first_piece += 32 * kBatch) {
    float maxs[kBatch], sums[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first_piece + 32 * j;
      maxs[j] = i < num_pieces ? piece(i)[maxima] : -INFINITY;
      sums[j] = i < num_pieces ? piece(i)[maxima + rows] : 0.0f;
    }
    float next = max;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) next = fmaxf(next, maxs[j]);
    sum *= scale_to(max, next);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) sum = fmaf(scale_to(maxs[j], next), sums[j], sum);
    max = next;
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, max, distance), more = __shfl_xor_sync(kAllLanes, sum, distance);
    const float next = fmaxf(max, other);
    sum = sum * scale_to(max, next) + more * scale_to(other, next), max = next;
  }

  float4 totals[kQuads] = {};
  for (int first_piece = warp; first_piece < num_pieces; first_piece += kWarps * kBatch) {
    float weights[kBatch];
    float2 x[kBatch][kQuads][2];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first_piece + kWarps * j;
      weights[j] = i < num_pieces ? piece(i)[maxima] : -INFINITY;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const int channel = 4 * (32 * quad + lane);
        const bool wanted = i < num_pieces && channel < params.value.dim;
        const float2* values = reinterpret_cast<const float2*>(piece(i) + in_item * params.value.dim + channel);
        x[j][quad][0] = wanted ? values[0] : float2{};
        x[j][quad][1] = wanted ? values[1] : float2{};
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const float w = scale_to(weights[j], max);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        float4& total = totals[quad];
        total.x = fmaf(w, x[j][quad][0].x, total.x), total.y = fmaf(w, x[j][quad][0].y, total.y);
        total.z = fmaf(w, x[j][quad][1].x, total.z), total.w = fmaf(w, x[j][quad][1].y, total.w);
      }
    }
  }
  if constexpr (kWarps > 1) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j) partial[warp][32 * j + lane] = totals[j];
    __syncthreads();
    if (warp != 0) return;
#pragma unroll
    for (int i = 1; i < kWarps; ++i) {
#pragma unroll
      for (int j = 0; j < kQuads; ++j) {
        const float4 x = partial[i][32 * j + lane];
        totals[j].x += x.x, totals[j].y += x.y, totals[j].z += x.z, totals[j].w += x.w;
      }
    }
  }
  const float factor = normalize(params, index, &max, &sum);
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int channel = 4 * (32 * j + lane);
    if (channel >= params.value.dim) continue;
    const int64_t out = int64_t{index} * params.value.dim + channel;
    store_output(params, out, totals[j].x * factor);
    store_output(params, out + 1, totals[j].y * factor);
    store_output(params, out + 2, totals[j].z * factor);
    store_output(params, out + 3, totals[j].w * factor);
  }
  if (lane == 0) params.lse[index] = natural_lse(max, sum);
}

}  // namespace

const char* launch_combine(const DecodeParams& params, const int* row_start, const float* pieces, int workers, int rows,
                           int blocks, bool overlap, CUstream_st* stream) {
  const int64_t query_rows = int64_t{params.batch} * params.num_queries * params.num_heads;
  if (query_rows > INT32_MAX) return "jax_foscar decode_attention: too many query rows for one launch";
  cudaLaunchConfig_t config = {};
  // Pieces of a row, if all rows are alike.
  const int64_t pieces_a_row = workers / params.num_kv_heads / (int64_t{params.batch} * blocks) + 1;
  const int warps = pieces_a_row <= kBatch ? 1 : pieces_a_row <= 4 * kBatch ? 4 : 16;
  config.blockDim = dim3(threads(warps));
  config.gridDim = dim3(static_cast<unsigned>((query_rows * warps * 32 + threads(warps) - 1) / threads(warps)));
  config.stream = stream;
  LaunchOverlap attribute;
  if (overlap) attribute.add_to(&config);
  const auto choose = [warps](auto quads) {
    return warps == 1 ? combine<1, quads> : warps == 4 ? combine<4, quads> : combine<16, quads>;
  };
  const auto kernel =
      params.value.dim <= 128 ? choose(std::integral_constant<int, 1>{}) : choose(std::integral_constant<int, 2>{});
  cudaError_t error = cudaLaunchKernelEx(&config, kernel, params, row_start, pieces, workers, rows, blocks);
  if (error == cudaSuccess) error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace jax_foscar::cuda
