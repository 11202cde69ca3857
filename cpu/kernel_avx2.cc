// The kernel for AVX2, FMA and F16C.
#include <immintrin.h>

#define JF_WIDTH 8
#include "kernel_impl.h"

namespace jax_foscar::cpu {
namespace {

JF_INLINE F widen_codes(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}

JF_INLINE F from_f16(const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

}  // namespace

const Kernel kAvx2Kernel = {"avx2", scratch_floats, begin, attend, finish};

}  // namespace jax_foscar::cpu
