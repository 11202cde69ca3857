// Head dim 192.
#include "decode_launch.cuh"

namespace jax_foscar::cuda {
namespace {

using Any =
    KindList<Token<4>, Token<2>, Token<4, 64>, Token<2, 64>, Token<4, 32>, Token<2, 32>, Channel<4>, Channel<2>>;

constexpr DecodeVariant kVariants[] = {
    any_kind<Any, 192, 1>(),
    any_kind<Any, 192, 2>(),
};

}  // namespace

DecodeVariants decode_variants_d192() { return {std::begin(kVariants), std::end(kVariants)}; }

}  // namespace jax_foscar::cuda
