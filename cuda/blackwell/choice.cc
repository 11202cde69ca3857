#include "choice.h"

#include <cstdlib>
#include <string>

namespace jax_foscar::cuda {

const Sm100Choice& sm100_choice() {
  static const std::string value = [] {
    const char* found = std::getenv("JAX_FOSCAR_SM100");
    return std::string(found == nullptr ? "" : found);
  }();
  static const std::string message =
      "jax_foscar: JAX_FOSCAR_SM100 is '" + value + "'; it must be 'tcgen05', or not set";
  static const Sm100Choice choice = {value == "tcgen05",
                                     value.empty() || value == "tcgen05" ? nullptr : message.c_str()};
  return choice;
}

}  // namespace jax_foscar::cuda
