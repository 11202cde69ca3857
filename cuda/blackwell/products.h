// Warp 1, one thread: issues the products.  The scores of tile i + 1 come before the sums of tile i, so that the
// softmax of one tile runs beside the products of its neighbours.
#pragma once

#include "roles.h"

namespace jax_foscar::blackwell {

template <int kDim, class Machine>
class Products {
 public:
  [[gnu::always_inline]] JF_HOST_DEVICE Products(Machine& m, const DecodeParams& params, const SharedPlan& plan,
                                                 uint32_t base, int rows)
      : m_(m),
        plan_(plan),
        base_(base),
        keys4_(params.key.bits == 4),
        keys_(key_fold(params.key, rows)),
        values_(value_fold(params.value, rows)) {}

  // `new_queries`: this tile is the first of the next query set; `last_use`: it is the last of the current one.
  [[gnu::always_inline]] JF_HOST_DEVICE void issue_scores(bool new_queries, bool last_use) {
    wait_full(m_, Barrier::kKeysFull, scores_);
    if (new_queries) wait_full(m_, Barrier::kQueriesFull, queries_);
    // The slot's last scores are read: the weights made of them were waited for two tiles ago.
    m_.fence_after_sync();
    constexpr int kSteps = kDim / kMmaDepth;
    const int steps = kSteps / keys_.accumulators;
    const uint32_t b = m_.shared_address(plan_.queries_at(queries_.slot));
    const uint32_t a_shared = m_.shared_address(plan_.keys_at(scores_.slot));
    const uint32_t a_tensor = base_ + key_columns_at(scores_.slot);
    const uint32_t form = instruction_descriptor(keys4_ ? Element::kE4M3 : Element::kE2M1, keys_.columns);
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t d = base_ + scores_at(scores_.slot) + step / steps * keys_.columns;
      const bool accumulate = step % steps != 0;
      if (keys4_) {
        m_.multiply(d, a_tensor + 8 * step, b_descriptor(b, kDim, step), form, accumulate);
      } else {
        m_.multiply_shared(d, key_descriptor(a_shared, kDim, step), b_descriptor(b, kDim, step), form, accumulate);
      }
    }
    m_.commit(barrier_index(Barrier::kScoresFull, scores_.slot));
    if (last_use) {
      m_.commit(barrier_index(Barrier::kQueriesFree, queries_.slot));
      queries_.next(2);
    }
    scores_.next(2);
  }

  [[gnu::always_inline]] JF_HOST_DEVICE void issue_sums() {
    wait_full(m_, Barrier::kValuesFull, sums_);
    wait_full(m_, Barrier::kWeightsFull, sums_);
    wait_free(m_, Barrier::kSumsFree, read_);
    m_.fence_after_sync();
    constexpr int kSteps = kTokens / kMmaDepth;
    const int steps = kSteps / values_.accumulators;
    const uint32_t b = m_.shared_address(plan_.weights_at(sums_.slot));
    const uint32_t a = base_ + value_columns_at(sums_.slot);
    const uint32_t form = instruction_descriptor(Element::kE4M3, values_.columns);
    for (int step = 0; step < kSteps; ++step) {
      // Never across tiles: codes are all positive and the sums truncate, so that the error would grow (DESIGN 1).
      m_.multiply(base_ + sums_at() + step / steps * values_.columns, a + 8 * step, b_descriptor(b, kTokens, step),
                  form, step % steps != 0);
    }
    m_.commit(barrier_index(Barrier::kSumsFull, sums_.slot));
    sums_.next(2), read_.next(1);
  }

 private:
  Machine& m_;
  const SharedPlan& plan_;
  const uint32_t base_;
  const bool keys4_;
  const Fold keys_, values_;
  Turn scores_, queries_, sums_, read_;
};

template <int kDim, int kRows, class Machine>
[[gnu::always_inline]] JF_HOST_DEVICE inline void issue_products(Machine& m, const DecodeParams& params,
                                                                 const Launch& launch, Own<kRows>& own) {
  Products<kDim, Machine> products(m, params, launch.shared, own.tensor_base, kRows);
  const bool per_channel = params.key.per_channel;
  bool ahead = false;
  for (Walk walk(params, own.start); !walk.done(); walk.next()) {
    products.issue_scores(per_channel || walk.begins(), per_channel || walk.ends());
    if (ahead) products.issue_sums();
    ahead = true;
  }
  if (ahead) products.issue_sums();
}

template <int kDim, int kRows, class Machine>
[[gnu::always_inline]] JF_HOST_DEVICE inline void run_products(Machine& m, const DecodeParams& params,
                                                               const Launch& launch, Own<kRows>& own) {
  if (m.lane() == 0) issue_products<kDim, kRows>(m, params, launch, own);
  m.sync_warp();
}

}  // namespace jax_foscar::blackwell
