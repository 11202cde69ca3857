// Which kernel serves a call: the first line of the table that does not refuse it.
#include <cstdint>

#include "blackwell/choice.h"
#include "blackwell/decode_tcgen05.h"
#include "decode_attention.h"
#include "decode_generic.h"
#include "decode_mma.h"

namespace jax_foscar::cuda {
namespace {

struct Kernel {
  const char* (*refuse)(const DecodeParams& params);  // null, or why the kernel cannot serve the call
  const char* (*launch)(const DecodeParams& params, void* workspace, size_t workspace_bytes, CUstream_st* stream);
};

// Fastest first; the last one covers every format, so what it refuses is an error.
constexpr Kernel kKernels[] = {
    {refuse_decode_tcgen05, launch_decode_tcgen05},  // only where JAX_FOSCAR_SM100 asks for it
    {refuse_decode_mma, launch_decode_mma},
    {refuse_decode_generic, [](const DecodeParams& params, void*, size_t,
                               CUstream_st* stream) { return launch_decode_generic(params, stream); }},
};

bool misaligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 != 0; }

// What no kernel can serve.  Python and ffi_params.h have checked shapes and names; here is what a kernel's loads and
// windows rest on.
const char* refuse(const DecodeParams& params) {
  if (sm100_choice().error != nullptr) return sm100_choice().error;
  for (const OperandParams* operand : {&params.key, &params.value}) {
    if (misaligned(operand->codes) || misaligned(operand->params) || misaligned(operand->exact))
      return "jax_foscar decode_attention: the cache's arrays must be 16-byte aligned";
  }
  // With a smaller ring, a query would read tokens that were never quantized (windows.h, boundary).
  const Windows& windows = params.windows;
  if (windows.ring == 0 ? windows.sink != 0 || windows.recent != 0 || windows.group != 1
                        : windows.ring < windows.recent + windows.group - 1)
    return "jax_foscar decode_attention: the exact arrays are smaller than the format's windows";
  return nullptr;
}

}  // namespace

const char* decode_attention(const DecodeParams& params, void* workspace, size_t workspace_bytes, CUstream_st* stream) {
  if (params.batch == 0 || params.num_queries == 0 || params.num_heads == 0) return nullptr;
  const char* why = refuse(params);
  if (why != nullptr) return why;
  for (const Kernel& kernel : kKernels) {
    why = kernel.refuse(params);
    if (why == nullptr) return kernel.launch(params, workspace, workspace_bytes, stream);
  }
  return why;
}

}  // namespace jax_foscar::cuda
