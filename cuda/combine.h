// Merges what several workers have of one item.
#pragma once

#include "params.h"

struct CUstream_st;

namespace jax_foscar::cuda {

// The pieces that the decode kernel with `workers` workers left in the workspace (workspace.h), items of `rows` query
// rows in `blocks` blocks a KV head -> the outputs.  `overlap`: the launch need not wait for that kernel's end (sm_90).
// Returns null, or the CUDA error's message.
const char* launch_combine(const DecodeParams& params, const int* row_start, const float* pieces, int workers, int rows,
                           int blocks, bool overlap, CUstream_st* stream);

}  // namespace jax_foscar::cuda
