// Head dims 80 (padded to 96) and 96.
#include "decode_launch.cuh"

namespace jax_foscar::cuda {
namespace {

using Any80 = KindList<Token<4>, Token<2>, Channel<4>, Channel<2>>;

constexpr DecodeVariant kVariants[] = {
    any_kind<Any80, 80, 4>(),
    any_kind<Any80, 80, 8>(),
    any_kind<KindsTo32, 96, 4>(),
    any_kind<KindsTo32, 96, 8>(),
};

}  // namespace

DecodeVariants decode_variants_d80_d96() { return {std::begin(kVariants), std::end(kVariants)}; }

}  // namespace jax_foscar::cuda
