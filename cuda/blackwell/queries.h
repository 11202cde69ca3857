// Warps 2 and 3: the queries as B of the scores, in four E4M3 parts.
//
// Keys per token: once an item; what the tensor core saw of a query, not the query, is summed for the offsets.  Keys
// per channel: for every tile and token group, Q * scale, and the f32 sum of Q * offset.
#pragma once

#include <cstddef>

#include "roles.h"

namespace jax_foscar::blackwell {

template <int kDim, int kRows, class Machine>
class Queries {
 public:
  static constexpr int kEach = kDim / (32 * kQueryWarps);  // channels a thread

  [[gnu::always_inline]] JF_HOST_DEVICE Queries(Machine& m, const DecodeParams& params, const SharedPlan& plan,
                                                Own<kRows>& own)
      : m_(m), params_(params), plan_(plan), own_(own), warp_(m.warp() - kQueryWarp), key_(params.key) {}

  [[gnu::always_inline]] JF_HOST_DEVICE void load(int row) {
    const int ratio = params_.num_heads / params_.num_kv_heads, real = params_.num_queries * ratio;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t query = int64_t{row} * params_.num_queries + r / ratio;
      const int64_t index = query * params_.num_heads + own_.start.kv_head * ratio + r % ratio;
      uint32_t largest = 0;
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        q_[e][r] = r < real ? load_float(params_.q, index * kDim + channel(e), params_.q_dtype) : 0.0f;
        largest = max(largest, q_[e][r]);
      }
      largest = m_.warp_max(largest);
      if (m_.lane() == 0) own_.row_largest[warp_][r] = largest;
    }
  }

  // One query set; `stage` is that of the tile, where keys are per channel.
  [[gnu::always_inline]] JF_HOST_DEVICE void build(int stage, int slot) {
    const Fold fold = key_fold(key_, kRows);
    for (int set = 0; set < fold.sets; ++set) measure(stage, set);
    m_.sync_queries();
    // What `measure` left is read before the second barrier, behind which the other warp may measure the next set.
    const int factors_at = plan_.queries_at(slot) + plan_.factors_at, thread = 32 * warp_ + m_.lane();
    const int group = thread / kRows, row = thread % kRows;
    if (group < fold.sets) store_factors(group, row, factors_at);
    for (int set = 0; set < fold.sets; ++set) split_set(stage, set, plan_.queries_at(slot));
    m_.sync_queries();
    if (!key_.per_channel && group < fold.accumulators) store_seen(group, row, factors_at);
    m_.fence_async();
  }

 private:
  using Parts = SomePartPairs<kQueryParts>;

  [[gnu::always_inline]] JF_HOST_DEVICE static uint32_t max(uint32_t largest, float x) {
    const uint32_t magnitude = bits_of_float(x) & 0x7fffffff;
    return magnitude > largest ? magnitude : largest;
  }
  [[gnu::always_inline]] JF_HOST_DEVICE int channel(int e) const { return 32 * (kQueryWarps * e + warp_) + m_.lane(); }
  [[gnu::always_inline]] JF_HOST_DEVICE Pair pair(int stage, int set, int e) const {
    if (!key_.per_channel) return {1.0f, 0.0f};
    return load_pair(m_, plan_.key_pairs_at(stage) + (set * kDim + channel(e)) * kPairBytes);
  }
  [[gnu::always_inline]] JF_HOST_DEVICE SplitScale scale(int set, int r) const {
    const uint32_t one = own_.query_largest[0][set][r], other = own_.query_largest[1][set][r];
    return split_scale(one > other ? one : other);
  }

  [[gnu::always_inline]] JF_HOST_DEVICE void measure(int stage, int set) {
    Pair pairs[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) pairs[e] = pair(stage, set, e);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      uint32_t largest = 0;
      float offset = 0.0f;
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        largest = max(largest, q_[e][r] * pairs[e].scale);
        offset += q_[e][r] * pairs[e].offset;
      }
      largest = m_.warp_max(largest);
      if (key_.per_channel) offset = warp_sum(m_, offset);
      if (m_.lane() == 0) own_.query_largest[warp_][set][r] = largest, own_.query_offsets[warp_][set][r] = offset;
    }
  }

  [[gnu::always_inline]] JF_HOST_DEVICE void split_set(int stage, int set, int operand_at) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const Pair affine = pair(stage, set, e);
      Parts parts[kRows / 2];
#pragma unroll
      for (int r = 0; r < kRows; r += 2) {
        const SplitScale low = scale(set, r), high = scale(set, r + 1);
        parts[r / 2] = split_pair<kQueryParts>(q_[e][r] * affine.scale * low.up, q_[e][r + 1] * affine.scale * high.up);
        if (!key_.per_channel) {
          const FloatPair seen = join_pair(parts[r / 2]);
          const float low_sum = warp_sum(m_, seen.low * low.down), high_sum = warp_sum(m_, seen.high * high.down);
          float* const sums = own_.query_sums[kQueryWarps * e + warp_];
          if (m_.lane() == 0) sums[r] = low_sum, sums[r + 1] = high_sum;
        }
      }
      store_parts<kRows>(m_, operand_at, kDim, key_k(key_.bits, channel(e)), set, parts);
    }
  }

  [[gnu::always_inline]] JF_HOST_DEVICE float to_logit() const { return params_.scale * kLog2E; }
  [[gnu::always_inline]] JF_HOST_DEVICE static int factor_at(int group, int r) { return 4 * (group * kRows + r); }

  [[gnu::always_inline]] JF_HOST_DEVICE void store_factors(int set, int r, int at) {
    using Factors = QueryFactors<kRows>;
    m_.store(at + factor_at(set, r), scale(set, r).down * (to_logit() / key_code(key_.bits)));
    if (key_.per_channel) {
      const float sum = own_.query_offsets[0][set][r] + own_.query_offsets[1][set][r];
      m_.store(at + static_cast<int>(offsetof(Factors, offset)) + factor_at(set, r), sum * to_logit());
    }
    if (set == 0) {
      const uint32_t one = own_.row_largest[0][r], other = own_.row_largest[1][r];
      m_.store(at + static_cast<int>(offsetof(Factors, finite)) + 4 * r,
               one < 0x7f800000 && other < 0x7f800000 ? 1.0f : 0.0f);
    }
  }
  [[gnu::always_inline]] JF_HOST_DEVICE void store_seen(int group, int r, int at) {
    float sum = 0.0f;
    for (int b = 0; b < key_.group / 32; ++b) sum += own_.query_sums[key_.group / 32 * group + b][r];
    m_.store(at + static_cast<int>(offsetof(QueryFactors<kRows>, offset)) + factor_at(group, r), sum * to_logit());
  }

  [[gnu::always_inline]] JF_HOST_DEVICE static FloatPair join_pair(const Parts& parts) {
    FloatPair sum = {0.0f, 0.0f};
#pragma unroll
    for (int p = kQueryParts; p-- > 0;) {
      const FloatPair part = e4m3_pair_value(parts.part[p]);
      sum.low += part.low * part_weight(p), sum.high += part.high * part_weight(p);
    }
    return sum;
  }

  Machine& m_;
  const DecodeParams& params_;
  const SharedPlan& plan_;
  Own<kRows>& own_;
  const int warp_;
  const OperandFormat key_;
  float q_[kEach][kRows];
};

template <int kDim, int kRows, class Machine>
[[gnu::always_inline]] JF_HOST_DEVICE inline void run_queries(Machine& m, const DecodeParams& params,
                                                              const Launch& launch, Own<kRows>& own) {
  const bool per_channel = params.key.per_channel;
  Queries<kDim, kRows, Machine> queries(m, params, launch.shared, own);
  Turn stage, turn;
  for (Walk walk(params, own.start); !walk.done(); walk.next(), stage.next(launch.shared.stages)) {
    if (walk.begins()) queries.load(walk.row());
    if (!per_channel && !walk.begins()) continue;
    if (per_channel) wait_full(m, Barrier::kStageFull, stage);
    wait_free(m, Barrier::kQueriesFree, turn);
    queries.build(stage.slot, turn.slot);
    arrive(m, Barrier::kQueriesFull, turn.slot);
    if (per_channel) arrive(m, Barrier::kStageFree, stage.slot);
    turn.next(2);
  }
}

}  // namespace jax_foscar::blackwell
