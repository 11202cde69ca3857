// Grid: one CTA a query row, [B, T, N].  Each CTA finds the workers that share the row's item (schedule.cuh), weighs
// their pieces by their maxima, and sums them in worker order: threads take 4 channels each, groups of threads every
// groups-th piece.  Items that one worker had to itself are already written, except for rows without any token.
#include <cuda_runtime.h>

#include "combine.h"
#include "ptx.cuh"
#include "results.cuh"
#include "schedule.cuh"
#include "workspace.h"

namespace jax_foscar::cuda {
namespace {

__device__ float load_query(const DecodeParams& params, int64_t i) {
  if (params.q_dtype == DType::kF32) return static_cast<const float*>(params.q)[i];
  if (params.q_dtype == DType::kF16) return __half2float(static_cast<const __half*>(params.q)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(params.q)[i]);
}

// A row without tokens gives 0 and -inf; one that cannot be read, or a query that is not finite, NaN.
__device__ void write_empty(const DecodeParams& params, int64_t index, bool bad) {
  for (int d = threadIdx.x; d < params.key.dim; d += blockDim.x)
    bad |= !isfinite(load_query(params, index * params.key.dim + d));
  bad = __syncthreads_or(bad);
  for (int d = threadIdx.x; d < params.value.dim; d += blockDim.x)
    store_output(params, index * params.value.dim + d, bad ? NAN : 0.0f);
  if (threadIdx.x == 0) params.lse[index] = bad ? NAN : -INFINITY;
}

// The same in every thread; `scratch` holds one float a warp.
template <typename Join>
__device__ float reduce(float x, float identity, float* scratch, Join join) {
  const int lane = threadIdx.x % 32;
  for (int distance = 16; distance > 0; distance /= 2) x = join(x, __shfl_xor_sync(kAllLanes, x, distance));
  if (lane == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = lane < blockDim.x / 32 ? scratch[lane] : identity;
  for (int distance = 16; distance > 0; distance /= 2) x = join(x, __shfl_xor_sync(kAllLanes, x, distance));
  return x;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) combine(const __grid_constant__ DecodeParams params, const int* row_start,
                                                    const float* pieces, int workers, int rows, int blocks) {
  __shared__ float scratch[2][32];
  __shared__ float4 partial[kThreads];
  const int thread = threadIdx.x, index = blockIdx.x;
  const int ratio = params.num_heads / params.num_kv_heads;
  const int head = index % params.num_heads, query = index / params.num_heads % params.num_queries;
  const int row = index / params.num_heads / params.num_queries;
  const int in_kv_head = query * ratio + head % ratio;
  const int item = head / ratio * blocks + in_kv_head / rows, in_item = in_kv_head % rows;
  const int items = params.num_kv_heads * blocks;
  ptx::wait_for_dependency();

  const int before = row_start[row], after = row_start[row + 1], all = row_start[params.batch];
  const int count = after - before;  // units of the item
  if (count == 0) return write_empty(params, index, row_work(params, row).bad);
  const Cut cut(all * items, workers);
  const int begin = before * items + item * count;
  const int first = cut.owner(begin), num_pieces = cut.owner(begin + count - 1) - first + 1;
  if (num_pieces == 1) return;
  const int64_t piece_size = piece_floats(rows, params.value.dim);
  const auto piece = [&](int i) { return pieces + (int64_t{first + i} * 2 + (i == 0)) * piece_size; };

  const int quads = params.value.dim / 4, groups = kThreads / quads;
  const int quad = thread % quads, group = thread / quads;
  const int maxima = rows * params.value.dim + in_item, values = in_item * params.value.dim + 4 * quad;
  float max = -INFINITY;
  for (int i = thread; i < num_pieces; i += kThreads) max = fmaxf(max, piece(i)[maxima]);
  max = reduce(max, -INFINITY, scratch[0], [](float x, float y) { return fmaxf(x, y); });
  const float base = max == -INFINITY ? 0.0f : max;
  const auto weight = [&](int i) { return exp2f(piece(i)[maxima] - base); };
  float sum = 0.0f;
  for (int i = thread; i < num_pieces; i += kThreads) sum = fmaf(weight(i), piece(i)[maxima + rows], sum);
  float4 total = {};
  if (group < groups) {
#pragma unroll 8
    for (int i = group; i < num_pieces; i += groups) {
      const float2* x = reinterpret_cast<const float2*>(piece(i) + values);
      const float2 low = x[0], high = x[1];
      const float w = weight(i);
      total.x = fmaf(w, low.x, total.x), total.y = fmaf(w, low.y, total.y);
      total.z = fmaf(w, high.x, total.z), total.w = fmaf(w, high.y, total.w);
    }
  }
  partial[thread] = total;
  sum = reduce(sum, 0.0f, scratch[1], [](float x, float y) { return x + y; });  // its barrier publishes `partial`, too
  if (group != 0) return;
#pragma unroll 4
  for (int i = 1; i < groups; ++i) {
    const float4 x = partial[i * quads + quad];
    total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
  }
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  const int64_t out = int64_t{index} * params.value.dim + 4 * quad;
  store_output(params, out, total.x * factor);
  store_output(params, out + 1, total.y * factor);
  store_output(params, out + 2, total.z * factor);
  store_output(params, out + 3, total.w * factor);
  if (thread == 0) params.lse[index] = natural_lse(max, sum);
}

}  // namespace

const char* launch_combine(const DecodeParams& params, const int* row_start, const float* pieces, int workers, int rows,
                           int blocks, bool overlap, CUstream_st* stream) {
  const int64_t query_rows = int64_t{params.batch} * params.num_queries * params.num_heads;
  if (query_rows > INT32_MAX) return "jax_foscar decode_attention: too many query rows for one launch";
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(query_rows));
  const bool few = query_rows <= 264;  // of many pieces each
  config.blockDim = dim3(few ? 512 : 128);
  config.stream = stream;
  // The launch overlaps the decode kernel's end (ptx::wait_for_dependency).
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  cudaError_t error =
      cudaLaunchKernelEx(&config, few ? combine<512> : combine<128>, params, row_start, pieces, workers, rows, blocks);
  if (error == cudaSuccess) error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace jax_foscar::cuda
