// Writing a few new tokens a row: write.h's function where T is small.
#pragma once

#include "write.h"

namespace jax_foscar::cuda {

constexpr int kFewTokens = 8;

// Returns null, or a message that says what failed.
const char* write_few(const WriteParams& params, CUstream_st* stream);

}  // namespace jax_foscar::cuda
