// Head dim 128, the formats that matter most: one kernel each.
#include "decode_launch.cuh"

namespace jax_foscar::cuda {
namespace {

constexpr DecodeVariant kVariants[] = {
    one_kind<Token<4>, Token<4>, 128, 4>(),
    one_kind<Token<2>, Token<2>, 128, 4>(),
    one_kind<Token<4>, Token<2>, 128, 4>(),
    one_kind<Token<2>, Token<4>, 128, 4>(),
    one_kind<Token<4, 64>, Token<4, 64>, 128, 4>(),
    one_kind<Token<2, 64>, Token<2, 64>, 128, 4>(),
    one_kind<Token<4, 64>, Token<2, 64>, 128, 4>(),
    one_kind<Token<2, 64>, Token<4, 64>, 128, 4>(),
    one_kind<Channel<4, 64>, Token<4, 64>, 128, 4>(),
    one_kind<Channel<2, 64>, Token<2, 64>, 128, 4>(),
    one_kind<Token<4, 64>, Channel<4, 64>, 128, 4>(),
    one_kind<Token<2, 64>, Channel<2, 64>, 128, 4>(),
    one_kind<Channel<4, 64>, Channel<4, 64>, 128, 4>(),
    one_kind<Channel<2, 64>, Channel<2, 64>, 128, 4>(),
    one_kind<Token<4>, Token<4>, 128, 8>(),
    one_kind<Token<2>, Token<2>, 128, 8>(),
    one_kind<Token<4, 64>, Token<4, 64>, 128, 8>(),
    one_kind<Token<2, 64>, Token<2, 64>, 128, 8>(),
    one_kind<Channel<4, 64>, Token<4, 64>, 128, 8>(),
    one_kind<Channel<2, 64>, Token<2, 64>, 128, 8>(),
    one_kind<Token<4>, Token<4>, 128, 16>(),
    one_kind<Token<2>, Token<2>, 128, 16>(),
    one_kind<Token<4, 64>, Token<4, 64>, 128, 16>(),
    one_kind<Token<2, 64>, Token<2, 64>, 128, 16>(),
    one_kind<Channel<4, 64>, Token<4, 64>, 128, 16>(),
    one_kind<Channel<2, 64>, Token<2, 64>, 128, 16>(),
};

// Two stages of 4-bit tiles leave little for what a warp keeps beside them: with less room INT4 would lose a warp.
using Int4 = Traits<KindList<Token<4>>, KindList<Token<4>>, 128, 4, 4>;
static_assert(Int4::kMaxWarps * (Int4::Sizes::kStages * Int4::kTileBytes.total() + Int4::kWarpBytes) <= 227 << 10,
              "twelve warps no longer fit a CTA");

}  // namespace

DecodeVariants decode_variants_d128() { return {std::begin(kVariants), std::end(kVariants)}; }

}  // namespace jax_foscar::cuda
