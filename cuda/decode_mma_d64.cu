// Head dim 64.
#include "decode_launch.cuh"

namespace jax_foscar::cuda {
namespace {

constexpr DecodeVariant kVariants[] = {
    one_kind<Token<4>, Token<4>, 64, 1>(), one_kind<Token<2>, Token<2>, 64, 1>(), any_kind<KindsTo32, 64, 1>(),
    any_kind<KindsTo32, 64, 2>(),          any_kind<KindsTo32, 64, 4>(),          any_kind<KindsTo32, 64, 1, 8>(),
};

}  // namespace

DecodeVariants decode_variants_d64() { return {std::begin(kVariants), std::end(kVariants)}; }

}  // namespace jax_foscar::cuda
