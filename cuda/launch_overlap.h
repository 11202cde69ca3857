// Programmatic dependent launch (sm_90 and newer): a kernel's launch overlaps the end of the one before it in the
// stream, whose results it may read behind ptx::wait_for_dependency().
#pragma once

#include <cuda_runtime.h>

namespace jax_foscar::cuda {

struct LaunchOverlap {
  cudaLaunchAttribute attribute = {};

  // `this` must outlive the launch.
  void add_to(cudaLaunchConfig_t* config) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config->attrs = &attribute;
    config->numAttrs = 1;
  }
};

}  // namespace jax_foscar::cuda
