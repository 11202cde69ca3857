// Head dim 256.
#include "decode_launch.cuh"

namespace jax_foscar::cuda {
namespace {

constexpr DecodeVariant kVariants[] = {
    one_kind<Token<4>, Token<4>, 256, 4>(),
    one_kind<Token<2>, Token<2>, 256, 4>(),
    any_kind<AllKinds, 256, 4>(),
    any_kind<AllKinds, 256, 8>(),
};

}  // namespace

DecodeVariants decode_variants_d256() { return {std::begin(kVariants), std::end(kVariants)}; }

}  // namespace jax_foscar::cuda
