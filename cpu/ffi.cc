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
                               ffi::AnyBuffer exact_key, ffi::AnyBuffer exact_value, ffi::Result<ffi::AnyBuffer> out,
                               ffi::Result<ffi::AnyBuffer> lse, float scale, int32_t key_bits, int32_t key_group,
                               int32_t key_per_channel, int32_t value_bits, int32_t value_group,
                               int32_t value_per_channel, int32_t sink_tokens, int32_t recent_tokens) {
  DecodeParams params;
  const auto error = fill_params({q,
                                  key_codes,
                                  key_params,
                                  value_codes,
                                  value_params,
                                  page_table,
                                  length,
                                  layer,
                                  exact_key,
                                  exact_value,
                                  *out,
                                  *lse,
                                  scale,
                                  key_bits,
                                  key_group,
                                  key_per_channel,
                                  value_bits,
                                  value_group,
                                  value_per_channel,
                                  sink_tokens,
                                  recent_tokens},
                                 &params);
  if (error.failure()) return error;
  decode_attention(params, static_cast<int>(pool.num_threads()) - 1,
                   [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kDecodeAttention, DecodeAttentionImpl, bind_decode(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

ffi::Error WriteImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t key_bits,
                     int32_t key_group, int32_t key_per_channel, int32_t value_bits, int32_t value_group,
                     int32_t value_per_channel, int32_t sink_tokens, int32_t recent_tokens) {
  WriteParams params;
  const auto error = read_write(args, rets, key_bits, key_group, key_per_channel, value_bits, value_group,
                                value_per_channel, sink_tokens, recent_tokens, &params);
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
