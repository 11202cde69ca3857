// A warp's private ring of tiles in shared memory, filled ahead of use from the pages of its range of work.
//
// One stage is one tile of 64 tokens of one KV head: key codes, value codes, key params, value params, each contiguous
// in its page.  Kernels of one kind know a tile's sizes and copy 16 bytes a lane with cp.async: that measured as fast
// as bulk copies where memory is the bound and 2 to 4 % faster where instructions are (a bulk copy takes its operands
// from uniform registers).  With sizes from the launch, loops around cp.async cost more, so that on sm_90 and newer
// four lanes start a bulk copy each, which complete on the stage's mbarrier.  Page ids are checked before they become
// addresses, and read one tile ahead of their copies.
#pragma once

#include "decode_variants.h"
#include "ptx.cuh"
#include "schedule.cuh"

namespace jax_foscar::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHaveBulkCopies = false;
#else
inline constexpr bool kHaveBulkCopies = true;
#endif

// `Sizes::get(plan)` is the TileBytes, a constant if `Sizes::kFixed`.
template <class Sizes>
class TileStream {
 public:
  static constexpr bool kBulkCopies = kHaveBulkCopies && !Sizes::kFixed;
  static constexpr int kBarrierBytes = 8 * kMaxStages;

  // The stream of the tiles among the units of `start`; `stages` is the warp's ring, `barriers` its mbarriers.
  __device__ TileStream(const DecodeParams& params, const Plan& plan, const Start& start, uint8_t* stages,
                        uint32_t barriers)
      : params_(params), plan_(plan), stages_(stages), barriers_(barriers), left_(start.count) {
    const int lane = threadIdx.x % 32;
    if constexpr (kBulkCopies) {
      const TileBytes bytes = Sizes::get(plan);
      switch (lane % 4) {
        case 0: source_ = params.key.codes, size_ = bytes.key_codes, at_ = 0; break;
        case 1: source_ = params.value.codes, size_ = bytes.value_codes, at_ = bytes.value_codes_at(); break;
        case 2:
          source_ = static_cast<const uint8_t*>(params.key.params), size_ = bytes.key_params;
          at_ = bytes.key_params_at();
          break;
        case 3:
          source_ = static_cast<const uint8_t*>(params.value.params), size_ = bytes.value_params;
          at_ = bytes.value_params_at();
          break;
      }
    }
    if (kBulkCopies && lane == 0) {
      for (int i = 0; i < plan.stages; ++i) ptx::mbarrier_init(barriers_ + 8 * i);
      ptx::mbarrier_init_fence();
    }
    __syncwarp();
    if (left_ > 0) {
      row_ = start.row;
      set_row(start.work);
      item_ = start.item;
      unit_ = start.unit;
      seek();
    }
#pragma unroll 1
    for (int i = 0; i < plan.stages - 1; ++i) issue(i);
  }

  // Waits for the tile in the current stage; prefetch() comes first.
  __device__ __forceinline__ const uint8_t* wait() {
    if constexpr (kBulkCopies) {
      ptx::mbarrier_wait(barriers_ + 8 * stage_, phase_);
    } else {
      switch (plan_.stages) {  // all but the tiles ahead must have come
        case 2: ptx::cp_async_wait<1>(); break;
        case 3: ptx::cp_async_wait<2>(); break;
        default: ptx::cp_async_wait<3>(); break;
      }
      __syncwarp();
    }
    return stages_ + stage_ * Sizes::get(plan_).total();
  }

  // True if the current tile's page id was out of range; the stage then holds another page's tile.
  __device__ __forceinline__ bool bad() const { return bad_ >> stage_ & 1; }

  // Starts the copy of the tile stages - 1 ahead, into the stage that the tile before the current one has left.
  __device__ __forceinline__ void prefetch() {
    __syncwarp();
    issue(stage_ == 0 ? plan_.stages - 1 : stage_ - 1);
  }

  // Leaves the current stage.
  __device__ __forceinline__ void next() {
    if (++stage_ == plan_.stages) stage_ = 0, phase_ ^= 1;
  }

 private:
  __device__ __forceinline__ void set_row(const RowWork& work) {
    tiles_ = work.tiles, units_ = work.units, first_tile_ = work.first_tile;
    item_ = 0;
    const int64_t pool = row_entry(params_, row_, params_.pools);
    row_head_ = ((pool * params_.layers + work.layer) * params_.pages) * params_.num_kv_heads;
    table_ = params_.page_table + int64_t{row_entry(params_, row_, params_.table_rows)} * params_.table_width;
  }

  // From unit_ of the item to the first tile at or after it; reads its page id.
  __device__ __forceinline__ void seek() {
    while (unit_ >= tiles_) {
      left_ -= units_ - unit_;
      unit_ = 0;
      if (left_ <= 0) return;
      if (++item_ == params_.num_kv_heads * plan_.blocks || units_ == 0) {
        ++row_;
        set_row(row_work(params_, row_));
      }
    }
    page_ = (first_tile_ + unit_) / plan_.page_tiles, tile_in_page_ = (first_tile_ + unit_) % plan_.page_tiles;
    head_ = row_head_ + item_ / plan_.blocks;
    id_ = table_[page_];
  }

  __device__ __forceinline__ void issue(int stage) {
    if (left_ > 0) {
      const bool ok = id_ >= 0 && id_ < params_.pages;
      bad_ = (bad_ & ~(1u << stage)) | static_cast<unsigned>(!ok) << stage;
      copy(stage, ok ? id_ : 0);
      --left_;
      if (++unit_ == tiles_) {
        seek();
      } else {
        if (++tile_in_page_ == plan_.page_tiles) tile_in_page_ = 0, ++page_;
        id_ = table_[page_];
      }
    }
    if constexpr (!kBulkCopies) ptx::cp_async_commit();
  }

  __device__ __forceinline__ void copy(int stage, int id) {
    const int lane = threadIdx.x % 32;
    // Tiles before this one in the pool.
    const int64_t tile = (head_ + int64_t{id} * params_.num_kv_heads) * plan_.page_tiles + tile_in_page_;
    const uint32_t to = ptx::shared_address(stages_) + stage * Sizes::get(plan_).total();
    if constexpr (kBulkCopies) {
      const uint32_t barrier = barriers_ + 8 * stage;
      if (lane == 0) ptx::mbarrier_expect(barrier, Sizes::get(plan_).total());
      if (lane < 4) ptx::bulk_copy(to + at_, source_ + tile * size_, size_, barrier);
    } else {
      const TileBytes bytes = Sizes::get(plan_);
      copy_part(to, params_.key.codes, tile, bytes.key_codes);
      copy_part(to + bytes.value_codes_at(), params_.value.codes, tile, bytes.value_codes);
      if (bytes.key_params == 256 && bytes.value_params == 256) {  // a half-warp each
        const uint8_t* from = static_cast<const uint8_t*>(lane < 16 ? params_.key.params : params_.value.params);
        ptx::cp_async16(to + bytes.key_params_at() + 16 * lane, from + tile * 256 + lane % 16 * 16);
      } else {
        copy_part(to + bytes.key_params_at(), params_.key.params, tile, bytes.key_params);
        copy_part(to + bytes.value_params_at(), params_.value.params, tile, bytes.value_params);
      }
    }
  }

  __device__ __forceinline__ void copy_part(uint32_t to, const void* from, int64_t tile, int size) {
    const int first = 16 * (threadIdx.x % 32);
    const uint8_t* source = static_cast<const uint8_t*>(from) + tile * size + first;
#pragma unroll
    for (int i = 0; i < size; i += 16 * 32) {
      if (i + first < size) ptx::cp_async16(to + first + i, source + i);
    }
  }

  const DecodeParams& params_;
  const Plan& plan_;
  uint8_t* const stages_;
  const uint32_t barriers_;
  // The part of a tile that lane 0..3 copies.
  const uint8_t* source_;
  int size_, at_;
  int stage_ = 0;
  uint32_t phase_ = 0, bad_ = 0;
  // The tile whose copy comes next.
  int left_;  // units of the range from this tile on
  int row_, item_, unit_, tiles_, units_, first_tile_;
  int page_, tile_in_page_, id_;
  int64_t row_head_, head_;  // (page, head) pairs before page 0 of the row's layer, and of the item's head
  const int32_t* table_;
};

}  // namespace jax_foscar::cuda
