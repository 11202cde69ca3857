// Vectors of JF_WIDTH floats, in the compiler's own vector extension, and the little arithmetic the kernel needs on
// them.
//
// A "word" is 4 neighbouring lanes (128 bits): shuffles stay inside words, which is cheap everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#define JF_INLINE inline __attribute__((always_inline))
#define JF_NOINLINE __attribute__((noinline))  // one copy of a large loop, however often it is called

namespace jax_foscar::cpu {
namespace {

constexpr int kWidth = JF_WIDTH;

typedef float F __attribute__((vector_size(4 * kWidth)));
typedef int32_t I __attribute__((vector_size(4 * kWidth)));
typedef uint16_t H __attribute__((vector_size(2 * kWidth)));
typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

template <class V>
JF_INLINE V load(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

template <class V>
JF_INLINE void store(void* to, V v) {
  __builtin_memcpy(to, &v, sizeof(V));
}

// Keeps x in a register: compilers like to fold a load into each of its uses, and loads are the scarcer unit.
JF_INLINE void in_register(F& x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
}

template <class To, class From>
JF_INLINE To bits_of(From v) {
  static_assert(sizeof(To) == sizeof(From));
  return reinterpret_cast<To>(v);
}

template <class V>
JF_INLINE V splat(float x) {
  return x - V{};
}

// In each word, lanes A and B of x and lanes C and D of y.
template <int A, int B, int C, int D, std::size_t... i>
JF_INLINE F pick(F x, F y, std::index_sequence<i...>) {
  constexpr int lane[4] = {A, B, C + kWidth, D + kWidth};
  return __builtin_shufflevector(x, y, (static_cast<int>(i) / 4 * 4 + lane[i % 4])...);
}
template <int A, int B, int C, int D>
JF_INLINE F pick(F x, F y) {
  return pick<A, B, C, D>(x, y, std::make_index_sequence<kWidth>());
}

// In each word, {sum of a's lanes, of b's, of c's, of d's}.
JF_INLINE F sum_words(F a, F b, F c, F d) {
  const F ab = pick<0, 1, 0, 1>(a, b) + pick<2, 3, 2, 3>(a, b);
  const F cd = pick<0, 1, 0, 1>(c, d) + pick<2, 3, 2, 3>(c, d);
  return pick<0, 2, 0, 2>(ab, cd) + pick<1, 3, 1, 3>(ab, cd);
}

JF_INLINE F4 word(F x, int index) { return load<F4>(reinterpret_cast<const char*>(&x) + 16 * index); }

// The sum of all words.
JF_INLINE F4 add_words(F x) {
  F4 sum = word(x, 0);
  for (int w = 1; w < kWidth / 4; ++w) sum += word(x, w);
  return sum;
}

// The same word in each place.
JF_INLINE F repeat_word(F4 x) {
  F v;
  for (int w = 0; w < kWidth / 4; ++w) __builtin_memcpy(reinterpret_cast<char*>(&v) + 16 * w, &x, 16);
  return v;
}

template <class V>
JF_INLINE V max(V a, V b) {
  return a > b ? a : b;  // a NaN in `a` loses, one in `b` stays
}

// kWidth signed bytes to floats.  Compilers do not find the instructions for this and for from_f16 by themselves, so
// each instruction set's file defines them.
JF_INLINE F widen_codes(const int8_t* from);

JF_INLINE I widen_halves(const uint16_t* from) { return __builtin_convertvector(load<H>(from), I); }

JF_INLINE F from_bf16(const uint16_t* from) { return bits_of<F>(widen_halves(from) << 16); }

// Likewise, exact for f16 subnormals whether or not the thread flushes f32 ones (XLA's do).
JF_INLINE F from_f16(const uint16_t* from);

// exp(x) for x <= 0, within about 1 ulp (Cephes); 0 below -87.3; NaN stays.
template <class V, class VI>
JF_INLINE V exp_nonpositive(V x) {
  const V magic = splat<V>(0x1.8p23f);
  const V shifted = x * 1.44269504088896341f + magic;  // the low bits are round(x / ln 2)
  const V n = shifted - magic;
  const V r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  V y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  const V power = bits_of<V>((bits_of<VI>(shifted) << 23) + (127 << 23));
  return x < splat<V>(-87.3f) ? V{} : y * power;
}

// tanh(x) within 2 ulp (Cephes); NaN stays.
template <class V, class VI>
JF_INLINE V tanh(V x) {
  const V size = x < 0 ? -x : x, z = x * x;
  const V e = exp_nonpositive<V, VI>(-2.0f * size);
  const V large = (1.0f - e) / (1.0f + e);
  V y = z * -5.70498872745e-3f + 2.06390887954e-2f;
  y = y * z - 5.37397155531e-2f;
  y = y * z + 1.33314422036e-1f;
  y = y * z - 3.33332819422e-1f;
  return size < 0.625f ? y * z * x + x : x < 0 ? -large : large;
}

}  // namespace
}  // namespace jax_foscar::cpu
