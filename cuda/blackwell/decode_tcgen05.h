// The decode-attention kernel for compute capability 10.x, on tcgen05.  Nobody has run it yet: it serves only where
// JAX_FOSCAR_SM100=tcgen05 asks for it (docs/blackwell.md).
#pragma once

#include <cstddef>

#include "../params.h"

struct CUstream_st;

namespace jax_foscar::cuda {

// Null if launch_decode_tcgen05 can serve these parameters, else a message that says why not.
const char* refuse_decode_tcgen05(const DecodeParams& params);

// Launches on `stream`; returns null, or the CUDA error's message.  `workspace` is as workspace.h says.
const char* launch_decode_tcgen05(const DecodeParams& params, void* workspace, size_t workspace_bytes,
                                  CUstream_st* stream);

}  // namespace jax_foscar::cuda
