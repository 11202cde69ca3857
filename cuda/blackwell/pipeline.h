// Who waits for whom: the roles of a CTA's warps and the mbarriers between them.
//
//   warp 0        copies      pages -> stages of shared memory (bulk copies)
//   warp 1        multiplies  issues every tcgen05.mma; also owns tensor memory
//   warps 2, 3    queries     query rows, or query rows x key scales -> B of the scores
//   warps 4 - 7   builders    packed words -> A of the scores and of the sums
//   warps 8 - 11  softmax     scores -> weights, B of the sums; sums -> outputs
//
// A `full` barrier says that a buffer may be read, a `free` one that it may be written again.  Some say more: scores
// being full, that their A has been read; weights being full, that the scores have; sums being full, that their A and B
// have. tests/test_blackwell_pipeline.py explores what the roles do with these, over all interleavings.
#pragma once

#include <cstdint>

#include "layout.h"

namespace jax_foscar::blackwell {

inline constexpr int kCopyWarp = 0, kMultiplyWarp = 1, kQueryWarp = 2, kBuilderWarp = 4, kSoftmaxWarp = 8;
inline constexpr int kQueryWarps = 2, kBuilderWarps = 4, kSoftmaxWarps = 4;
inline constexpr int kWarps = 12, kThreads = 32 * kWarps;

enum class Barrier {
  kStageFull,
  kStageFree,
  kKeysFull,
  kValuesFull,
  kQueriesFull,
  kQueriesFree,
  kScoresFull,
  kWeightsFull,
  kSumsFull,
  kSumsFree,
  kCount
};

struct BarrierSpec {
  const char* name;
  int slots;
  int arrivals;  // a phase; warps arrive once each, a copy or a commit once
};

// `keys_per_channel`: then the query warps read each stage, too.
JF_HOST_DEVICE constexpr BarrierSpec barrier_spec(Barrier barrier, bool keys_per_channel) {
  switch (barrier) {
    case Barrier::kStageFull: return {"stage full", kMaxStages, 1};
    case Barrier::kStageFree:
      return {"stage free", kMaxStages, kBuilderWarps + kSoftmaxWarps + (keys_per_channel ? kQueryWarps : 0)};
    case Barrier::kKeysFull: return {"keys full", 2, kBuilderWarps};
    case Barrier::kValuesFull: return {"values full", 2, kBuilderWarps};
    case Barrier::kQueriesFull: return {"queries full", 2, kQueryWarps};
    case Barrier::kQueriesFree: return {"queries free", 2, 1 + kSoftmaxWarps};  // the product, and the factors' readers
    case Barrier::kScoresFull: return {"scores full", 2, 1};
    case Barrier::kWeightsFull: return {"weights full", 2, kSoftmaxWarps};
    // Two slots for one buffer: the builders wait for the last tile but one, and must not be lapped.
    case Barrier::kSumsFull: return {"sums full", 2, 1};
    case Barrier::kSumsFree: return {"sums free", 1, kSoftmaxWarps};
    case Barrier::kCount: break;
  }
  return {"", 0, 0};
}

// Number of a barrier's slot among all.
JF_HOST_DEVICE constexpr int barrier_index(Barrier barrier, int slot) {
  int index = slot;
  for (int i = 0; i < static_cast<int>(barrier); ++i) index += barrier_spec(static_cast<Barrier>(i), false).slots;
  return index;
}
inline constexpr int kNumBarriers = barrier_index(Barrier::kCount, 0);

// A place in a ring of slots, and the parity of the phase that ends when it is full.  Waiting for `before` is waiting
// for the phase before: in the first round it has always ended.
struct Turn {
  int slot = 0;
  uint32_t parity = 0;

  JF_HOST_DEVICE constexpr void next(int slots) {
    if (++slot == slots) slot = 0, parity ^= 1;
  }
  JF_HOST_DEVICE constexpr uint32_t before() const { return parity ^ 1; }
};

}  // namespace jax_foscar::blackwell
