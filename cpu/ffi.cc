// The XLA FFI handlers of the host platform.
#include "ffi.h"

#include <utility>

#include "decode_attention.h"
#include "ffi_params.h"
#include "ffi_write_params.h"
#include "write.h"

namespace jax_foscar::cpu {
namespace {

ffi::Error DecodeAttentionImpl(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer key_codes,
                               ffi::AnyBuffer key_params, ffi::AnyBuffer value_codes, ffi::AnyBuffer value_params,
                               ffi::AnyBuffer page_table, ffi::AnyBuffer length, ffi::AnyBuffer layer,
                               ffi::AnyBuffer exact_key, ffi::AnyBuffer exact_value, ffi::AnyBuffer sinks,
                               ffi::AnyBuffer query_lengths, ffi::AnyBuffer tree_mask, ffi::Result<ffi::AnyBuffer> out,
                               ffi::Result<ffi::AnyBuffer> lse, DecodeAttributes attributes) {
  DecodeParams params;
  const auto error = fill_params({q, key_codes, key_params, value_codes, value_params, page_table, length, layer,
                                  exact_key, exact_value, sinks, query_lengths, tree_mask, *out, *lse, attributes},
                                 &params);
  if (error.failure()) return error;
  decode_attention(params, static_cast<int>(pool.num_threads()) - 1,
                   [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kDecodeAttention, DecodeAttentionImpl, bind_decode(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

ffi::Error WriteImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     FormatAttributes attributes) {
  WriteParams params;
  const auto error = read_write(args, rets, attributes, &params);
  if (error.failure()) return error;
  write(params, static_cast<int>(pool.num_threads()) - 1,
        [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kWrite, WriteImpl, bind_write(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

}  // namespace

void* decode_attention_handler() { return reinterpret_cast<void*>(kDecodeAttention); }

void* write_handler() { return reinterpret_cast<void*>(kWrite); }

}  // namespace jax_foscar::cpu
