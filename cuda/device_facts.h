// What launches need to know of the current device.
#pragma once

#include <cuda_runtime.h>

namespace jax_foscar::cuda {

// SMs, the shared memory a CTA may have, and the major compute capability.
struct DeviceFacts {
  int sms, shared, major;
};

// Asked once a device.
cudaError_t device_facts(DeviceFacts* facts);

}  // namespace jax_foscar::cuda
