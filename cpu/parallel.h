// Work items shared by the calling thread and whichever helpers the pool gets round to.
#pragma once

#include <cstdint>
#include <functional>

#include "decode_attention.h"

namespace jax_foscar::cpu {

// Calls work(scratch, item) once for each item in [0, items), claimed in order, and returns when all are done.
// `scratch` is `scratch_floats` floats of the running thread's own, 64-byte aligned.  Only items that a helper has
// begun are waited for: a helper that comes late finds nothing left and touches nothing of the caller's.
void parallel_for(int64_t items, int helpers, const Schedule& schedule, int64_t scratch_floats,
                  std::function<void(float* scratch, int64_t item)> work);

}  // namespace jax_foscar::cpu
