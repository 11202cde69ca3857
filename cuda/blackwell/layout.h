// Where everything lies in the Blackwell kernel: which code stands at which row and k of an operand, which column holds
// which part of which query row, and the plans of tensor and shared memory.  The kernel and its emulator share these.
//
// A tile is 128 tokens.  Keys: A has a row a token, k runs along channels.  Values: A has a row a channel, k runs along
// tokens.  The order of k is whatever the page's words give for free; the other operand, B, is written in that order.
// Query rows are columns of B, a column a part (operands.h), times as many sets as there are groups that fold into B.
#pragma once

#include "../params.h"
#include "descriptors.h"
#include "operands.h"

namespace jax_foscar::blackwell {

inline constexpr int kTokens = 128;  // of a tile
inline constexpr int kHalves = kTokens / kTileTokens;
inline constexpr int kMaxGroups = 4;  // 128 tokens or channels in groups of 32
inline constexpr int kMaxStages = 6;

// --- Order of k -----------------------------------------------------------------------------------------------------

// Keys.  4 bits: lane c's word of a block is columns 2 c and 2 c + 1 of tensor memory, a field each.  2 bits: it is
// eight nibbles for each of two k-steps.  A k-step is 32 neighbouring channels in either.
JF_HOST_DEVICE constexpr int key_k(int bits, int channel) {
  const int step = channel / 32, half = channel % 32 / 16, c = channel % 16 / 4, i = channel % 4;
  return 32 * step + 8 * c + (bits == 4 ? 4 * half + i : 2 * i + half);
}

// Values: lane c's words of a row (tokens 0 .. 15 and 16 .. 31 of a k-step) are columns 2 c and 2 c + 1.
JF_HOST_DEVICE constexpr int value_k(int token) {
  const int t = token % 32;
  return token - t + 8 * (t % 8 / 2) + 4 * (t / 16) + t % 2 * 2 + t % 16 / 8;
}

// --- A in shared memory: 2-bit keys as E2M1 -------------------------------------------------------------------------
// K-major, 16 codes in 8 bytes and 8 bytes of padding: 16 bytes a row and core matrix.

inline constexpr int kCoreBytes = 128;

JF_HOST_DEVICE constexpr int key_stride(int dim) { return dim / 16 * kCoreBytes; }
JF_HOST_DEVICE constexpr int key_operand_bytes(int dim) { return kTokens / 8 * key_stride(dim); }
// The word of lane c's eight codes of a k-step.
JF_HOST_DEVICE constexpr int key_word_at(int dim, int token, int step, int c) {
  return token / 8 * key_stride(dim) + (2 * step + c / 2) * kCoreBytes + token % 8 * 16 + c % 2 * 4;
}
JF_HOST_DEVICE constexpr uint64_t key_descriptor(uint32_t base, int dim, int step) {
  return shared_descriptor(base + 2 * kCoreBytes * step, kCoreBytes, key_stride(dim));
}

// --- B: queries or weights ------------------------------------------------------------------------------------------
// MN-major, since a thread has all columns of one k: core matrices along k, then along n.

JF_HOST_DEVICE constexpr int b_at(int depth, int k, int column) {
  return column / 16 * 16 * depth + k / 8 * kCoreBytes + k % 8 * 16 + column % 16;
}
JF_HOST_DEVICE constexpr uint64_t b_descriptor(uint32_t base, int depth, int step) {
  return shared_descriptor(base + 4 * kCoreBytes * step, kCoreBytes, 16 * depth);
}

// Four columns a row, because N is a multiple of 16 and rows come in fours: part p of row r is number p * rows + r of
// its set.  Queries use all four parts (three leave 2e-3 where one channel outweighs the rest); weights, which are
// relative to the tile's largest, use three and leave the last columns as they are.
inline constexpr int kSetParts = 4, kQueryParts = 4, kWeightParts = 3;
JF_HOST_DEVICE constexpr int set_columns(int rows) { return kSetParts * rows; }

// How one operand's groups fold: into column sets of B, or into accumulators of their own.
struct Fold {
  int sets, accumulators;
  int columns;  // of B and of each accumulator, a multiple of 16

  JF_HOST_DEVICE constexpr Fold(int rows, int sets, int accumulators)
      : sets(sets), accumulators(accumulators), columns(sets * set_columns(rows)) {}
};
JF_HOST_DEVICE constexpr Fold key_fold(const OperandFormat& key, int rows) {
  return key.per_channel ? Fold(rows, kTokens / key.group, 1) : Fold(rows, 1, key.dim / key.group);
}
JF_HOST_DEVICE constexpr Fold value_fold(const OperandFormat& value, int rows) {
  return value.per_channel ? Fold(rows, 1, kTokens / value.group) : Fold(rows, value.dim / value.group, 1);
}

// The code's factor in row `channel` of the values.
JF_HOST_DEVICE constexpr float value_code(int bits, int channel) {
  return bits == 4 ? e4m3_code4() : e4m3_code2(channel / 16 % 4);
}
JF_HOST_DEVICE constexpr float key_code(int bits) { return bits == 4 ? e4m3_code4() : e2m1_code2(); }

// --- Tensor memory --------------------------------------------------------------------------------------------------
// A operands and scores in two slots; sums in one, for they are read before the next tile's weights are multiplied.

inline constexpr int kTensorColumns = 512;
inline constexpr int kOperandColumns = 32;       // 128 bytes a lane
inline constexpr int kAccumulatorColumns = 128;  // 4 groups x 8 rows x 4 columns

JF_HOST_DEVICE constexpr int key_columns_at(int slot) { return slot * kOperandColumns; }
JF_HOST_DEVICE constexpr int value_columns_at(int slot) { return (2 + slot) * kOperandColumns; }
JF_HOST_DEVICE constexpr int sums_at() { return 4 * kOperandColumns; }
JF_HOST_DEVICE constexpr int scores_at(int slot) { return (2 + slot) * kAccumulatorColumns; }

// --- Shared memory --------------------------------------------------------------------------------------------------

// Beside the queries' columns: what goes with each row's products of an accumulator or set.
template <int kRows>
struct QueryFactors {
  float back[kMaxGroups][kRows];    // products -> logits (base 2), without a key's scale
  float offset[kMaxGroups][kRows];  // per token: times the key's offset; per channel: added
  float finite[kRows];              // 1 or 0
};

// Offsets from the start of dynamic shared memory, all multiples of 128.
struct SharedPlan {
  int key_codes, value_codes, key_pairs, value_pairs;  // bytes of half a tile
  int stage_bytes, stages;
  int query_bytes, weight_bytes, key_bytes;  // a slot
  int own_bytes;                             // of the roles' own state
  int factors_at;                            // in a query slot

  JF_HOST_DEVICE constexpr int key_codes_at(int stage) const { return stage * stage_bytes; }
  JF_HOST_DEVICE constexpr int value_codes_at(int stage) const { return key_codes_at(stage) + kHalves * key_codes; }
  JF_HOST_DEVICE constexpr int key_pairs_at(int stage) const { return value_codes_at(stage) + kHalves * value_codes; }
  JF_HOST_DEVICE constexpr int value_pairs_at(int stage) const { return key_pairs_at(stage) + kHalves * key_pairs; }
  JF_HOST_DEVICE constexpr int queries_at(int slot) const { return stages * stage_bytes + slot * query_bytes; }
  JF_HOST_DEVICE constexpr int weights_at(int slot) const { return queries_at(2) + slot * weight_bytes; }
  JF_HOST_DEVICE constexpr int keys_at(int slot) const { return weights_at(2) + slot * key_bytes; }
  JF_HOST_DEVICE constexpr int own_at() const { return keys_at(2); }
  JF_HOST_DEVICE constexpr int total() const { return own_at() + own_bytes; }
};

inline constexpr int kPairBytes = 4;  // f16 scale and offset

// `own_bytes` and `capacity`: what the roles need for themselves, and what a CTA may have.
constexpr SharedPlan shared_plan(const OperandFormat& key, const OperandFormat& value, int rows, int own_bytes,
                                 int capacity) {
  const auto aligned = [](int bytes) { return (bytes + 127) / 128 * 128; };
  SharedPlan plan = {};
  plan.key_codes = static_cast<int>(key.page_bytes(kTileTokens));
  plan.value_codes = static_cast<int>(value.page_bytes(kTileTokens));
  plan.key_pairs = key.tile_pairs() * kPairBytes;
  plan.value_pairs = value.tile_pairs() * kPairBytes;
  plan.stage_bytes = aligned(kHalves * (plan.key_codes + plan.value_codes + plan.key_pairs + plan.value_pairs));
  plan.factors_at = key_fold(key, rows).columns * key.dim;
  plan.query_bytes =
      aligned(plan.factors_at + static_cast<int>(rows == 4 ? sizeof(QueryFactors<4>) : sizeof(QueryFactors<8>)));
  plan.weight_bytes = value_fold(value, rows).columns * kTokens;
  plan.key_bytes = key.bits == 2 ? key_operand_bytes(key.dim) : 0;
  plan.own_bytes = aligned(own_bytes);
  while (plan.stages < kMaxStages && plan.total() + plan.stage_bytes <= capacity) ++plan.stages;
  return plan;
}

}  // namespace jax_foscar::blackwell
