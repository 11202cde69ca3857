// From XLA buffers to DecodeParams: the checks and the shape arithmetic that both platforms' handlers share; those of
// the cache's arrays also serve writes (ffi_write_params.h).
//
// Python has already named every misuse (jax_foscar/attention.py); what is checked again here is only what would make a
// kernel read out of bounds, so that a hand-written or stale HLO cannot.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>

#include "params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_foscar {

namespace ffi = xla::ffi;

// A cache's format, as primitive.py's format_attributes names it.
struct FormatAttributes {
  int32_t key_bits, key_group, key_per_channel, value_bits, value_group, value_per_channel, sink_tokens, recent_tokens;
};

// The attributes of one decode-attention call; primitive.py's lowering names them alike.
struct DecodeAttributes : FormatAttributes {
  float scale;
  int32_t is_causal, window_left, window_right;
  float logits_soft_cap;
  int32_t has_sinks, has_query_lengths, has_tree_mask;
};

// Its buffers, in the order of primitive.py, and the attributes.
struct DecodeCall {
  ffi::AnyBuffer q, key_codes, key_params, value_codes, value_params, page_table, length, layer, exact_key, exact_value;
  ffi::AnyBuffer sinks, query_lengths, tree_mask;
  ffi::AnyBuffer out, lse;
  DecodeAttributes attributes;
};

inline ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument("jax_foscar: " + what); }

// Product of the leading axes, those before the last `trailing`.
inline int64_t leading_rows(const ffi::AnyBuffer& buffer, size_t trailing) {
  const auto dims = buffer.dimensions();
  return std::accumulate(dims.begin(), dims.end() - trailing, int64_t{1}, std::multiplies<>());
}

// One of K and V, whose format the attributes gave.  `codes` is [..., U, L, P, K, page_size, bytes]; leading axes
// beyond U come from vmap and count as pools.
inline ffi::Error check_operand(const char* name, const ffi::AnyBuffer& codes, const ffi::AnyBuffer& params,
                                const ffi::AnyBuffer& exact, int exact_rows, const CacheShape& sizes,
                                const OperandFormat& format) {
  const std::string of = std::string(name) + " ";
  const int bits = format.bits, dim = format.dim, group = format.group;
  if (bits != 2 && bits != 4 && bits != 16) return invalid(of + "bits must be 2, 4 or 16");
  if (dim <= 0 || dim > 256 || dim % 16 != 0) return invalid(of + "head dim must be a multiple of 16, up to 256");
  if (codes.element_type() != ffi::U8) return invalid(of + "codes must be uint8");
  const int64_t heads = int64_t{sizes.pools} * sizes.layers * sizes.pages * sizes.num_kv_heads;
  if (static_cast<int64_t>(codes.element_count()) != heads * format.page_bytes(sizes.page_size))
    return invalid(of + "codes have " + std::to_string(codes.element_count()) + " bytes, the format needs " +
                   std::to_string(heads * format.page_bytes(sizes.page_size)));
  if (bits != 16) {
    const bool known_group =
        format.per_channel ? group == 32 || group == 64 : group == dim || group == 32 || group == 64 || group == 128;
    if (!known_group || (format.per_channel ? sizes.page_size : dim) % group != 0)
      return invalid(of + "group " + std::to_string(group) + " is not one of this layout's");
    if (static_cast<int64_t>(params.element_count()) != heads * format.page_pairs(sizes.page_size) * 2)
      return invalid(of + "params have the wrong number of elements");
  }
  const int64_t slots = int64_t{sizes.windows.sink} + sizes.windows.ring;
  if (sizes.windows.ring > 0 &&
      (exact.element_type() != ffi::BF16 || static_cast<int64_t>(exact.element_count()) !=
                                                int64_t{exact_rows} * sizes.layers * sizes.num_kv_heads * slots * dim))
    return invalid(of + "exact array has the wrong dtype or size");
  return ffi::Error::Success();
}

// What any call on a cache says of it, in buffers and attributes with the names of DecodeCall; all of CacheShape but
// the batch.
template <class Call>
ffi::Error fill_cache(const Call& call, CacheShape* p) {
  const FormatAttributes& given = call.attributes;
  const auto codes = call.key_codes.dimensions();
  const auto table = call.page_table.dimensions();
  if (codes.size() < 6 || call.value_codes.dimensions().size() != codes.size() || table.size() < 2)
    return invalid("wrong rank of codes or page_table");
  const bool key_quantized = given.key_bits != 16, value_quantized = given.value_bits != 16;
  const ffi::DataType param_dtype = (key_quantized ? call.key_params : call.value_params).element_type();
  if ((key_quantized || value_quantized) && param_dtype != ffi::F16 && param_dtype != ffi::F32)
    return invalid("params must be float16 or float32");
  if (key_quantized && value_quantized && call.value_params.element_type() != param_dtype)
    return invalid("key and value params must have the same dtype");
  p->param_dtype = param_dtype == ffi::F32 ? DType::kF32 : DType::kF16;

  const size_t lead = codes.size() - 6;
  p->pools = leading_rows(call.key_codes, 5);
  p->layers = codes[lead + 1], p->pages = codes[lead + 2], p->num_kv_heads = codes[lead + 3];
  p->page_size = codes[lead + 4];
  p->table_width = table.back();
  if (p->page_size % kTileTokens != 0) return invalid("page_size must be a multiple of 64");

  const int key_tokens = key_quantized && given.key_per_channel ? given.key_group : 1;
  const int value_tokens = value_quantized && given.value_per_channel ? given.value_group : 1;
  p->windows = {given.sink_tokens, given.recent_tokens, std::lcm(key_tokens, value_tokens), 0};
  if (p->windows.group > 1 || p->windows.sink > 0 || p->windows.recent > 0) {
    const auto exact = call.exact_key.dimensions();
    if (exact.size() < 5) return invalid("exact arrays must have rank 5");
    p->windows.ring = static_cast<int>(exact[exact.size() - 2]) - p->windows.sink;
    if (p->windows.ring <= 0) return invalid("exact arrays hold no ring");
  }
  return ffi::Error::Success();
}

inline ffi::Error fill_operand(const char* name, const ffi::AnyBuffer& codes, const ffi::AnyBuffer& params,
                               const ffi::AnyBuffer& exact, const OperandFormat& format, const DecodeParams& sizes,
                               OperandParams* operand) {
  static_cast<OperandFormat&>(*operand) = format;
  operand->codes = static_cast<const uint8_t*>(codes.untyped_data());
  operand->params = format.bits == 16 ? nullptr : params.untyped_data();
  operand->exact = sizes.windows.ring > 0 ? static_cast<const uint16_t*>(exact.untyped_data()) : nullptr;
  return check_operand(name, codes, params, exact, sizes.exact_rows, sizes, format);
}

// Operands that were not given are other buffers, which are not looked at.
inline ffi::Error fill_features(const DecodeCall& call, const DecodeParams& sizes, Features* f) {
  const DecodeAttributes& given = call.attributes;
  *f = Features{};
  f->causal = given.is_causal != 0;
  f->window_left = given.window_left, f->window_right = given.window_right;
  f->soft_cap = given.logits_soft_cap;
  if (f->window_left < 0 || f->window_right < 0 || !(f->soft_cap >= 0))
    return invalid("windows and the soft cap must not be negative");
  if (given.has_sinks) {
    const auto dims = call.sinks.dimensions();
    if (call.sinks.element_type() != ffi::F32 || dims.size() != 2 || dims[1] != sizes.num_heads)
      return invalid("sinks must be float32 [rows, heads]");
    f->sinks = static_cast<const float*>(call.sinks.untyped_data());
    f->sink_rows = dims[0];
  }
  if (given.has_query_lengths) {
    if (call.query_lengths.element_type() != ffi::S32) return invalid("query_lengths must be int32");
    f->query_lengths = static_cast<const int32_t*>(call.query_lengths.untyped_data());
    f->query_length_rows = call.query_lengths.element_count();
  }
  if (given.has_tree_mask) {
    const auto dims = call.tree_mask.dimensions();
    if (call.tree_mask.element_type() != ffi::PRED || dims.size() != 3 || dims[1] != sizes.num_queries ||
        dims[2] != sizes.num_queries)
      return invalid("tree_mask must be bool [rows, queries, queries]");
    if (!f->causal) return invalid("tree_mask replaces the causal rule, which must not be off");
    f->tree_mask = static_cast<const uint8_t*>(call.tree_mask.untyped_data());
    f->tree_mask_rows = dims[0];
  }
  return ffi::Error::Success();
}

inline ffi::Error fill_params(const DecodeCall& call, DecodeParams* p) {
  *p = DecodeParams{};
  const DecodeAttributes& given = call.attributes;
  const auto q = call.q.dimensions();
  const auto out = call.out.dimensions();
  if (q.size() != 4 || out.size() != 4 || call.page_table.dimensions().size() != 2)
    return invalid("wrong rank of q, out or page_table");
  if (!std::equal(q.begin(), q.begin() + 3, out.begin()) ||
      static_cast<int64_t>(call.lse.element_count()) != q[0] * q[1] * q[2])
    return invalid("out and lse must have q's batch, queries and heads");
  switch (call.q.element_type()) {
    case ffi::F32: p->q_dtype = DType::kF32; break;
    case ffi::BF16: p->q_dtype = DType::kBF16; break;
    case ffi::F16: p->q_dtype = DType::kF16; break;
    default: return invalid("q must be float32, bfloat16 or float16");
  }
  if (auto cache = fill_cache(call, p); cache.failure()) return cache;

  p->batch = q[0], p->num_queries = q[1], p->num_heads = q[2];
  p->table_rows = call.page_table.dimensions()[0];
  p->length_rows = call.length.element_count(), p->layer_rows = call.layer.element_count();
  p->page_table = static_cast<const int32_t*>(call.page_table.untyped_data());
  p->length = static_cast<const int32_t*>(call.length.untyped_data());
  p->layer = static_cast<const int32_t*>(call.layer.untyped_data());
  p->q = call.q.untyped_data();
  p->out = call.out.untyped_data();
  p->lse = static_cast<float*>(call.lse.untyped_data());
  p->scale = given.scale;
  if (p->num_kv_heads == 0 || p->num_heads % p->num_kv_heads != 0)
    return invalid("query heads must be a multiple of KV heads");
  for (const ffi::AnyBuffer* ints : {&call.page_table, &call.length, &call.layer})
    if (ints->element_type() != ffi::S32) return invalid("page_table, length and layer must be int32");
  if (call.lse.element_type() != ffi::F32 || call.out.element_type() != call.q.element_type())
    return invalid("wrong result dtypes");

  const bool has_exact = p->windows.ring > 0;
  if (has_exact) p->exact_rows = call.exact_key.dimensions()[0];
  const auto features = fill_features(call, *p, &p->features);
  if (features.failure()) return features;
  const Features& f = p->features;
  for (int rows :
       {p->pools, p->table_rows, p->length_rows, p->layer_rows, has_exact ? p->exact_rows : 1,
        f.sinks ? f.sink_rows : 1, f.query_lengths ? f.query_length_rows : 1, f.tree_mask ? f.tree_mask_rows : 1})
    if (rows <= 0 || (p->batch > 0 && p->batch % rows != 0))
      return invalid("an operand of " + std::to_string(rows) + " rows does not divide the batch of " +
                     std::to_string(p->batch));

  auto key =
      fill_operand("key", call.key_codes, call.key_params, call.exact_key,
                   {given.key_bits, static_cast<int>(q[3]), given.key_group, given.key_per_channel != 0}, *p, &p->key);
  if (key.failure()) return key;
  return fill_operand("value", call.value_codes, call.value_params, call.exact_value,
                      {given.value_bits, static_cast<int>(out[3]), given.value_group, given.value_per_channel != 0}, *p,
                      &p->value);
}

// The buffers and attributes that follow the platform's own context arguments.
template <typename Binding>
auto bind_decode(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // q
      .template Arg<ffi::AnyBuffer>()  // key_codes
      .template Arg<ffi::AnyBuffer>()  // key_params
      .template Arg<ffi::AnyBuffer>()  // value_codes
      .template Arg<ffi::AnyBuffer>()  // value_params
      .template Arg<ffi::AnyBuffer>()  // page_table
      .template Arg<ffi::AnyBuffer>()  // length
      .template Arg<ffi::AnyBuffer>()  // layer
      .template Arg<ffi::AnyBuffer>()  // exact_key
      .template Arg<ffi::AnyBuffer>()  // exact_value
      .template Arg<ffi::AnyBuffer>()  // sinks
      .template Arg<ffi::AnyBuffer>()  // query_lengths
      .template Arg<ffi::AnyBuffer>()  // tree_mask
      .template Ret<ffi::AnyBuffer>()  // out
      .template Ret<ffi::AnyBuffer>()  // lse
      .template Attrs<DecodeAttributes>();
}

}  // namespace jax_foscar

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_foscar::FormatAttributes, StructMember<int32_t>("key_bits"),
                                      StructMember<int32_t>("key_group"), StructMember<int32_t>("key_per_channel"),
                                      StructMember<int32_t>("value_bits"), StructMember<int32_t>("value_group"),
                                      StructMember<int32_t>("value_per_channel"), StructMember<int32_t>("sink_tokens"),
                                      StructMember<int32_t>("recent_tokens"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_foscar::DecodeAttributes, StructMember<int32_t>("key_bits"),
                                      StructMember<int32_t>("key_group"), StructMember<int32_t>("key_per_channel"),
                                      StructMember<int32_t>("value_bits"), StructMember<int32_t>("value_group"),
                                      StructMember<int32_t>("value_per_channel"), StructMember<int32_t>("sink_tokens"),
                                      StructMember<int32_t>("recent_tokens"), StructMember<float>("scale"),
                                      StructMember<int32_t>("is_causal"), StructMember<int32_t>("window_left"),
                                      StructMember<int32_t>("window_right"), StructMember<float>("logits_soft_cap"),
                                      StructMember<int32_t>("has_sinks"), StructMember<int32_t>("has_query_lengths"),
                                      StructMember<int32_t>("has_tree_mask"));
