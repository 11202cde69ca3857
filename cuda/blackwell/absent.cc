// In place of decode_tcgen05.cu, where the module is not built for compute capability 10.x.
#include "choice.h"
#include "decode_tcgen05.h"

namespace jax_foscar::cuda {

bool has_tcgen05() { return false; }

const char* refuse_decode_tcgen05(const DecodeParams&) {
  return "jax_foscar decode_attention: this module has no tcgen05 kernel";
}

const char* launch_decode_tcgen05(const DecodeParams& params, void*, size_t, CUstream_st*) {
  return refuse_decode_tcgen05(params);
}

}  // namespace jax_foscar::cuda
