// Head dim 128, any kind of keys and values.
#include "decode_launch.cuh"

namespace jax_foscar::cuda {
namespace {

using Any =
    KindList<Token<4>, Token<2>, Token<4, 64>, Token<2, 64>, Token<4, 32>, Token<2, 32>, Channel<4>, Channel<2>>;

constexpr DecodeVariant kVariants[] = {
    any_kind<Any, 128, 1>(),
    any_kind<Any, 128, 2>(),
    any_kind<Any, 128, 4>(),
    any_kind<Any, 128, 1, 8>(),
};

}  // namespace

DecodeVariants decode_variants_d128_any() { return {std::begin(kVariants), std::end(kVariants)}; }

}  // namespace jax_foscar::cuda
