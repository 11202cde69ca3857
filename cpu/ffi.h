// What the host module registers.
#pragma once

namespace jax_foscar::cpu {

void* decode_attention_handler();
void* write_handler();

}  // namespace jax_foscar::cpu
