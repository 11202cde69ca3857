// The fast decode-attention kernel, on tensor cores.
#pragma once

#include <cstddef>

#include "params.h"

struct CUstream_st;

namespace jax_foscar::cuda {

// Null if launch_decode_mma can serve these parameters, else a message that says why not.
const char* refuse_decode_mma(const DecodeParams& params);

// Launches on `stream`; returns null, or the CUDA error's message.  `workspace` is as workspace.h says.
const char* launch_decode_mma(const DecodeParams& params, void* workspace, size_t workspace_bytes, CUstream_st* stream);

}  // namespace jax_foscar::cuda
