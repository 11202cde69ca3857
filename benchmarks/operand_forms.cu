// One small kernel an operand form, for benchmarks/instructions.py: packed codes to mma.sync operands and nothing else.
//
// The integer forms are the decode kernels' own (cuda/keys.cuh, cuda/values.cuh); the f16 forms and the published
// Hopper form, bf16 mantissa injection, read the same page layout.  Every form exists with one and with two units of
// work: the difference of the two counts has neither addresses nor prologue in it.
#include "keys.cuh"
#include "values.cuh"

namespace jax_foscar::cuda {
namespace {

__device__ __forceinline__ void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// Keys as u8 integers: 32 tokens x 128 channels a unit.
template <int kBits>
struct IntegerKeys {
  using Sum = int;
  static __device__ __forceinline__ void add(const uint8_t* codes, int unit, int lane, uint2 b, int (&sums)[4]) {
    KeyWords<kBits, 128> words;
    words.load(codes, unit, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        uint32_t a[4];
        words.operand(i, step, a);
        ptx::mma_u8_s8(sums, a, b);
      }
    }
  }
};

// Values as u8 integers: 64 tokens x one row block a unit.
template <int kBits>
struct IntegerValues {
  using Sum = int;
  static __device__ __forceinline__ void add(const uint8_t* codes, int unit, int lane, uint2 b, int (&sums)[4]) {
    using Words = ValueWords<kBits, 128>;
    Words words;
    words.load(codes, unit * Words::kFields, lane);
#pragma unroll
    for (int field = 0; field < Words::kFields; ++field) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4];
        words.operand(field, half, a);
        ptx::mma_u8_u8(sums, a, b);
      }
    }
  }
};

// Values as 16-bit floats, 32 tokens x one row block a unit: the low bytes of a word's halves are a pair of tokens, the
// high bytes another (cuda/page_format.h).
template <int kBits, class Pair>
struct FloatValues {
  using Sum = float;
  static __device__ __forceinline__ void add(const uint8_t* codes, int unit, int lane, uint2 b, float (&sums)[4]) {
    const uint4 words = reinterpret_cast<const uint4*>(codes)[32 * unit + lane];
#pragma unroll
    for (int shift = 0; shift < 8; shift += kBits) {
      Pair::mma(sums,
                {Pair::template make<kBits>(words.x, 0, shift), Pair::template make<kBits>(words.y, 0, shift),
                 Pair::template make<kBits>(words.x, 8, shift), Pair::template make<kBits>(words.y, 8, shift)},
                b);
      Pair::mma(sums,
                {Pair::template make<kBits>(words.z, 0, shift), Pair::template make<kBits>(words.w, 0, shift),
                 Pair::template make<kBits>(words.z, 8, shift), Pair::template make<kBits>(words.w, 8, shift)},
                b);
    }
  }
};

template <int kBits>
inline constexpr uint32_t kPairMask = (1u << kBits) - 1u | ((1u << kBits) - 1u) << 16;

// A masked half is q * 2^(shift - 24), a subnormal (or exponent 1, the same scale): only the high bytes need a shift.
struct Subnormal {
  template <int kBits>
  static __device__ __forceinline__ uint32_t make(uint32_t word, int byte, int shift) {
    return word >> byte & kPairMask<kBits> << shift;
  }
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint2 b) { mma_f16(c, a, b); }
};

// 0x4300 | q is 128 + q.  A bf16 has 7 mantissa bits, so each field is shifted down first; the bias of 128 leaves once
// for all through the weights' sum.  Left to itself, nvcc takes two LOP3 for a mask and an OR with constants.
struct Injected {
  template <int kBits>
  static __device__ __forceinline__ uint32_t make(uint32_t word, int byte, int shift) {
    uint32_t pair;
    asm("lop3.b32 %0,%1,%2,%3,0xea;"
        : "=r"(pair)
        : "r"(word >> (byte + shift)), "r"(kPairMask<kBits>), "r"(0x43004300u));
    return pair;
  }
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint2 b) { ptx::mma_bf16(c, a, b); }
};

template <class Form, int kUnits>
__device__ __forceinline__ void probe(const uint8_t* codes, const uint2* b, void* out) {
  typename Form::Sum sums[4] = {};
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) Form::add(codes, unit, threadIdx.x, b[threadIdx.x], sums);
#pragma unroll
  for (int i = 0; i < 4; ++i) static_cast<typename Form::Sum*>(out)[32 * i + threadIdx.x] = sums[i];
}

}  // namespace
}  // namespace jax_foscar::cuda

// Plain names, which instructions.py looks up.
#define OPERAND_FORM(name, ...)                                                          \
  extern "C" __global__ void name##_1(const uint8_t* codes, const uint2* b, void* out) { \
    jax_foscar::cuda::probe<jax_foscar::cuda::__VA_ARGS__, 1>(codes, b, out);            \
  }                                                                                      \
  extern "C" __global__ void name##_2(const uint8_t* codes, const uint2* b, void* out) { \
    jax_foscar::cuda::probe<jax_foscar::cuda::__VA_ARGS__, 2>(codes, b, out);            \
  }

OPERAND_FORM(int4_keys_u8, IntegerKeys<4>)
OPERAND_FORM(int2_keys_u8, IntegerKeys<2>)
OPERAND_FORM(int4_values_u8, IntegerValues<4>)
OPERAND_FORM(int2_values_u8, IntegerValues<2>)
OPERAND_FORM(int4_values_f16, FloatValues<4, jax_foscar::cuda::Subnormal>)
OPERAND_FORM(int2_values_f16, FloatValues<2, jax_foscar::cuda::Subnormal>)
OPERAND_FORM(int4_values_bf16, FloatValues<4, jax_foscar::cuda::Injected>)
OPERAND_FORM(int2_values_bf16, FloatValues<2, jax_foscar::cuda::Injected>)
