// Python module jax_foscar._cuda: FFI handlers of the CUDA platform and facts about the build.
#include <nanobind/nanobind.h>

#include "blackwell/choice.h"
#include "ffi.h"
#include "workspace.h"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;

NB_MODULE(_cuda, m) {
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  // Lets a test hold primitive.py's formula and workspace.h together.
  m.def("workspace_bytes", &jax_foscar::workspace_bytes);
  m.attr("architectures") = JAX_FOSCAR_CUDA_ARCHITECTURES;
  m.attr("has_tcgen05") = jax_foscar::cuda::has_tcgen05();
  m.def("uses_tcgen05", [] {
    const jax_foscar::cuda::Sm100Choice& choice = jax_foscar::cuda::sm100_choice();
    if (choice.error != nullptr) throw nb::value_error(choice.error);
    return choice.tcgen05;
  });
  m.def("registrations", [] {
    nb::dict targets;
    targets["jax_foscar_decode_attention_v1"] = nb::capsule(jax_foscar::cuda::decode_attention_handler());
    targets["jax_foscar_write_v1"] = nb::capsule(jax_foscar::cuda::write_handler());
    return targets;
  });
}
