// The kernel and its launch.  Device code exists for compute capability 10.x only; elsewhere the body is empty and never
// launched.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "../combine.h"
#include "../launch_overlap.h"
#include "decode.h"
#include "decode_tcgen05.h"
#include "gpu.cuh"
#include "shapes.h"

namespace jax_foscar::blackwell {
namespace {

template <int kDim, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    decode_tcgen05(const __grid_constant__ DecodeParams params, const __grid_constant__ Launch launch) {
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__)
  extern __shared__ __align__(128) uint8_t shared[];
  Gpu gpu(shared);
  gpu.set_barriers(launch.shared.own_at());
  cuda::ptx::wait_for_dependency();
  cuda::ptx::launch_dependents();
  decode<kDim, kRows>(gpu, params, launch);
#endif
}

}  // namespace
}  // namespace jax_foscar::blackwell

namespace jax_foscar::cuda {
namespace {

using namespace jax_foscar::blackwell;

struct DeviceFacts {
  int sms, shared, major;
};

cudaError_t device_facts(DeviceFacts* facts) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const auto get = [&](int* value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  };
  get(&facts->sms, cudaDevAttrMultiProcessorCount);
  get(&facts->shared, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  get(&facts->major, cudaDevAttrComputeCapabilityMajor);
  return error;
}

template <int kDim, int kRows>
const char* launch(const DecodeParams& params, const DeviceFacts& facts, Launch plan, CUstream_st* stream) {
  if (!plan_launch<kRows>(params, facts.shared, &plan))
    return "jax_foscar decode_attention: a tile does not fit the device's shared memory";
  const int grid = std::min(facts.sms, kMaxWorkers);
  if (grid < params.num_kv_heads) return "jax_foscar decode_attention: more KV heads than the device has SMs";
  // A function's limit on shared memory belongs to a device, so it is set each time: it costs less than a launch.
  cudaError_t error = cudaFuncSetAttribute(decode_tcgen05<kDim, kRows>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           plan.shared.total());
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

const char* launch_decode_tcgen05(const DecodeParams& params, void* workspace, size_t workspace_bytes,
                                  CUstream_st* stream) {
  const int64_t needed = jax_foscar::workspace_bytes(params.batch, params.num_queries, params.num_heads,
                                                     params.num_kv_heads, params.value.dim);
  if (workspace == nullptr || static_cast<int64_t>(workspace_bytes) < needed)
    return "jax_foscar decode_attention: the workspace is too small";
  DeviceFacts facts = {};
  const cudaError_t error = device_facts(&facts);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  Launch plan = {};
  plan.row_start = static_cast<int*>(workspace);
  plan.pieces = reinterpret_cast<float*>(static_cast<uint8_t*>(workspace) + workspace_header_bytes(params.batch));
  const bool few = kernel_rows(int64_t{params.num_queries} * (params.num_heads / params.num_kv_heads)) == 4;
  if (params.key.dim == 64)
    return few ? launch<64, 4>(params, facts, plan, stream) : launch<64, 8>(params, facts, plan, stream);
  return few ? launch<128, 4>(params, facts, plan, stream) : launch<128, 8>(params, facts, plan, stream);
}

}  // namespace jax_foscar::cuda
