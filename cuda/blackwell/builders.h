// Warps 4 - 7: packed words into the A operands.  One mask makes four E4M3 codes or eight E2M1 codes; nothing else is
// done to a code.  Warp w owns lanes 32 w .. 32 w + 31 of tensor memory: tokens of the keys, channels of the values.
#pragma once

#include "roles.h"

namespace jax_foscar::blackwell {

struct alignas(16) Word4 {
  uint32_t x[4];
};

// The words of a warp's 32 tokens of keys: word t8 * blocks + block of lane 4 g + c is that of token 8 t8 + g.
template <int kDim, int kBits, class Machine>
struct KeyWords {
  static constexpr int kBlocks = num_blocks(kBits, kDim);
  Word4 units[kBlocks];

  [[gnu::always_inline]] JF_HOST_DEVICE void load(Machine& m, int codes_at, int half_bytes, int warp) {
    const int at = codes_at + warp / 2 * half_bytes + (warp % 2 * kBlocks * 32 + m.lane()) * 16;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) units[i] = m.template load<Word4>(at + 32 * 16 * i);
  }
  [[gnu::always_inline]] JF_HOST_DEVICE uint32_t word(int t8, int block) const {
    const int n = t8 * kBlocks + block;
    return units[n / 4].x[n % 4];
  }
};

// 4-bit keys through tensor memory, 16 tokens a store: registers 4 b + 2 h + f of lane 4 g + c go to lane 8 h + g,
// column 8 b + 2 c + f.
template <int kDim, class Machine>
[[gnu::always_inline]] JF_HOST_DEVICE inline void build_keys4(Machine& m, const SharedPlan& plan, int stage,
                                                              uint32_t columns, int warp) {
  KeyWords<kDim, 4, Machine> words;
  words.load(m, plan.key_codes_at(stage), plan.key_codes, warp);
  constexpr int kBlocks = num_blocks(4, kDim);
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    uint32_t registers[4 * kBlocks];
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) {
      const int block = i / 4, h = i % 4 / 2, f = i % 2;
      registers[i] = e4m3_field4(words.word(2 * s + h, block), f);
    }
    m.tensor_store(tensor_address(columns, 32 * warp + 16 * s, 0), registers);
  }
  m.wait_tensor_stores();
  m.fence_before_sync();
}

// 2-bit keys through shared memory, in the only place where a byte holds two codes.
template <int kDim, class Machine>
[[gnu::always_inline]] JF_HOST_DEVICE inline void build_keys2(Machine& m, const SharedPlan& plan, int stage,
                                                              int operand_at, int warp) {
  KeyWords<kDim, 2, Machine> words;
  words.load(m, plan.key_codes_at(stage), plan.key_codes, warp);
  constexpr int kBlocks = num_blocks(2, kDim);
  const int g = m.lane() / 4, c = m.lane() % 4;
#pragma unroll
  for (int i = 0; i < 8 * kBlocks; ++i) {
    const int t8 = i / (2 * kBlocks), block = i / 2 % kBlocks, pair = i % 2;
    m.store(operand_at + key_word_at(kDim, 32 * warp + 8 * t8 + g, 2 * block + pair, c),
            e2m1_fields(words.word(t8, block), pair));
  }
  m.fence_async();
}

// Values, 16 channels a store: registers 4 n + 2 h + e of lane 4 g + c go to lane 8 h + g, column 8 n + 2 c + e.
template <int kBits, int kFirstField, class Machine>
[[gnu::always_inline]] JF_HOST_DEVICE inline void build_value_fields(Machine& m, const Word4 (&words)[4],
                                                                     uint32_t columns, int warp) {
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    uint32_t registers[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t word = words[i / 4].x[i % 4 / 2 + 2 * (i % 2)];
      registers[i] = kBits == 4 ? e4m3_field4(word, kFirstField + block) : e4m3_field2(word, kFirstField + block);
    }
    m.tensor_store(tensor_address(columns, 32 * warp + 16 * block, 0), registers);
  }
}

template <int kDim, int kBits, class Machine>
[[gnu::always_inline]] JF_HOST_DEVICE inline void build_values(Machine& m, const SharedPlan& plan, int stage,
                                                               uint32_t columns, int warp) {
  if (32 * warp >= kDim) return;  // those lanes' sums are never read
  // The row block of the warp's 32 channels: all of its fields at 4 bits, two of four at 2.
  constexpr int kBlocks = num_blocks(kBits, kDim);
  const int block = kBits == 4 ? warp : warp / 2;
  Word4 words[kTokens / 32];
#pragma unroll
  for (int n = 0; n < kTokens / 32; ++n) {
    words[n] = m.template load<Word4>(plan.value_codes_at(stage) + n / 2 * plan.value_codes +
                                      ((n % 2 * kBlocks + block) * 32 + m.lane()) * 16);
  }
  if (kBits == 2 && warp % 2 == 1) {
    build_value_fields<kBits, 2>(m, words, columns, warp);
  } else {
    build_value_fields<kBits, 0>(m, words, columns, warp);
  }
  m.wait_tensor_stores();
  m.fence_before_sync();
}

template <int kDim, int kRows, class Machine>
[[gnu::always_inline]] JF_HOST_DEVICE inline void run_builders(Machine& m, const DecodeParams& params,
                                                               const Launch& launch, Own<kRows>& own) {
  const SharedPlan& plan = launch.shared;
  const int warp = m.warp() - kBuilderWarp;
  Turn stage, turn;
  for (Walk walk(params, own.start); !walk.done(); walk.next(), stage.next(plan.stages), turn.next(2)) {
    wait_full(m, Barrier::kStageFull, stage);
    wait_free(m, Barrier::kScoresFull, turn);  // the last but one
    m.fence_after_sync();
    if (params.key.bits == 4) {
      build_keys4<kDim>(m, plan, stage.slot, own.tensor_base + key_columns_at(turn.slot), warp);
    } else {
      build_keys2<kDim>(m, plan, stage.slot, plan.keys_at(turn.slot), warp);
    }
    arrive(m, Barrier::kKeysFull, turn.slot);

    wait_free(m, Barrier::kSumsFull, turn);
    m.fence_after_sync();
    const uint32_t columns = own.tensor_base + value_columns_at(turn.slot);
    if (params.value.bits == 4) {
      build_values<kDim, 4>(m, plan, stage.slot, columns, warp);
    } else {
      build_values<kDim, 2>(m, plan, stage.slot, columns, warp);
    }
    arrive(m, Barrier::kValuesFull, turn.slot);
    arrive(m, Barrier::kStageFree, stage.slot);
  }
}

}  // namespace jax_foscar::blackwell
