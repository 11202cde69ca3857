// Warp 0: a range's tiles from their pages into the stages, by bulk copies that complete on the stage's barrier.
#pragma once

#include "roles.h"

namespace jax_foscar::blackwell {

// Page ids of the row's next 64 half tiles, a lane two of them: read long before their copies, which would else wait
// for each in turn.
template <class Machine>
class PageIds {
 public:
  [[gnu::always_inline]] JF_HOST_DEVICE PageIds(const DecodeParams& params, int page_tiles)
      : params_(params), page_tiles_(page_tiles) {}

  [[gnu::always_inline]] JF_HOST_DEVICE void start(Machine& m, const Walk& walk) {
    table_ = params_.page_table + int64_t{params_.row_entry(walk.row(), params_.table_rows)} * params_.table_width;
    halves_ = (walk.length() + kTileTokens - 1) / kTileTokens;
    base_ = kHalves * walk.tile();
    now_ = load(base_ + m.lane()), later_ = load(base_ + 32 + m.lane());
  }
  // Of half tile number `half` of the row; asked in order.
  [[gnu::always_inline]] JF_HOST_DEVICE int get(Machine& m, int half) {
    if (half - base_ == 32) base_ += 32, now_ = later_, later_ = load(base_ + 32 + m.lane());
    return m.shuffle(now_, half - base_);
  }

 private:
  [[gnu::always_inline]] JF_HOST_DEVICE int load(int half) const {
    return half < halves_ ? table_[half / page_tiles_] : 0;
  }

  const DecodeParams& params_;
  const int page_tiles_;
  const int32_t* table_ = nullptr;
  int halves_ = 0, base_ = 0, now_ = 0, later_ = 0;
};

// One half tile of keys or values: codes and pairs, each contiguous in its page.
template <class Machine>
[[gnu::always_inline]] JF_HOST_DEVICE inline void copy_half(Machine& m, const OperandParams& operand, int64_t tile,
                                                            int codes_at, int codes, int pairs_at, int pairs,
                                                            int barrier) {
  m.bulk_copy(codes_at, operand.codes + tile * codes, codes, barrier);
  m.bulk_copy(pairs_at, static_cast<const uint8_t*>(operand.params) + tile * pairs, pairs, barrier);
}

template <int kRows, class Machine>
[[gnu::always_inline]] JF_HOST_DEVICE inline void run_copies(Machine& m, const DecodeParams& params,
                                                             const Launch& launch, Own<kRows>& own) {
  const SharedPlan& plan = launch.shared;
  PageIds<Machine> ids(params, launch.page_tiles);
  Turn turn;
  for (Walk walk(params, own.start); !walk.done(); walk.next(), turn.next(plan.stages)) {
    if (walk.begins()) ids.start(m, walk);
    const int first = kHalves * walk.tile();
    int id[kHalves];
    for (int half = 0; half < kHalves; ++half) id[half] = ids.get(m, first + half);
    if (m.lane() != 0) continue;
    // The second half of a row's last tile may have no tokens: what the stage held stays, and nobody looks at it.
    const int halves = walk.length() - first * kTileTokens > kTileTokens ? kHalves : 1;
    wait_free(m, Barrier::kStageFree, turn);
    uint32_t bad = 0;
    for (int half = 0; half < halves; ++half) {
      if (id[half] < 0 || id[half] >= params.pages) bad = 1, id[half] = 0;
    }
    own.bad_page[turn.slot] = bad;
    const int barrier = barrier_index(Barrier::kStageFull, turn.slot);
    m.expect(barrier, halves * (plan.key_codes + plan.value_codes + plan.key_pairs + plan.value_pairs));
    for (int half = 0; half < halves; ++half) {
      const int64_t page = params.page_index(walk.row(), walk.layer(), id[half]);
      const int64_t tile =
          (page * params.num_kv_heads + own.start.kv_head) * launch.page_tiles + (first + half) % launch.page_tiles;
      copy_half(m, params.key, tile, plan.key_codes_at(turn.slot) + half * plan.key_codes, plan.key_codes,
                plan.key_pairs_at(turn.slot) + half * plan.key_pairs, plan.key_pairs, barrier);
      copy_half(m, params.value, tile, plan.value_codes_at(turn.slot) + half * plan.value_codes, plan.value_codes,
                plan.value_pairs_at(turn.slot) + half * plan.value_pairs, plan.value_pairs, barrier);
    }
  }
}

}  // namespace jax_foscar::blackwell
