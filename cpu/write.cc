// Writing new tokens on the host: a work item is 64 tokens of one row, KV head and operand.
//
// The item's tokens that become quantized are read first, as floats, from k or v or the ring; then the newest tokens
// are put into the ring's slots (write_params.h says why in this order and by the same item).
#include "write.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "parallel.h"
#include "quantize.h"

namespace jax_foscar::cpu {
namespace {

constexpr int64_t kItemsWorthHelp = 8;

// Tokens [begin, end) of a tile, of which [paged_begin, paged_end) become quantized.
struct Item {
  int row, head, tile;
  bool is_value;
};

class Call {
 public:
  explicit Call(const WriteParams& params) : p_(params) {
    for (int row = 0; row < p_.batch; ++row) {
      rows_.push_back(p_.plan(row));
      const RowWrite& w = rows_.back();
      bool refused = w.refused;
      for (int i = p_.first_page(w); i < p_.end_page(w); ++i) refused |= p_.page(row, w.layer, i) < 0;
      p_.overflowed[row] |= refused;
      if (w.start == w.length) continue;
      for (int tile = w.first / kTileTokens; tile <= (w.length - 1) / kTileTokens; ++tile)
        for (int head = 0; head < p_.num_kv_heads; ++head)
          for (const bool is_value : {false, true}) items_.push_back({row, head, tile, is_value});
    }
  }

  int64_t items() const { return items_.size(); }
  int64_t scratch_floats() const { return kTileTokens * std::max(p_.key.dim, p_.value.dim); }

  void run(float* scratch, const Item& item) const {
    const WriteOperand& x = item.is_value ? p_.value : p_.key;
    const RowWrite& w = rows_[item.row];
    const int tile = item.tile * kTileTokens, begin = std::max(tile, w.first);
    const int end = std::min(tile + kTileTokens, w.length);
    const int paged_begin = std::max(begin, p_.windows.sink), paged_end = std::min(end, w.last);
    const int64_t page = paged_begin < paged_end ? p_.page(item.row, w.layer, tile / p_.page_size) : -1;
    if (page >= 0) {
      for (int t = paged_begin; t < paged_end; ++t) load(x, w, item, t, scratch + (t - tile) * x.dim);
      const int64_t page_head = page * p_.num_kv_heads + item.head;
      uint8_t* codes = x.codes + page_head * x.page_bytes(p_.page_size);
      if (x.bits == 16) {
        uint16_t* to = reinterpret_cast<uint16_t*>(codes) + paged_begin % p_.page_size * x.dim;
        const float* from = scratch + (paged_begin - tile) * x.dim;
        std::transform(from, from + (paged_end - paged_begin) * x.dim, to, float_to_bf16);
      } else {
        quantize(x, item.is_value, codes, page_head, paged_begin, paged_end, scratch);
      }
    }
    if (x.exact == nullptr) return;
    for (int t = begin; t < end; ++t) {
      if (t < p_.windows.sink && t >= w.start) store_exact(x, w, item, t, t);
      const int newest = p_.newest_in_slot(w, t);
      if (newest >= 0) store_exact(x, w, item, newest, p_.windows.slot(newest));
    }
  }

  const Item& item(int64_t i) const { return items_[i]; }

 private:
  // A token that becomes quantized: exact ones in between are bfloat16, so that how tokens arrive does not matter.
  void load(const WriteOperand& x, const RowWrite& w, const Item& item, int t, float* to) const {
    if (t < w.start) {
      const uint16_t* from = x.exact + p_.exact_at(item.row, w, item.head, p_.windows.slot(t), x.dim);
      std::transform(from, from + x.dim, to, bf16_to_float);
      return;
    }
    const int64_t at = p_.new_at(item.row, w, item.head, t, x.dim);
    for (int d = 0; d < x.dim; ++d) to[d] = load_float(x.tokens, at + d, x.token_dtype);
    if (x.exact != nullptr && x.token_dtype != DType::kBF16)
      std::transform(to, to + x.dim, to, [](float value) { return bf16_to_float(float_to_bf16(value)); });
  }

  void store_exact(const WriteOperand& x, const RowWrite& w, const Item& item, int t, int slot) const {
    const int64_t at = p_.new_at(item.row, w, item.head, t, x.dim);
    uint16_t* to = x.exact + p_.exact_at(item.row, w, item.head, slot, x.dim);
    if (x.token_dtype == DType::kBF16) {
      std::memcpy(to, static_cast<const uint16_t*>(x.tokens) + at, x.dim * sizeof(uint16_t));
    } else {
      for (int d = 0; d < x.dim; ++d) to[d] = float_to_bf16(load_float(x.tokens, at + d, x.token_dtype));
    }
  }

  // Tokens [begin, end) of one tile, which stand in `tokens` from the tile's first on.
  void quantize(const WriteOperand& x, bool is_value, uint8_t* codes, int64_t page_head, int begin, int end,
                const float* tokens) const {
    const int page_first = begin / p_.page_size * p_.page_size, tile = begin / kTileTokens * kTileTokens;
    const int64_t pairs = page_head * x.page_pairs(p_.page_size);
    Affine groups[256];  // of one token, or of one group of tokens: at most one a channel
    for (int t = begin, next; t < end; t = next) {
      next = x.per_channel ? std::min(t / x.group * x.group + x.group, end) : t + 1;
      const int channels = x.per_channel ? 1 : x.group;
      for (int d = 0; d < x.dim; d += channels) {
        Range range;
        for (int token = t; token < next; ++token)
          for (int i = 0; i < channels; ++i) range.add(tokens[(token - tile) * x.dim + d + i]);
        const int64_t index = pairs + x.pair_index(t - page_first, d);
        const Pair pair = make_pair(range, x.bits, p_.param_dtype);
        store_pair(pair, p_.param_dtype, x.params, index);
        std::fill_n(groups + d, channels, pair.affine);
      }
      for (int token = t; token < next; ++token)
        pack(x, is_value, codes, token - page_first, tokens + (token - tile) * x.dim, groups);
    }
  }

  // One token's codes into its own bytes; a byte's lowest field is that of its first channel.
  void pack(const WriteOperand& x, bool is_value, uint8_t* page, int token, const float* values,
            const Affine* groups) const {
    for (int d = 0; d < x.dim; ++d) {
      const CodeAddress at = is_value ? value_address(x.bits, x.dim, token, d) : key_address(x.bits, x.dim, token, d);
      const uint32_t bits = code(values[d], groups[d], x.bits) << at.shift;
      page[at.byte] = static_cast<uint8_t>(at.shift == 0 ? bits : page[at.byte] | bits);
    }
  }

  const WriteParams p_;
  std::vector<RowWrite> rows_;
  std::vector<Item> items_;
};

}  // namespace

void write(const WriteParams& params, int helpers, const Schedule& schedule) {
  if (params.batch <= 0 || params.num_tokens <= 0) return;
  const Call call(params);
  const bool few = call.items() * params.num_tokens < 64 * kItemsWorthHelp;
  parallel_for(call.items(), few ? 0 : helpers, schedule, call.scratch_floats(),
               [&call](float* scratch, int64_t i) { call.run(scratch, call.item(i)); });
}

}  // namespace jax_foscar::cpu
