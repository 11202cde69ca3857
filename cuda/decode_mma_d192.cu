// Head dim 192.
#include "decode_launch.cuh"

namespace jax_foscar::cuda {
namespace {

constexpr DecodeVariant kVariants[] = {
    any_kind<AllKinds, 192, 4>(),
    any_kind<AllKinds, 192, 8>(),
};

}  // namespace

DecodeVariants decode_variants_d192() { return {std::begin(kVariants), std::end(kVariants)}; }

}  // namespace jax_foscar::cuda
