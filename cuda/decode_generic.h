// The portable decode-attention kernel: every format on sm_80 and newer, at no particular speed.
#pragma once

#include "params.h"

struct CUstream_st;

namespace jax_foscar::cuda {

// Null if launch_decode_generic can serve these parameters, else a message that says why not.
const char* refuse_decode_generic(const DecodeParams& params);

// Launches on `stream`; returns null, or the CUDA error's message.  Needs at least one query row.
const char* launch_decode_generic(const DecodeParams& params, CUstream_st* stream);

}  // namespace jax_foscar::cuda
