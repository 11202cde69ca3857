// The kernel and its launch.  Compiled for sm_100f alone (CMakeLists.txt), whatever else the module has code for.
#include <cuda_runtime.h>

#include <algorithm>

#include "../combine.h"
#include "../device_facts.h"
#include "../launch_overlap.h"
#include "../shared_limit.h"
#include "choice.h"
#include "decode.h"
#include "decode_tcgen05.h"
#include "gpu.cuh"
#include "shapes.h"

namespace jax_foscar::blackwell {
namespace {

template <int kDim, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    decode_tcgen05(const __grid_constant__ DecodeParams params, const __grid_constant__ Launch launch) {
  extern __shared__ __align__(128) uint8_t shared[];
  Gpu gpu(shared);
  gpu.set_barriers(launch.shared.own_at());
  cuda::ptx::wait_for_dependency();
  cuda::ptx::launch_dependents();
  decode<kDim, kRows>(gpu, params, launch);
}

}  // namespace
}  // namespace jax_foscar::blackwell

namespace jax_foscar::cuda {
namespace {

using namespace jax_foscar::blackwell;

template <int kDim, int kRows>
const char* launch(const DecodeParams& params, const DeviceFacts& facts, Launch plan, CUstream_st* stream) {
  if (!plan_launch<kRows>(params, facts.shared, &plan))
    return "jax_foscar decode_attention: a tile does not fit the device's shared memory";
  const int grid = std::min(facts.sms, kMaxWorkers);
  static SharedLimit limit;
  cudaError_t error = limit.raise(decode_tcgen05<kDim, kRows>);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = plan.shared.total();
  config.stream = stream;
  LaunchOverlap attribute;
  attribute.add_to(&config);
  error = cudaLaunchKernelEx(&config, decode_tcgen05<kDim, kRows>, params, plan);
  if (error == cudaSuccess) error = cudaGetLastError();
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return launch_combine(params, plan.row_start, plan.pieces, grid, kRows, 1, true, stream);
}

}  // namespace

bool has_tcgen05() { return true; }

const char* refuse_decode_tcgen05(const DecodeParams& params) {
  if (!sm100_choice().tcgen05) return "jax_foscar decode_attention: the tcgen05 kernel was not asked for";
  const char* why = refuse_shape(params);
  if (why != nullptr) return why;
  DeviceFacts facts = {};
  const cudaError_t error = device_facts(&facts);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (facts.major != 10) return "jax_foscar decode_attention: the tcgen05 kernel needs compute capability 10.x";
  if (facts.sms < params.num_kv_heads) return "jax_foscar decode_attention: more KV heads than the device has SMs";
  // The schedule counts in 32 bits.
  if (int64_t{params.table_width} * params.page_size / kTileTokens * params.batch > INT32_MAX)
    return "jax_foscar decode_attention: too much work for the tcgen05 kernel's 32-bit counts";
  return nullptr;
}

const char* launch_decode_tcgen05(const DecodeParams& params, void* workspace, size_t workspace_bytes,
                                  CUstream_st* stream) {
  const Workspace parts(params, workspace, workspace_bytes);
  if (parts.pieces == nullptr) return "jax_foscar decode_attention: the workspace is too small";
  DeviceFacts facts = {};
  const cudaError_t error = device_facts(&facts);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  Launch plan = {};
  plan.row_start = parts.row_start, plan.pieces = parts.pieces;
  const bool few = kernel_rows(params.rows_a_kv_head()) == 4;
  if (params.key.dim == 64)
    return few ? launch<64, 4>(params, facts, plan, stream) : launch<64, 8>(params, facts, plan, stream);
  return few ? launch<128, 4>(params, facts, plan, stream) : launch<128, 8>(params, facts, plan, stream);
}

}  // namespace jax_foscar::cuda
