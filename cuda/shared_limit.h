// A kernel's right to more shared memory than the 48 KB that every kernel may have.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "device_facts.h"

namespace jax_foscar::cuda {

// One a kernel, static: a function's limit belongs to a device, and is raised once on each.
class SharedLimit {
 public:
  // To all that a block can have.
  template <class Kernel>
  cudaError_t raise(Kernel* kernel) {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess || (device < kMaxDevices && raised_[device].load(std::memory_order_relaxed))) return error;
    DeviceFacts facts = {};
    error = device_facts(&facts);
    if (error == cudaSuccess)
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, facts.shared);
    if (error == cudaSuccess && device < kMaxDevices) raised_[device].store(true, std::memory_order_relaxed);
    return error;
  }

 private:
  static constexpr int kMaxDevices = 64;
  std::atomic<bool> raised_[kMaxDevices] = {};
};

}  // namespace jax_foscar::cuda
