// Writing new tokens into the cache on CUDA: the one function the FFI handler calls.
#pragma once

#include "write_params.h"

struct CUstream_st;

namespace jax_foscar::cuda {

// Launches on `stream`; returns null, or a message that says what failed.
const char* write(const WriteParams& params, CUstream_st* stream);

}  // namespace jax_foscar::cuda
