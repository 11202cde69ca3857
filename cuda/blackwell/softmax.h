// Warps 8 - 11: scores to weights, and sums to outputs.
//
// Thread i is token i of the tile for the scores and channel i for the sums.  A tile's weights are split by their own
// largest, so that one heavy token (an attention sink) costs the other tiles nothing, and its products are added to f32
// registers before the next tile's are made: tensor-core sums truncate.
#pragma once

#include <cmath>

#include "../dtype.h"
#include "../workspace.h"
#include "roles.h"

namespace jax_foscar::blackwell {

// Floats as integers of the same order, and back.
[[gnu::always_inline]] JF_HOST_DEVICE inline uint32_t ordered(float x) {
  const uint32_t bits = bits_of_float(x);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
[[gnu::always_inline]] JF_HOST_DEVICE inline float of_ordered(uint32_t x) {
  return float_of_bits(x ^ (x >> 31 ? 0x80000000u : 0xffffffffu));
}

template <int kDim, int kRows, class Machine>
class Softmax {
 public:
  static constexpr int kColumns = set_columns(kRows);
  static constexpr int kQueryColumns = kQueryParts * kRows, kWeightColumns = kWeightParts * kRows;  // that are read

  [[gnu::always_inline]] JF_HOST_DEVICE Softmax(Machine& m, const DecodeParams& params, const Launch& launch,
                                                Own<kRows>& own)
      : m_(m),
        params_(params),
        launch_(launch),
        plan_(launch.shared),
        own_(own),
        key_(params.key),
        value_(params.value),
        keys_(key_fold(params.key, kRows)),
        values_(value_fold(params.value, kRows)),
        warp_(m.warp() - kSoftmaxWarp),
        thread_(32 * warp_ + m.lane()),
        lanes_(tensor_address(own.tensor_base, 32 * warp_, 0)),
        own_set_(params.value.per_channel || thread_ >= kDim ? 0 : thread_ / params.value.group),
        value_unit_(1.0f / value_code(params.value.bits, thread_)) {}

  [[gnu::always_inline]] JF_HOST_DEVICE void run() {
    for (Walk walk(params_, own_.start); !walk.done(); walk.next()) {
      if (walk.begins()) begin(walk);
      weigh(walk);
      // The sums of the tile before, and at the item's end those of this one, too: in one place, for the compiler keeps
      // what is used in two of them in memory.
      bool own = walk.begins();
      if (own) take_turn(walk);
      while (!own || walk.ends()) {
        add_sums();
        if (own) break;
        take_turn(walk), own = true;
      }
      if (walk.ends()) finish(walk);
    }
  }

 private:
  // What adding a tile's sums needs of its weights.
  struct Tile {
    Turn stage, turn;
    int first_token;
    float back[kRows];  // products -> sums, of the thread's channel
  };

  [[gnu::always_inline]] JF_HOST_DEVICE void begin(const Walk& walk) {
    const int ratio = params_.num_heads / params_.num_kv_heads;
    length_ = walk.length(), bad_rows_ = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int position = length_ - params_.num_queries + r / ratio;
      end_[r] = r >= params_.num_queries * ratio ? 0 : params_.features.causal ? position + 1 : length_;
      max_[r] = -INFINITY, sum_[r] = 0.0f, out_[r] = 0.0f;
#pragma unroll
      for (int set = 0; set < kMaxGroups; ++set) offsets_[set][r] = 0.0f;
    }
  }

  [[gnu::always_inline]] JF_HOST_DEVICE float factor(int index) const {
    return m_.template load<float>(plan_.queries_at(queries_.slot) + plan_.factors_at + 4 * index);
  }
  static constexpr int kOffset = kMaxGroups * kRows, kFinite = 2 * kOffset;  // of QueryFactors, in floats

  // The tile's logits (base 2) of the thread's token.
  [[gnu::always_inline]] JF_HOST_DEVICE void score(float (&scores)[kRows]) {
    const uint32_t at = lanes_ + scores_at(turn_.slot);
    uint32_t columns[kQueryColumns];
    if (key_.per_channel) {
      const int set = thread_ / key_.group;
      m_.tensor_load(at + set * kColumns, columns);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        scores[r] = join_columns<kRows>(columns, r) * factor(set * kRows + r) + factor(kOffset + set * kRows + r);
      return;
    }
    for (int group = 0; group < keys_.accumulators; ++group) {
      m_.tensor_load(at + group * keys_.columns, columns);
      const Pair pair =
          load_pair(m_, plan_.key_pairs_at(stage_.slot) + (thread_ * keys_.accumulators + group) * kPairBytes);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float offset = pair.offset * factor(kOffset + group * kRows + r);
        scores[r] =
            pair.scale * (join_columns<kRows>(columns, r) * factor(r)) + (group == 0 ? offset : offset + scores[r]);
      }
    }
  }

  [[gnu::always_inline]] JF_HOST_DEVICE bool sees(int token, int r) const { return token < end_[r]; }

  // A token's weight in a set: P * scale, or P; nothing of a token that is not seen, whose parameters may be anything.
  [[gnu::always_inline]] JF_HOST_DEVICE float weight(float p, bool seen, const Pair& pair) const {
    return !value_.per_channel ? seen ? p * pair.scale : 0.0f : p;
  }
  [[gnu::always_inline]] JF_HOST_DEVICE Pair value_pair(int set) const {
    if (value_.per_channel) return {1.0f, 0.0f};
    return load_pair(m_, plan_.value_pairs_at(stage_.slot) + (thread_ * values_.sets + set) * kPairBytes);
  }

  [[gnu::always_inline]] JF_HOST_DEVICE void weigh(const Walk& walk) {
    if (key_.per_channel || walk.begins()) wait_full(m_, Barrier::kQueriesFull, queries_);
    wait_full(m_, Barrier::kStageFull, stage_);
    wait_full(m_, Barrier::kScoresFull, turn_);
    m_.fence_after_sync();
    if (own_.bad_page[stage_.slot] != 0) bad_rows_ = (1u << kRows) - 1;
    const int token = walk.tile() * kTokens + thread_, buffer = turn_.slot;
    float p[kRows];
    score(p);
    if (walk.begins()) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) bad_rows_ |= (factor(kFinite + r) == 0.0f) << r;
    }
    m_.fence_before_sync();  // for the arrivals of the weights
    if (key_.per_channel || walk.ends()) {
      arrive(m_, Barrier::kQueriesFree, queries_.slot);
      queries_.next(2);
    }

#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!sees(token, r)) p[r] = -INFINITY;
      const uint32_t largest = m_.warp_max(ordered(p[r]));
      if (m_.lane() == 0) own_.score_largest[buffer][warp_][r] = largest;
    }
    m_.sync_softmax();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      uint32_t largest = ordered(max_[r]);
      for (int w = 0; w < kSoftmaxWarps; ++w) {
        const uint32_t other = own_.score_largest[buffer][w][r];
        largest = other > largest ? other : largest;
      }
      const float max = of_ordered(largest), base = max == -INFINITY ? 0.0f : max;
      alpha_[r] = m_.exp2(max_[r] - base);
      max_[r] = max;
      p[r] = m_.exp2(p[r] - base);
      sum_[r] = sum_[r] * alpha_[r] + p[r];
    }

#pragma unroll
    for (int set = 0; set < kMaxGroups; ++set) {
      if (set >= values_.sets) continue;
      const Pair pair = value_pair(set);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const bool seen = sees(token, r);
        offsets_[set][r] = offsets_[set][r] * alpha_[r] + (seen ? p[r] * pair.offset : 0.0f);
        const uint32_t largest = m_.warp_max(bits_of_float(weight(p[r], seen, pair)) & 0x7fffffff);
        if (m_.lane() == 0) own_.weight_largest[buffer][warp_][set][r] = largest;
      }
    }
    if (value_.per_channel) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float sum = warp_sum(m_, p[r]);
        if (m_.lane() == 0) own_.weight_sums[buffer][warp_][r] = sum;
      }
    }
    m_.sync_softmax();
    for (int set = 0; set < values_.sets; ++set) {
      const Pair pair = value_pair(set);
      SomePartPairs<kWeightParts> parts[kRows / 2];
#pragma unroll
      for (int r = 0; r < kRows; r += 2) {
        SplitScale scales[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t largest = 0;
          for (int w = 0; w < kSoftmaxWarps; ++w) {
            const uint32_t other = own_.weight_largest[buffer][w][set][r + i];
            largest = other > largest ? other : largest;
          }
          scales[i] = split_scale(largest);
          if (set == own_set_) back_[r + i] = scales[i].down * value_unit_;
        }
        parts[r / 2] = split_pair<kWeightParts>(weight(p[r], sees(token, r), pair) * scales[0].up,
                                                weight(p[r + 1], sees(token, r + 1), pair) * scales[1].up);
      }
      store_parts<kRows>(m_, plan_.weights_at(turn_.slot), kTokens, value_k(thread_), set, parts);
    }
    m_.fence_async();
    arrive(m_, Barrier::kWeightsFull, turn_.slot);
  }

  // The tile whose weights were just made becomes the one whose sums come next.
  [[gnu::always_inline]] JF_HOST_DEVICE void take_turn(const Walk& walk) {
    last_.stage = stage_, last_.turn = turn_, last_.first_token = walk.tile() * kTokens;
#pragma unroll
    for (int r = 0; r < kRows; ++r) out_[r] *= alpha_[r], last_.back[r] = back_[r];
    stage_.next(plan_.stages), turn_.next(2);
  }

  [[gnu::always_inline]] JF_HOST_DEVICE void add_sums() {
    wait_full(m_, Barrier::kSumsFull, last_.turn);
    m_.fence_after_sync();
    if (32 * warp_ < kDim) {
      const uint32_t at = lanes_ + sums_at();
      uint32_t columns[kWeightColumns];
      if (value_.per_channel) {
        for (int group = 0; group < values_.accumulators; ++group) {
          if (last_.first_token + group * value_.group >= length_) break;  // its parameters may be anything
          m_.tensor_load(at + group * values_.columns, columns);
          const Pair pair =
              load_pair(m_, plan_.value_pairs_at(last_.stage.slot) + (group * kDim + thread_) * kPairBytes);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            float weights = 0.0f;
            for (int w = group * value_.group / 32; w < (group + 1) * value_.group / 32; ++w)
              weights += own_.weight_sums[last_.turn.slot][w][r];
            out_[r] += pair.scale * (join_columns<kRows>(columns, r) * last_.back[r]) + pair.offset * weights;
          }
        }
      } else {
        m_.tensor_load(at + own_set_ * kColumns, columns);
#pragma unroll
        for (int r = 0; r < kRows; ++r) out_[r] += join_columns<kRows>(columns, r) * last_.back[r];
      }
    }
    m_.fence_before_sync();
    arrive(m_, Barrier::kSumsFree, 0);
    arrive(m_, Barrier::kStageFree, last_.stage.slot);
  }

  // Leaves the item if the whole row was the CTA's, else the CTA's part of it (combine.cu).
  [[gnu::always_inline]] JF_HOST_DEVICE void finish(const Walk& walk) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float sum = warp_sum(m_, sum_[r]);
      if (m_.lane() == 0) own_.totals[warp_][0][r] = sum;
#pragma unroll
      for (int set = 0; set < kMaxGroups; ++set) {
        if (set >= values_.sets) continue;
        const float offset = warp_sum(m_, offsets_[set][r]);
        if (m_.lane() == 0) own_.totals[warp_][1 + set][r] = offset;
      }
    }
    m_.sync_softmax();
    const int ratio = params_.num_heads / params_.num_kv_heads, real = params_.num_queries * ratio;
    const bool whole = walk.has_all();
    float* const piece = launch_.pieces + (int64_t{m_.block()} * 2 + walk.has_first()) * piece_floats(kRows, kDim);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= real) continue;
      float sum = total(0, r);
      if (bad_rows_ >> r & 1) sum = NAN;
      const float x = out_[r] + total(1 + own_set_, r);
      const int64_t query = int64_t{walk.row()} * params_.num_queries + r / ratio;
      const int64_t index = query * params_.num_heads + own_.start.kv_head * ratio + r % ratio;
      if (thread_ < kDim) {
        if (whole) {
          store_float(params_.out, index * kDim + thread_, params_.q_dtype, sum == 0.0f ? 0.0f : x / sum);
        } else {
          piece[r * kDim + thread_] = x;
        }
      }
      if (thread_ != 0) continue;
      if (whole) {
        params_.lse[index] = sum == 0.0f ? -INFINITY : max_[r] * 0.69314718055994531f + logf(sum);
      } else {
        piece[kRows * kDim + r] = max_[r];
        piece[kRows * (kDim + 1) + r] = sum;
      }
    }
  }
  // Over all tokens: the sum of the weights (0), or of a set's offsets (1 + set).
  [[gnu::always_inline]] JF_HOST_DEVICE float total(int what, int r) const {
    if (what > 0 && value_.per_channel) return 0.0f;
    float sum = 0.0f;
    for (int w = 0; w < kSoftmaxWarps; ++w) sum += own_.totals[w][what][r];
    return sum;
  }

  Machine& m_;
  const DecodeParams& params_;
  const Launch& launch_;
  const SharedPlan& plan_;
  Own<kRows>& own_;
  const OperandFormat key_, value_;
  const Fold keys_, values_;
  const int warp_, thread_;
  const uint32_t lanes_;
  const int own_set_;
  const float value_unit_;
  Turn stage_, turn_, queries_;
  Tile last_;
  int length_, end_[kRows];
  uint32_t bad_rows_;                 // a bit each: the query is not finite, or a page id was out of range
  float max_[kRows];                  // of the logits (base 2) so far
  float sum_[kRows];                  // of the thread's tokens
  float offsets_[kMaxGroups][kRows];  // P * offset, of the thread's tokens
  float out_[kRows];                  // of the thread's channel, all tokens
  float alpha_[kRows], back_[kRows];
};

}  // namespace jax_foscar::blackwell
