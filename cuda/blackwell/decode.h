// The Blackwell decode kernel's body: affine folding on tcgen05 with f8f6f4 operands.
//
// Grid: one CTA an SM, each with a range of tiles of one KV head (walk.h).  The roles (pipeline.h) then work on the
// same tiles, each with a loop of its own.
#pragma once

#include "builders.h"
#include "copies.h"
#include "products.h"
#include "queries.h"
#include "softmax.h"

namespace jax_foscar::blackwell {

template <int kDim, int kRows, class Machine>
[[gnu::always_inline]] JF_HOST_DEVICE inline void decode(Machine& m, const DecodeParams& params, const Launch& launch) {
  Own<kRows>& own = *reinterpret_cast<Own<kRows>*>(m.shared() + launch.shared.own_at());
  const int warp = m.warp();
  if (warp == kMultiplyWarp) m.tensor_alloc(&own.tensor_base);
  if (m.thread() == 0) {
    for (int i = 0; i < static_cast<int>(Barrier::kCount); ++i) {
      const BarrierSpec spec = barrier_spec(static_cast<Barrier>(i), params.key.per_channel);
      for (int slot = 0; slot < spec.slots; ++slot)
        m.barrier_init(barrier_index(static_cast<Barrier>(i), slot), spec.arrivals);
    }
    m.barrier_init_fence();
  }
  m.fence_before_sync();
  find_start(m, params, launch.row_start, own.scan, &own.start);
  m.fence_after_sync();

  if (warp == kCopyWarp) {
    run_copies<kRows>(m, params, launch, own);
  } else if (warp == kMultiplyWarp) {
    run_products<kDim, kRows>(m, params, launch, own);
  } else if (warp < kBuilderWarp) {
    run_queries<kDim, kRows>(m, params, launch, own);
  } else if (warp < kSoftmaxWarp) {
    run_builders<kDim, kRows>(m, params, launch, own);
  } else {
    Softmax<kDim, kRows, Machine>(m, params, launch, own).run();
  }
  m.fence_before_sync();
  m.sync();
  if (warp == kMultiplyWarp) m.tensor_free(own.tensor_base);
}

}  // namespace jax_foscar::blackwell
