// What the CUDA module registers.
#pragma once

namespace jax_foscar::cuda {

void* decode_attention_handler();
void* write_handler();

}  // namespace jax_foscar::cuda
