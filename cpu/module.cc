// Python module jax_foscar._cpu: FFI handlers of the host platform and facts about the build.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include <string_view>

#include "decode_attention.h"
#include "ffi.h"
#include "page_format.h"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;

NB_MODULE(_cpu, m) {
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("registrations", [] {
    nb::dict targets;
    targets["jax_foscar_decode_attention_v1"] = nb::capsule(jax_foscar::cpu::decode_attention_handler());
    targets["jax_foscar_write_v1"] = nb::capsule(jax_foscar::cpu::write_handler());
    return targets;
  });
  m.def("instruction_set", &jax_foscar::cpu::instruction_set);
  // (byte, shift) of a code inside a page: lets a test hold layout.py and page_format.h together.
  m.def("key_address", [](int bits, int dim, int token, int channel) {
    const auto a = jax_foscar::key_address(bits, dim, token, channel);
    return nb::make_tuple(a.byte, a.shift);
  });
  m.def("value_address", [](int bits, int dim, int token, int channel) {
    const auto a = jax_foscar::value_address(bits, dim, token, channel);
    return nb::make_tuple(a.byte, a.shift);
  });
  // (token, channel) of every code of a 4-byte word, [byte][field]: the inverse that the CUDA writer packs by.
  m.def("key_word", [](int bits, int dim, int index) {
    const auto w = jax_foscar::key_word(bits, dim, index);
    nb::list codes;
    for (int i = 0; i < 4; ++i)
      for (int f = 0; f < 8 / bits; ++f)
        codes.append(nb::make_tuple(
            w.token + jax_foscar::key_byte_token(w.tail, i),
            w.channel + jax_foscar::key_byte_channel(w.tail, i) + jax_foscar::key_field_channel(bits, w.tail, f)));
    return codes;
  });
  m.def("value_word", [](int bits, int dim, int index) {
    const auto w = jax_foscar::value_word(bits, dim, index);
    nb::list codes;
    for (int i = 0; i < 4; ++i)
      for (int f = 0; f < 8 / bits; ++f)
        codes.append(nb::make_tuple(w.token + jax_foscar::value_byte_token(i),
                                    w.channel + jax_foscar::value_field_channel(w.tail, f)));
    return codes;
  });
}
