// The kernel for what every machine of the platform has: SSE2 on x86-64, NEON on aarch64.
#define JF_WIDTH 4
#include "kernel_impl.h"

namespace jax_foscar::cpu {
namespace {

// Spreads each byte over a lane and keeps the top copy.
JF_INLINE F widen_codes(const int8_t* from) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  typedef uint16_t Shorts __attribute__((vector_size(16)));
  int32_t four;
  __builtin_memcpy(&four, from, 4);
  const Bytes b = bits_of<Bytes>(I{four, 0, 0, 0});
  const Shorts s =
      bits_of<Shorts>(__builtin_shufflevector(b, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
  const I lanes = bits_of<I>(__builtin_shufflevector(s, s, 0, 8, 1, 9, 2, 10, 3, 11));
  return __builtin_convertvector(lanes >> 24, F);
}

// By integers: a flushed denormal must not lose a small half.
JF_INLINE F from_f16(const uint16_t* from) {
  const I half = widen_halves(from);
  const I exponent = half & 0x7c00;
  const I shifted = (half & 0x7fff) << 13;
  const I normal = shifted + (exponent == 0x7c00 ? I{} + (224 << 23) : I{} + (112 << 23));
  const I small = bits_of<I>(__builtin_convertvector(half & 0x3ff, F) * 0x1p-24f);
  return bits_of<F>((exponent == 0 ? small : normal) | (half & 0x8000) << 16);
}

}  // namespace

#if defined(__aarch64__)
const Kernel kBaselineKernel = {"neon", scratch_floats, begin, attend, finish};
#else
const Kernel kBaselineKernel = {"baseline", scratch_floats, begin, attend, finish};
#endif

}  // namespace jax_foscar::cpu
