// Head dim 64.
#include "decode_launch.cuh"

namespace jax_foscar::cuda {
namespace {

constexpr DecodeVariant kVariants[] = {
    one_kind<Token<4>, Token<4>, 64, 4>(), one_kind<Token<2>, Token<2>, 64, 4>(), any_kind<KindsTo32, 64, 4>(),
    any_kind<KindsTo32, 64, 8>(),          any_kind<KindsTo32, 64, 16>(),         any_kind<KindsTo32, 64, 4, 8>(),
};

}  // namespace

DecodeVariants decode_variants_d64() { return {std::begin(kVariants), std::end(kVariants)}; }

}  // namespace jax_foscar::cuda
