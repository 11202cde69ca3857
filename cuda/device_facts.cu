#include <atomic>
#include <cstdint>

#include "device_facts.h"

namespace jax_foscar::cuda {

cudaError_t device_facts(DeviceFacts* facts) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int64_t> known[kMaxDevices];  // sms << 40 | major << 32 | shared
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  int64_t packed = device < kMaxDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (packed == 0) {
    int sms = 0, shared = 0, major = 0;
    error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error != cudaSuccess) return error;
    packed = int64_t{sms} << 40 | int64_t{major} << 32 | shared;
    if (device < kMaxDevices) known[device].store(packed, std::memory_order_relaxed);
  }
  *facts = {static_cast<int>(packed >> 40), static_cast<int>(packed & 0xffffffff),
            static_cast<int>(packed >> 32 & 255)};
  return cudaSuccess;
}

}  // namespace jax_foscar::cuda
