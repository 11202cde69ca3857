// From XLA buffers to WriteParams.  The handler's arguments are write.py's operands: the cache's arrays that the format
// has, each of them aliased to a result, then what is read besides.
#pragma once

#include <vector>

#include "ffi_params.h"
#include "write_params.h"

namespace jax_foscar {

// Buffers and attributes of one write; what the format lacks is filled with another buffer and not looked at.
struct WriteCall {
  ffi::AnyBuffer key_codes, key_params, value_codes, value_params, exact_key, exact_value, overflowed;
  ffi::AnyBuffer page_table, length, num_new, layer, k, v;
  FormatAttributes attributes;
};

inline ffi::Error fill_operand(const char* name, const ffi::AnyBuffer& codes, const ffi::AnyBuffer& params,
                               const ffi::AnyBuffer& exact, const ffi::AnyBuffer& tokens, const OperandFormat& format,
                               const WriteParams& sizes, WriteOperand* operand) {
  static_cast<OperandFormat&>(*operand) = format;
  operand->codes = static_cast<uint8_t*>(codes.untyped_data());
  operand->params = format.bits == 16 ? nullptr : params.untyped_data();
  operand->exact = sizes.windows.ring > 0 ? static_cast<uint16_t*>(exact.untyped_data()) : nullptr;
  operand->tokens = tokens.untyped_data();
  switch (tokens.element_type()) {
    case ffi::F32: operand->token_dtype = DType::kF32; break;
    case ffi::BF16: operand->token_dtype = DType::kBF16; break;
    case ffi::F16: operand->token_dtype = DType::kF16; break;
    default: return invalid("k and v must be float32, bfloat16 or float16");
  }
  if (static_cast<int64_t>(tokens.element_count()) !=
      int64_t{sizes.batch} * sizes.num_tokens * sizes.num_kv_heads * format.dim)
    return invalid("k and v must have the same rows and tokens, and the cache's KV heads");
  return check_operand(name, codes, params, exact, sizes.batch, sizes, format);
}

inline ffi::Error fill_params(const WriteCall& call, WriteParams* p) {
  *p = WriteParams{};
  const auto k = call.k.dimensions(), v = call.v.dimensions();
  if (k.size() < 4 || v.size() != k.size()) return invalid("wrong rank of k or v");
  if (auto cache = fill_cache(call, p); cache.failure()) return cache;

  p->batch = leading_rows(call.k, 3), p->num_tokens = k[k.size() - 3];
  p->layer_rows = call.layer.element_count();
  p->overflowed = static_cast<bool*>(call.overflowed.untyped_data());
  p->page_table = static_cast<const int32_t*>(call.page_table.untyped_data());
  p->length = static_cast<const int32_t*>(call.length.untyped_data());
  p->num_new = static_cast<const int32_t*>(call.num_new.untyped_data());
  p->layer = static_cast<const int32_t*>(call.layer.untyped_data());
  for (const ffi::AnyBuffer* ints : {&call.page_table, &call.length, &call.num_new, &call.layer})
    if (ints->element_type() != ffi::S32) return invalid("page_table, length, num_new and layer must be int32");
  if (call.overflowed.element_type() != ffi::PRED) return invalid("overflowed must be bool");
  for (int64_t rows :
       {leading_rows(call.page_table, 1), static_cast<int64_t>(call.length.element_count()),
        static_cast<int64_t>(call.num_new.element_count()), static_cast<int64_t>(call.overflowed.element_count())})
    if (rows != p->batch) return invalid("page_table, length, num_new and overflowed must have k's rows");
  for (int rows : {p->pools, p->layer_rows})
    if (rows <= 0 || p->batch % rows != 0) return invalid("pools and layers must divide the batch");
  // A smaller ring would lose older tokens before they are quantized.
  if (p->windows.ring > 0 && p->windows.ring < p->windows.recent + p->windows.group)
    return invalid("the exact arrays are smaller than the format's windows");

  const FormatAttributes& given = call.attributes;
  auto key = fill_operand("key", call.key_codes, call.key_params, call.exact_key, call.k,
                          {given.key_bits, static_cast<int>(k.back()), given.key_group, given.key_per_channel != 0}, *p,
                          &p->key);
  if (key.failure()) return key;
  return fill_operand("value", call.value_codes, call.value_params, call.exact_value, call.v,
                      {given.value_bits, static_cast<int>(v.back()), given.value_group, given.value_per_channel != 0},
                      *p, &p->value);
}

// The handler's own arguments, results and attributes, in order.
inline ffi::Error read_write(ffi::RemainingArgs args, ffi::RemainingRets rets, const FormatAttributes& given,
                             WriteParams* p) {
  const bool key_params = given.key_bits != 16, value_params = given.value_bits != 16;
  const bool exact = (key_params && given.key_per_channel) || (value_params && given.value_per_channel) ||
                     given.sink_tokens > 0 || given.recent_tokens > 0;
  const size_t written = 3 + key_params + value_params + 2 * exact;
  if (args.size() != written + 6 || rets.size() != written) return invalid("wrong number of operands or results");
  std::vector<ffi::AnyBuffer> buffers;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto arg = args.get<ffi::AnyBuffer>(i);
    if (!arg) return arg.error();
    buffers.push_back(*arg);
  }
  for (size_t i = 0; i < written; ++i) {
    auto result = rets.get<ffi::AnyBuffer>(i);
    if (!result) return result.error();
    if ((**result).untyped_data() != buffers[i].untyped_data()) return invalid("a cache is written in place only");
  }
  auto next = buffers.begin();
  const auto take = [&](bool there) { return there ? *next++ : buffers.back(); };
  return fill_params({take(true), take(key_params), take(true), take(value_params), take(exact), take(exact),
                      take(true), take(true), take(true), take(true), take(true), take(true), take(true), given},
                     p);
}

// The operands, results and attributes that follow the platform's own context arguments.
template <typename Binding>
auto bind_write(Binding binding) {
  return std::move(binding).RemainingArgs().RemainingRets().template Attrs<FormatAttributes>();
}

}  // namespace jax_foscar
