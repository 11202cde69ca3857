// cuda/ptx.cuh on emulated warps (warps.h): the test puts it in that file's place.  Layouts are the PTX ISA's.
#pragma once

#include "warps.h"

namespace jax_foscar::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

namespace ptx {

using emulator::Block;
using emulator::Fault;

inline uint32_t shared_address(const void* pointer) { return Block::running().shared_at(pointer); }

template <typename Value>
Value opaque(Value x) {
  return x;
}

// Only kernels without cp.async have these.
inline void mbarrier_init(uint32_t) { throw std::logic_error("mbarriers are not emulated"); }
inline void mbarrier_init_fence() {}
inline void mbarrier_expect(uint32_t, uint32_t) {}
inline void mbarrier_wait(uint32_t, uint32_t) {}
inline void bulk_copy(uint32_t, const void*, uint32_t, uint32_t) {}

inline void cp_async16(uint32_t to, const void* from, bool wanted = true) {
  if (wanted) Block::running().copy(to, from);
}
inline void cp_async_commit() { Block::running().commit(); }
template <int kPending>
void cp_async_wait() {
  Block::running().wait_for_copies(kPending + (Block::running().fault == Fault::kEarlyWait ? 1 : 0));
}

inline void launch_dependents() {}
inline void wait_for_dependency() {}

// D = A B + C.  Register r of A: row g + 8 (r % 2), k-block r / 2; of B: column g, k-block r; lane 4 g + c has the c-th
// quarter of a block.  `product` is that of two registers.
template <class Number, class Product>
void mma(Number (&c)[4], const uint32_t (&a)[4], uint2 b, const Product& product) {
  struct Operands {
    uint32_t a[4], b[2];
    Number c[4];
  };
  const Operands mine = {{a[0], a[1], a[2], a[3]}, {b.x, b.y}, {c[0], c[1], c[2], c[3]}};
  const auto sums = Block::running().together<std::array<Number, 4>>(mine, [&](const auto& in, auto& out) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, column = 2 * (lane % 4) + i % 2;
        double sum = in[lane].c[i];
        for (int block = 0; block < 2; ++block)
          for (int quarter = 0; quarter < 4; ++quarter)
            sum += product(in[4 * row + quarter].a[2 * block + i / 2], in[4 * column + quarter].b[block]);
        out[lane][i] = static_cast<Number>(sum);
      }
    }
  });
  for (int i = 0; i < 4; ++i) c[i] = sums[i];
}

template <class X, class Y>
double dot_bytes(uint32_t x, uint32_t y) {
  double sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<double>(static_cast<X>(x >> 8 * i)) * static_cast<Y>(y >> 8 * i);
  return sum;
}
template <class Half>
double dot_halves(uint32_t x, uint32_t y) {
  double sum = 0;
  for (int i = 0; i < 2; ++i)
    sum += static_cast<double>(static_cast<float>(__builtin_bit_cast(Half, static_cast<uint16_t>(x >> 16 * i)))) *
           static_cast<float>(__builtin_bit_cast(Half, static_cast<uint16_t>(y >> 16 * i)));
  return sum;
}

inline void mma_u8_s8(int (&c)[4], const uint32_t (&a)[4], uint2 b) { mma(c, a, b, dot_bytes<uint8_t, int8_t>); }
inline void mma_u8_u8(int (&c)[4], const uint32_t (&a)[4], uint2 b) { mma(c, a, b, dot_bytes<uint8_t, uint8_t>); }
inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint2 b) { mma(c, a, b, dot_halves<__half>); }
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint2 b) { mma(c, a, b, dot_halves<__nv_bfloat16>); }

// Row r of an 8 x 8 matrix, or where it is transposed column r, elements 2 c and 2 c + 1, to lane 4 r + c.
template <class At>
uint32_t matrix_pair(int lane, bool transposed, const At& at) {
  const int r = lane / 4, c = 2 * (lane % 4);
  const uint16_t first = transposed ? at(c, r) : at(r, c), second = transposed ? at(c + 1, r) : at(r, c + 1);
  return first | static_cast<uint32_t>(second) << 16;
}

inline uint32_t transpose_b16(uint32_t rows) {
  return Block::running().together<uint32_t>(rows, [](const auto& in, auto& out) {
    const auto at = [&](int r, int c) { return static_cast<uint16_t>(in[4 * r + c / 2] >> 16 * (c % 2)); };
    for (int lane = 0; lane < 32; ++lane) out[lane] = matrix_pair(lane, true, at);
  });
}

inline void load_matrices(uint32_t (&matrices)[4], uint32_t address, bool transposed) {
  Block& block = Block::running();
  const auto loaded = block.together<std::array<uint32_t, 4>>(address, [&](const auto& in, auto& out) {
    for (int i = 0; i < 4; ++i) {
      const auto at = [&](int r, int c) {
        uint16_t element;
        std::memcpy(&element, block.shared(in[8 * i + r] + 2 * c), 2);
        return element;
      };
      for (int lane = 0; lane < 32; ++lane) out[lane][i] = matrix_pair(lane, transposed, at);
    }
  });
  for (int i = 0; i < 4; ++i) matrices[i] = loaded[i];
}
inline void load_b16(uint32_t (&matrices)[4], uint32_t address) { load_matrices(matrices, address, false); }
inline void load_transposed_b16(uint32_t (&matrices)[4], uint32_t address) { load_matrices(matrices, address, true); }

template <int kWarps>
void sync_team(int team) {
  if constexpr (kWarps == 1) {
    __syncwarp();
  } else {
    Block::running().sync(1 + team, 32 * kWarps);
  }
}

inline float exp2(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float max_nan(float x, float y) { return std::isnan(x) || std::isnan(y) ? NAN : std::fmax(x, y); }

}  // namespace ptx
}  // namespace jax_foscar::cuda
