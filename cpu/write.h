// Writing new tokens into the cache on the host.
#pragma once

#include "decode_attention.h"
#include "write_params.h"

namespace jax_foscar::cpu {

// Does the whole write, with the help of up to `helpers` tasks as decode_attention has it.
void write(const WriteParams& params, int helpers, const Schedule& schedule);

}  // namespace jax_foscar::cpu
