// Whether the tcgen05 kernel was asked for.
#pragma once

namespace jax_foscar::cuda {

struct Sm100Choice {
  bool tcgen05;
  const char* error;  // null, or what is wrong with the variable
};

// What JAX_FOSCAR_SM100 says: nothing, or "tcgen05".  Read once.
const Sm100Choice& sm100_choice();

// The module has code of the kernel.
bool has_tcgen05();

}  // namespace jax_foscar::cuda
