// The kernel for AVX-512 F, BW, VL and DQ.
#include <immintrin.h>

#define JF_WIDTH 16
#include "kernel_impl.h"

namespace jax_foscar::cpu {
namespace {

// The masked forms, since GCC's header warns about its own undefined value in the plain ones.
JF_INLINE F widen_codes(const int8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, bytes));
}

JF_INLINE F from_f16(const uint16_t* from) {
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

}  // namespace

const Kernel kAvx512Kernel = {"avx512", scratch_floats, begin, attend, finish};

}  // namespace jax_foscar::cpu
