// Head dim 128, any kind of keys and values.
#include "decode_launch.cuh"

namespace jax_foscar::cuda {
namespace {

constexpr DecodeVariant kVariants[] = {
    any_kind<AllKinds, 128, 4>(),
    any_kind<AllKinds, 128, 8>(),
    any_kind<AllKinds, 128, 16>(),
    any_kind<AllKinds, 128, 4, 8>(),
};

}  // namespace

DecodeVariants decode_variants_d128_any() { return {std::begin(kVariants), std::end(kVariants)}; }

}  // namespace jax_foscar::cuda
