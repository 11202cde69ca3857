// Decode attention on the host: work items are (row, KV head, split of the row's tokens).
//
// Which tokens a query sees and where they lie is worked out here; the kernel (kernel_impl.h, picked once for the
// machine) is handed one span of 64 tokens after another.  How a row is split depends on its own length alone, and the
// splits are merged in order, so that its result does not depend on the batch or on the threads.
#include "decode_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "dtype.h"
#include "kernel.h"
#include "parallel.h"
#include "sinks.h"

namespace jax_foscar::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int kMinSplitTokens = 2048;
constexpr int kMaxSplits = 8;

// ---- Which kernel
// -----------------------------------------------------------------------------------------------------

struct Choice {
  const Kernel* kernel;
  std::string error;  // what is wrong with JAX_FOSCAR_CPU_ISA; the kernel is then the one it would be without
};

Choice choose_kernel() {
  std::vector<const Kernel*> kernels = {&kBaselineKernel};  // those this machine runs, best last
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2) kernels.push_back(&kAvx2Kernel);
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    kernels.push_back(&kAvx512Kernel);
#endif
  const char* wanted = std::getenv("JAX_FOSCAR_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return {kernels.back(), ""};
  std::string names;
  for (const Kernel* kernel : kernels) {
    if (std::string_view(wanted) == kernel->name) return {kernel, ""};
    names += std::string(names.empty() ? "" : ", ") + kernel->name;
  }
  return {kernels.back(),
          "JAX_FOSCAR_CPU_ISA is '" + std::string(wanted) + "', but this machine and build have only: " + names};
}

const Choice& choice() {
  static const Choice chosen = choose_kernel();
  return chosen;
}

// ---- Shapes
// -----------------------------------------------------------------------------------------------------------

Operand operand_shape(const OperandParams& x, DType param_dtype) {
  Operand shape = {};
  shape.bits = x.bits, shape.dim = x.dim, shape.padded_dim = padded_dim(x.dim);
  shape.blocks = x.bits == 16 ? 0 : num_blocks(x.bits, x.dim);
  shape.per_channel = x.bits != 16 && x.per_channel;
  shape.group = x.bits == 16 ? x.dim : x.group;
  shape.groups = x.bits == 16 || x.per_channel ? 1 : x.dim / x.group;
  shape.half_params = param_dtype == DType::kF16;
  return shape;
}

// The formats there are; a call with any other gets NaN.
bool is_supported(const OperandParams& x) {
  if (x.dim <= 0 || x.dim % 16 != 0) return false;
  if (x.bits == 16) return true;
  if (x.per_channel) return x.group == 32 || (x.group > 0 && x.group % kTileTokens == 0);
  return x.group == x.dim || (x.group > 0 && x.group % 32 == 0);
}

// ---- Rows
// -------------------------------------------------------------------------------------------------------------

// What is the same for all heads of a row.
struct Row {
  RowQueries queries;
  bool valid;
  int layer;
  int first_paged, paged;  // quantized tokens that some query sees are first_paged <= t < paged
  int splits;
  int64_t first_item;
};

Row plan_row(const DecodeParams& p, int row) {
  const Windows& w = p.windows;
  Row plan = {};
  plan.queries = p.row_queries(row);
  plan.layer = p.layer[p.row_entry(row, p.layer_rows)];
  plan.splits = 1;
  const int n = plan.queries.length;
  if (int64_t{n} > int64_t{p.table_width} * p.page_size || plan.layer < 0 || plan.layer >= p.layers) return plan;
  plan.valid = true;
  if (n == 0) return plan;
  plan.paged = std::max(std::min(std::max(w.boundary(n - 1, n), w.quantized_length(n)), n), 0);
  plan.first_paged = std::max(w.sink, first_visible(p.features, plan.queries));
  if (plan.paged <= plan.first_paged) return plan;
  const int32_t* table = p.page_table + int64_t{p.row_entry(row, p.table_rows)} * p.table_width;
  for (int i = plan.first_paged / p.page_size; i <= (plan.paged - 1) / p.page_size; ++i)
    plan.valid &= static_cast<uint32_t>(table[i]) < static_cast<uint32_t>(p.pages);
  plan.splits = std::clamp((plan.paged - plan.first_paged) / kMinSplitTokens, 1, kMaxSplits);
  return plan;
}

// Results of a row and head that is split: [splits][T * N / K][max, sum, out of value.dim], alive from the first split
// that ends to the last, which merges them.
struct Partials {
  std::atomic<float*> data{nullptr};
  std::atomic<int> ended{0};
};

class Call {
 public:
  Call(const DecodeParams& params, const Kernel& kernel)
      : p_(params),
        kernel_(kernel),
        shape_{operand_shape(params.key, params.param_dtype), operand_shape(params.value, params.param_dtype),
               params.features.soft_cap},
        group_(params.num_heads / params.num_kv_heads),
        queries_(params.num_queries * group_),
        supported_(is_supported(params.key) && is_supported(params.value)) {
    bool split = false;
    rows_.reserve(p_.batch);
    for (int row = 0; row < p_.batch; ++row) {
      rows_.push_back(plan_row(p_, row));
      rows_.back().valid &= supported_;
      if (!rows_.back().valid) rows_.back().splits = 1;
      rows_.back().first_item = items_;
      items_ += int64_t{rows_.back().splits} * p_.num_kv_heads;
      split |= rows_.back().splits > 1;
    }
    if (split) partials_ = std::make_unique<Partials[]>(int64_t{p_.batch} * p_.num_kv_heads);
  }

  int64_t items() const { return items_; }
  int64_t scratch_floats() const { return 4 * (query_floats() + out_floats()) + kernel_scratch(); }

  void run(float* scratch, int64_t item) {
    const auto after = std::upper_bound(rows_.begin(), rows_.end(), item,
                                        [](int64_t i, const Row& row) { return i < row.first_item; });
    const int row = static_cast<int>(after - rows_.begin()) - 1;
    const Row& plan = rows_[row];
    const int head = static_cast<int>((item - plan.first_item) / plan.splits);
    const int split = static_cast<int>((item - plan.first_item) % plan.splits);
    if (!plan.valid) {
      for (int query = 0; query < queries_; ++query) fill_query(row, head, query, is_real(row, query) ? kNaN : 0);
      return;
    }
    float* partial = plan.splits > 1 ? partials(row, head) + split * partial_floats() : nullptr;
    for (int query = 0; query < queries_; query += kBlockRows) run_block(scratch, row, head, split, query, partial);
    if (partial) end_split(row, head);
  }

 private:
  int64_t query_floats() const { return shape_.key.padded_dim; }
  int64_t out_floats() const { return (shape_.value.dim + 15) / 16 * 16; }
  int64_t kernel_scratch() const { return supported_ ? kernel_.scratch_floats(shape_) : 0; }
  int64_t partial_floats() const { return int64_t{queries_} * (2 + p_.value.dim); }

  // Index of a query row of a KV head in [B, T, N].
  int64_t query_index(int row, int head, int query) const {
    return (int64_t{row} * p_.num_queries + query / group_) * p_.num_heads + head * group_ + query % group_;
  }

  // Whether a query row is not padding.
  bool is_real(int row, int query) const { return query / group_ < rows_[row].queries.count; }

  void fill_query(int row, int head, int query, float x) const {
    const int64_t at = query_index(row, head, query);
    for (int d = 0; d < p_.value.dim; ++d) store_float(p_.out, at * p_.value.dim + d, p_.q_dtype, x);
    p_.lse[at] = x == 0 ? -kInfinity : x;
  }

  void write_query(int row, int head, int query, float max, float sum, const float* out) const {
    const int64_t at = query_index(row, head, query);
    float factor = 1;
    if (p_.features.sinks && is_real(row, query))
      factor = join_sink(p_.sink(row, at % p_.num_heads), &max, &sum, [](float x) { return expf(x); });
    if (sum == 0) return fill_query(row, head, query, 0);
    for (int d = 0; d < p_.value.dim; ++d)
      store_float(p_.out, at * p_.value.dim + d, p_.q_dtype, factor * out[d] / sum);
    p_.lse[at] = max + std::log(sum);
  }

  // Queries first .. first + 3 of a head over one split of its tokens.
  void run_block(float* scratch, int row, int head, int split, int first, float* partial) const {
    Block block = {};
    bool finite[kBlockRows];
    block.query = scratch;
    float* out = scratch + 4 * query_floats();
    block.scratch = out + 4 * out_floats();
    block.rows = std::min(kBlockRows, queries_ - first);
    std::fill_n(block.query, 4 * query_floats(), 0.0f);
    for (int i = 0; i < block.rows; ++i) {
      // What stands in padding is not read.
      finite[i] =
          !is_real(row, first + i) || load_query(query_index(row, head, first + i), block.query + i * query_floats());
      set_visible(rows_[row].queries, (first + i) / group_, i, &block);
    }
    kernel_.begin(shape_, &block);
    attend_pages(row, head, split, &block);
    if (split == rows_[row].splits - 1 && p_.windows.ring > 0) attend_exact(row, head, &block);
    kernel_.finish(shape_, block, out);
    for (int i = 0; i < block.rows; ++i) {
      const float* sums = out + i * p_.value.dim;
      const float max = finite[i] ? block.max[i] : 0, sum = finite[i] ? block.sum[i] : kNaN;
      if (!partial) {
        write_query(row, head, first + i, max, sum, sums);
        continue;
      }
      float* to = partial + (first + i) * int64_t{2 + p_.value.dim};
      to[0] = max, to[1] = sum;
      std::copy_n(sums, p_.value.dim, to + 2);
    }
  }

  // A query times the scale; if it is not finite, zeros and false.
  bool load_query(int64_t index, float* to) const {
    bool finite = true;
    for (int d = 0; d < p_.key.dim; ++d) {
      const float x = load_float(p_.q, index * p_.key.dim + d, p_.q_dtype);
      finite &= std::isfinite(x);
      to[d] = x * p_.scale;
    }
    if (!finite) std::fill_n(to, p_.key.dim, 0.0f);
    return finite;
  }

  void set_visible(const RowQueries& queries, int query, int i, Block* block) const {
    const Windows& w = p_.windows;
    const Visible v = visible(p_.features, w, queries, query);
    const bool exact = w.ring > 0;
    block->first[kSink][i] = v.begin;
    block->last[kSink][i] = exact ? std::min(w.sink, v.end) : 0;
    block->first[kPaged][i] = std::max(w.sink, v.begin);
    block->last[kPaged][i] = std::min(v.boundary, v.end);
    block->first[kRecent][i] = std::max({w.sink, v.boundary, v.begin});
    block->last[kRecent][i] = exact ? v.end : 0;
    block->drafts[i] = v.drafts;
    if (v.drafts) block->first_draft = v.first_draft;
  }

  void attend_pages(int row, int head, int split, Block* block) const {
    const Row& plan = rows_[row];
    if (plan.paged <= plan.first_paged) return;
    const int begin = plan.first_paged / kTileTokens, tiles = (plan.paged + kTileTokens - 1) / kTileTokens - begin;
    const int first = begin + static_cast<int>(int64_t{tiles} * split / plan.splits);
    const int last = begin + static_cast<int>(int64_t{tiles} * (split + 1) / plan.splits);
    Span next = paged_span(row, head, first);
    for (int tile = first; tile < last; ++tile) {
      Span span = next;
      if (tile + 1 < last) {
        next = paged_span(row, head, tile + 1);
        span.next_key = next.key_codes, span.next_value = next.value_codes;
      }
      kernel_.attend(shape_, span, block);
    }
  }

  Span paged_span(int row, int head, int tile) const {
    const int in_page = tile * kTileTokens % p_.page_size;
    const int32_t* table = p_.page_table + int64_t{p_.row_entry(row, p_.table_rows)} * p_.table_width;
    const int id = table[tile * kTileTokens / p_.page_size];
    const int64_t page = p_.page_index(row, rows_[row].layer, id) * p_.num_kv_heads + head;
    Span span = {};
    span.region = kPaged;
    span.first = tile * kTileTokens, span.count = kTileTokens;
    span.key_codes = codes(p_.key, page, in_page), span.value_codes = codes(p_.value, page, in_page);
    span.key_params = pairs(p_.key, shape_.key, page, in_page);
    span.value_params = pairs(p_.value, shape_.value, page, in_page);
    return span;
  }

  const uint8_t* codes(const OperandParams& x, int64_t page, int in_page) const {
    return x.codes + page * x.page_bytes(p_.page_size) + int64_t{in_page} * token_bytes(x.bits, x.dim);
  }

  const void* pairs(const OperandParams& x, const Operand& shape, int64_t page, int in_page) const {
    if (x.bits == 16) return nullptr;
    const int64_t first = shape.per_channel ? int64_t{in_page / x.group} * x.dim : int64_t{in_page} * shape.groups;
    const int64_t pair_bytes = p_.param_dtype == DType::kF16 ? 4 : 8;
    return static_cast<const char*>(x.params) + (page * x.page_pairs(p_.page_size) + first) * pair_bytes;
  }

  void attend_exact(int row, int head, Block* block) const {
    const Windows& w = p_.windows;
    const int n = rows_[row].queries.length;
    for (int t = 0; t < std::min(w.sink, n); t += kSpanTokens)
      attend_slots(row, head, kSink, t, std::min(kSpanTokens, std::min(w.sink, n) - t), block);
    int t = n;  // the oldest that any row sees
    for (int i = 0; i < block->rows; ++i)
      if (block->first[kRecent][i] < block->last[kRecent][i]) t = std::min(t, block->first[kRecent][i]);
    for (int count; t < n; t += count) {
      count = std::min({kSpanTokens, n - t, w.ring - t % w.ring});
      attend_slots(row, head, kRecent, t, count, block);
    }
  }

  void attend_slots(int row, int head, Region region, int first, int count, Block* block) const {
    const int64_t entry = int64_t{p_.row_entry(row, p_.exact_rows)} * p_.layers + rows_[row].layer;
    const int64_t slots = p_.windows.sink + p_.windows.ring;
    const int64_t slot = (entry * p_.num_kv_heads + head) * slots + p_.windows.slot(first);
    Span span = {};
    span.region = region;
    span.first = first, span.count = count;
    span.key_codes = reinterpret_cast<const uint8_t*>(p_.key.exact + slot * p_.key.dim);
    span.value_codes = reinterpret_cast<const uint8_t*>(p_.value.exact + slot * p_.value.dim);
    kernel_.attend(shape_, span, block);
  }

  float* partials(int row, int head) {
    std::atomic<float*>& data = partials_[int64_t{row} * p_.num_kv_heads + head].data;
    float* ours = data.load(std::memory_order_acquire);
    if (ours) return ours;
    float* fresh = new float[rows_[row].splits * partial_floats()];
    if (data.compare_exchange_strong(ours, fresh, std::memory_order_acq_rel)) return fresh;
    delete[] fresh;
    return ours;
  }

  // The last split of a row and head to end merges them all, in order.
  void end_split(int row, int head) {
    Partials& partials = partials_[int64_t{row} * p_.num_kv_heads + head];
    const int splits = rows_[row].splits;
    if (partials.ended.fetch_add(1, std::memory_order_acq_rel) + 1 != splits) return;
    const std::unique_ptr<const float[]> data(partials.data.load(std::memory_order_acquire));
    std::vector<float> out(p_.value.dim);
    for (int query = 0; query < queries_; ++query) {
      const auto part = [&](int split) { return &data[split * partial_floats() + query * int64_t{2 + p_.value.dim}]; };
      float max = -kInfinity, sum = 0;
      for (int split = 0; split < splits; ++split) max = std::max(max, part(split)[0]);
      std::fill(out.begin(), out.end(), 0.0f);
      for (int split = 0; split < splits; ++split) {
        const float* from = part(split);
        if (from[1] == 0) continue;  // saw nothing
        const float weight = from[0] == max ? 1 : std::exp(from[0] - max);
        sum += weight * from[1];
        for (int d = 0; d < p_.value.dim; ++d) out[d] += weight * from[2 + d];
      }
      write_query(row, head, query, max, sum, out.data());
    }
  }

  const DecodeParams p_;
  const Kernel& kernel_;
  const Shape shape_;
  const int group_, queries_;  // query heads and query rows of a KV head
  const bool supported_;
  std::vector<Row> rows_;
  int64_t items_ = 0;
  std::unique_ptr<Partials[]> partials_;
};

}  // namespace

std::string_view instruction_set() {
  if (!choice().error.empty()) throw std::invalid_argument(choice().error);
  return choice().kernel->name;
}

void decode_attention(const DecodeParams& params, int helpers, const Schedule& schedule) {
  if (params.batch <= 0 || params.num_queries <= 0 || params.num_heads <= 0) return;
  Call call(params, *choice().kernel);
  parallel_for(call.items(), helpers, schedule, call.scratch_floats(),
               [&call](float* scratch, int64_t item) { call.run(scratch, item); });
}

}  // namespace jax_foscar::cpu
