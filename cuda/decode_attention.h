// Decode attention on CUDA: the one function the FFI handler calls.  No CUDA header here, so that ffi.cc needs none.
#pragma once

#include <cstddef>

#include "params.h"

struct CUstream_st;

namespace jax_foscar::cuda {

// Launches the kernel that serves `params` on `stream`; returns null, or a message that says what failed.  The
// workspace has the size that workspace.h gives and may arrive uninitialised.
const char* decode_attention(const DecodeParams& params, void* workspace, size_t workspace_bytes, CUstream_st* stream);

}  // namespace jax_foscar::cuda
