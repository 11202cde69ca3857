// What the roles of a CTA share: the launch, their state in shared memory, and how they speak to the barriers.
//
// Each role's body is a template over a Machine, which is the GPU (gpu.cuh) or the emulator (emulator/machine.h): the
// same code runs on both.  A Machine has the thread's place, warp-wide and CTA-wide exchanges, loads and stores of
// shared memory by offset, and one function an instruction.
#pragma once

#include "pipeline.h"
#include "walk.h"

namespace jax_foscar::blackwell {

inline constexpr float kLog2E = 1.4426950408889634f;

struct Launch {
  SharedPlan shared;
  int page_tiles;  // of 64 tokens
  int* row_start;  // [B + 1], workspace.h
  float* pieces;   // [workers, 2, piece_floats]
};

// The roles' own state, behind the buffers.
template <int kRows>
struct Own {
  uint64_t barriers[kNumBarriers];
  uint32_t tensor_base;
  Start start;
  int scan[kWarps];
  uint32_t bad_page[kMaxStages];  // a page id of the stage's tile was out of range; another page's codes came instead
  // Magnitudes are kept as bits: an integer maximum keeps NaN and infinity (operands.h, split_scale).
  uint32_t row_largest[kQueryWarps][kRows];
  uint32_t query_largest[kQueryWarps][kMaxGroups][kRows];
  float query_sums[kMaxGroups][kRows];                  // per token, of 32 channels each
  float query_offsets[kQueryWarps][kMaxGroups][kRows];  // per channel
  uint32_t score_largest[2][kSoftmaxWarps][kRows];
  uint32_t weight_largest[2][kSoftmaxWarps][kMaxGroups][kRows];
  float weight_sums[2][kSoftmaxWarps][kRows];  // of a warp's 32 tokens
  float totals[kSoftmaxWarps][1 + kMaxGroups][kRows];
};

template <class Machine>
[[gnu::always_inline]] JF_HOST_DEVICE inline void wait_full(Machine& m, Barrier barrier, const Turn& turn) {
  m.wait(barrier_index(barrier, turn.slot), turn.parity);
}
// Until what the slot held in the last round may be written over.
template <class Machine>
[[gnu::always_inline]] JF_HOST_DEVICE inline void wait_free(Machine& m, Barrier barrier, const Turn& turn) {
  m.wait(barrier_index(barrier, turn.slot), turn.before());
}
// Once a warp, behind what its lanes did.
template <class Machine>
[[gnu::always_inline]] JF_HOST_DEVICE inline void arrive(Machine& m, Barrier barrier, int slot) {
  m.sync_warp();
  if (m.lane() == 0) m.arrive(barrier_index(barrier, slot));
}

template <class Machine>
[[gnu::always_inline]] JF_HOST_DEVICE inline float warp_sum(Machine& m, float x) {
  for (int distance = 16; distance > 0; distance /= 2) x += m.shuffle_xor(x, distance);
  return x;
}

// A (scale, offset) pair of f16.
struct Pair {
  float scale, offset;
};
template <class Machine>
[[gnu::always_inline]] JF_HOST_DEVICE inline Pair load_pair(Machine& m, int at) {
  const uint32_t bits = m.template load<uint32_t>(at);
  return {f16_to_float(static_cast<uint16_t>(bits)), f16_to_float(static_cast<uint16_t>(bits >> 16))};
}

// The parts of kRows values of one k, as bytes of B.
template <int kRows, int kParts, class Machine>
[[gnu::always_inline]] JF_HOST_DEVICE inline void store_parts(Machine& m, int base, int depth, int k, int set,
                                                              const SomePartPairs<kParts> (&pairs)[kRows / 2]) {
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
#pragma unroll
    for (int r = 0; r < kRows; r += 4) {
      const uint32_t word = pairs[r / 2].part[p] | static_cast<uint32_t>(pairs[r / 2 + 1].part[p]) << 16;
      m.store(base + b_at(depth, k, set * set_columns(kRows) + p * kRows + r), word);
    }
  }
}

// A row's product from the columns of its parts.
template <int kRows, int kCount>
[[gnu::always_inline]] JF_HOST_DEVICE inline float join_columns(const uint32_t (&columns)[kCount], int row) {
  float sum = 0.0f;
#pragma unroll
  for (int p = kCount / kRows; p-- > 0;) sum += float_of_bits(columns[p * kRows + row]) * part_weight(p);
  return sum;
}

}  // namespace jax_foscar::blackwell
