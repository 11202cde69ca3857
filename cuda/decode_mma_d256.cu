// Head dim 256.
#include "decode_launch.cuh"

namespace jax_foscar::cuda {
namespace {

using Any =
    KindList<Token<4>, Token<2>, Token<4, 64>, Token<2, 64>, Token<4, 32>, Token<2, 32>, Channel<4>, Channel<2>>;

constexpr DecodeVariant kVariants[] = {
    one_kind<Token<4>, Token<4>, 256, 1>(),
    one_kind<Token<2>, Token<2>, 256, 1>(),
    any_kind<Any, 256, 1>(),
    any_kind<Any, 256, 2>(),
};

}  // namespace

DecodeVariants decode_variants_d256() { return {std::begin(kVariants), std::end(kVariants)}; }

}  // namespace jax_foscar::cuda
