// The XLA FFI handlers of the CUDA platform.
#include "ffi.h"

#include <utility>

#include "decode_attention.h"
#include "ffi_params.h"
#include "ffi_write_params.h"
#include "write.h"

namespace jax_foscar::cuda {
namespace {

ffi::Error DecodeAttentionImpl(CUstream_st* stream, ffi::AnyBuffer q, ffi::AnyBuffer key_codes,
                               ffi::AnyBuffer key_params, ffi::AnyBuffer value_codes, ffi::AnyBuffer value_params,
                               ffi::AnyBuffer page_table, ffi::AnyBuffer length, ffi::AnyBuffer layer,
                               ffi::AnyBuffer exact_key, ffi::AnyBuffer exact_value, ffi::AnyBuffer sinks,
                               ffi::AnyBuffer query_lengths, ffi::AnyBuffer tree_mask, ffi::Result<ffi::AnyBuffer> out,
                               ffi::Result<ffi::AnyBuffer> lse, DecodeAttributes attributes,
                               ffi::Result<ffi::AnyBuffer> workspace) {
  DecodeParams params;
  const auto error = fill_params({q, key_codes, key_params, value_codes, value_params, page_table, length, layer,
                                  exact_key, exact_value, sinks, query_lengths, tree_mask, *out, *lse, attributes},
                                 &params);
  if (error.failure()) return error;
  const char* failure = decode_attention(params, workspace->untyped_data(), workspace->size_bytes(), stream);
  return failure == nullptr ? ffi::Error::Success() : ffi::Error::Internal(failure);
}

XLA_FFI_DEFINE_HANDLER(kDecodeAttention, DecodeAttentionImpl,
                       bind_decode(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>())
                           .Ret<ffi::AnyBuffer>(),  // workspace, which primitive.py's lowering adds
                       {ffi::Traits::kCmdBufferCompatible});

ffi::Error WriteImpl(CUstream_st* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     FormatAttributes attributes) {
  WriteParams params;
  const auto error = read_write(args, rets, attributes, &params);
  if (error.failure()) return error;
  const char* failure = write(params, stream);
  return failure == nullptr ? ffi::Error::Success() : ffi::Error::Internal(failure);
}

XLA_FFI_DEFINE_HANDLER(kWrite, WriteImpl, bind_write(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>()),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

void* decode_attention_handler() { return reinterpret_cast<void*>(kDecodeAttention); }

void* write_handler() { return reinterpret_cast<void*>(kWrite); }

}  // namespace jax_foscar::cuda
