// A worker's private ring of tiles in shared memory, filled ahead of use from the pages of its range of work.  A worker
// is a warp, or a team of warps that each have some of an item's query rows and read the same tiles: what they call
// here, they all call, in the same order.
//
// One stage is one tile of 64 tokens of one KV head: key codes, value codes, key params, value params, each contiguous
// in its page; or a chunk of exact tokens, whose bf16 rows stand where a tile has its codes, keys and values in a stage
// each where a code has 2 bits.  A tile's keys are done with long before its values, so that each part is replaced as
// soon as it is read: a ring of two stages then has three halves under way.  Kernels of one kind know a tile's sizes
// and copy 16 bytes a lane with cp.async: that measured as fast as bulk copies where memory is the bound and 2 to 4 %
// faster where instructions are (a bulk copy takes its operands from uniform registers).  With sizes from the launch,
// loops around cp.async cost more, so that on sm_90 and newer bulk copies complete on an mbarrier.  Page ids are
// checked before they become addresses, and read 32 at once, a batch ahead of their copies.
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

inline constexpr int kNumBarriers = 2 * kMaxStages;  // a stage's keys, its values

// What a stream rarely asks for, kept in shared memory.
struct StreamState {
  uint32_t bad;                       // of the items with tiles, by their number modulo 32: few are under way
  uint16_t items_copied, items_read;  // their numbers
  // The row whose units are being copied.
  int row;
  int head;        // of the worker, in the pools before the row's page 0
  int first_slot;  // of the head in the exact arrays, counted in rows of [exact_rows, L, K, S + W]
  int ring_slot;   // of token exact_begin in the ring
  RowWork work;

  // Where exact token number i is, counted likewise (decode_mma.cu checks that it is below 2^31), or -1 past the last.
  __device__ __forceinline__ int place(const Windows& windows, int i) const {
    if (i >= work.exact_count()) return -1;
    if (i < work.exact_sinks) return first_slot + i;
    const int slot = ring_slot + i - work.exact_sinks;  // there are no more tokens than slots
    return first_slot + windows.sink + slot - (slot >= windows.ring ? windows.ring : 0);
  }
  // The same of the first token of a chunk, if its tokens are all there, side by side; else -1.
  __device__ __forceinline__ int place_of_chunk(const Windows& windows, int number) const {
    const int first = place(windows, number * kExactTokens);
    const int last = place(windows, number * kExactTokens + kExactTokens - 1);
    return last - first == kExactTokens - 1 ? first : -1;
  }
};

// `Sizes::get(plan)` is the TileBytes, a constant if `Sizes::kFixed`; `Sizes::stages(plan)` likewise.  `Sizes::kDim` is
// the head dim, `Sizes::kTeam` the warps of a worker.
template <class Sizes>
class TileStream {
 public:
  static constexpr bool kBulkCopies = kHaveBulkCopies && !Sizes::kFixed;
  static constexpr int kThreads = 32 * Sizes::kTeam;
  static constexpr int kExactUnits = Sizes::kDim / 8;  // of 16 bytes, an exact token's keys or values
  static constexpr bool kSwizzled = !kBulkCopies && kExactUnits % 8 == 0;

  // The stream of the tiles of a KV head among the units of `start`; `stages` is the worker's ring, `barriers` its
  // mbarriers, `state` its StreamState.
  __device__ TileStream(const DecodeParams& params, const Plan& plan, int kv_head, const Start& start, uint8_t* stages,
                        const void* barriers, StreamState* state)
      : params_(params),
        plan_(plan),
        kv_head_(kv_head),
        ring_(stages),
        barriers_(ptx::shared_address(barriers)),
        state_(*state),
        left_(start.count) {
    const int lane = threadIdx.x % kThreads;
    if constexpr (Sizes::kFixed) {
      to_ = ptx::opaque(ptx::shared_address(stages) + 16 * lane);
      const OperandParams* operands[] = {&params.key, &params.value};
      for (int i = 0; i < 2; ++i) {
        codes_[i] = ptx::opaque(operands[i]->codes + 16 * lane);
        pairs_[i] = ptx::opaque(static_cast<const uint8_t*>(operands[i]->params) + 16 * lane);
      }
    }
    if (kBulkCopies && lane == 0) {
      for (int i = 0; i < 2 * plan.stages; ++i) ptx::mbarrier_init(barriers_ + 8 * i);
      ptx::mbarrier_init_fence();
    }
    if (is_first()) state_.bad = 0, state_.items_copied = state_.items_read = 0;
    sync();
    if (left_ > 0) {
      set_row(start.row, start.work);
      block_ = start.block;
      unit_ = start.unit;
      seek();
    }
#pragma unroll 1
    for (int i = 0; i < Sizes::stages(plan); ++i) {
      copy_keys();
      copy_values();
      next();
    }
    phase_ = 0;
  }

  // The current stage.
  __device__ __forceinline__ const uint8_t* stage() const { return ring_ + at_; }
  // Wait for the keys of the current unit; then for its values, once the keys are replaced.
  __device__ __forceinline__ void wait_for_keys() { wait(0); }
  __device__ __forceinline__ void wait_for_values() { wait(1); }
  // Waits for all of the current stage, of which nothing is replaced yet.
  __device__ __forceinline__ void wait_for_stage() { wait(0, 1); }

  // True if the keys of a chunk of exact tokens have a stage for themselves, and their values the next: a tile's codes
  // of 2 bits leave no room for both.
  __device__ __forceinline__ bool exact_apart() const {
    const TileBytes bytes = Sizes::get(plan_);
    return min(bytes.key_codes, bytes.value_codes) < kExactTokens * 16 * kExactUnits;
  }
  // Where channels 8 unit .. 8 unit + 7 of row `row` of a chunk of exact tokens lie, from its start.  Lanes that read
  // neighbouring tokens' same channels should meet other banks; a bulk copy cannot arrange that.
  __device__ __forceinline__ static int exact_at(int row, int unit) {
    return 16 * (row * kExactUnits + (kSwizzled ? unit ^ row % 8 : unit));
  }
  // The shared-memory address `rows` rows and `units` units behind that of another row and unit, whose set bits are
  // none of these.
  __device__ __forceinline__ static uint32_t exact_behind(uint32_t address, int rows, int units) {
    if (kSwizzled) address ^= 16 * ((rows ^ units) & 7), units &= ~7;
    return address + 16 * (rows * kExactUnits + units);
  }

  // Behind the current tile's last read of its keys: starts the copy of the keys `stages` tiles ahead in their place.
  __device__ __forceinline__ void replace_keys() {
    sync();
    copy_keys();
  }
  // The same of its values; the next tile is then the current one.
  __device__ __forceinline__ void replace_values() {
    sync();
    copy_values();
    next();
  }

  // The work of a row, once its first unit is current.
  __device__ __forceinline__ RowWork work_of(int row) const {
    return state_.row == row ? state_.work : row_work(params_, row);
  }

  // True if a page id of the item was out of range; another page's tile came instead.  Asked in order, once behind the
  // last tile of each item that has tiles in the range.
  __device__ __forceinline__ bool item_was_bad() {
    sync();
    const unsigned bit = 1u << (state_.items_read & 31);
    const bool bad = state_.bad & bit;
    sync();
    if (is_first()) state_.bad &= ~bit, ++state_.items_read;
    return bad;
  }

 private:
  __device__ __forceinline__ static bool is_first() { return threadIdx.x % kThreads == 0; }

  // A page id of the item whose units are being copied is out of range.
  __device__ __forceinline__ void mark_bad() {
    sync();
    if (is_first()) state_.bad |= 1u << (state_.items_copied & 31);
  }

  __device__ __forceinline__ static void sync() { ptx::sync_team<Sizes::kTeam>(threadIdx.x / kThreads); }

  // For a part of the stage, and `more` parts behind it.
  __device__ __forceinline__ void wait(int part, int more = 0) {
    if constexpr (kBulkCopies) {
      for (int i = 0; i <= more; ++i) ptx::mbarrier_wait(barriers_ + 8 * (2 * stage_ + part + i), phase_);
    } else {
      // Of the copies that were started, in order, all but the last 2 stages - 1 must have come.
      if constexpr (Sizes::kFixed) {
        wait_for_copies<2 * Sizes::kStages - 1>(more);
      } else {
        switch (plan_.stages) {
          case 2: wait_for_copies<3>(more); break;
          case 3: wait_for_copies<5>(more); break;
          default: wait_for_copies<7>(more); break;
        }
      }
      sync();
    }
  }
  template <int kLeft>
  __device__ __forceinline__ static void wait_for_copies(int more) {
    more == 1 ? ptx::cp_async_wait<kLeft - 1>() : ptx::cp_async_wait<kLeft>();
  }

  __device__ __forceinline__ void next() {
    const int total = Sizes::get(plan_).total();
    at_ += total;
    if constexpr (kBulkCopies) ++stage_;
    if (at_ == Sizes::stages(plan_) * total) at_ = 0, stage_ = 0, phase_ ^= 1;
  }

  __device__ __forceinline__ void set_row(int row, const RowWork& work) {
    block_ = 0;
    const int pool = params_.row_entry(row, params_.pools);
    const int head = (pool * params_.layers + work.layer) * params_.pages * params_.num_kv_heads + kv_head_;
    int first_slot = 0, ring_slot = 0;
    if (params_.windows.ring > 0) {
      const int exact_head =
          (params_.row_entry(row, params_.exact_rows) * params_.layers + work.layer) * params_.num_kv_heads + kv_head_;
      first_slot = exact_head * (params_.windows.sink + params_.windows.ring);
      ring_slot = work.exact_begin % params_.windows.ring;
    }
    sync();
    if (is_first()) {
      state_.row = row, state_.head = head, state_.first_slot = first_slot, state_.ring_slot = ring_slot;
      state_.work = work;
    }
    sync();
  }

  // To the next item if this one's units are through; reads its first page ids.
  __device__ __forceinline__ void seek() {
    if (left_ <= 0) return;
    while (unit_ >= state_.work.units) {
      unit_ = 0;
      if (++block_ == plan_.blocks || state_.work.units == 0) {
        const int row = state_.row + 1;
        set_row(row, row_work(params_, row));
      }
    }
    const int idle = state_.work.idle(params_) - unit_;
    if (idle > 0) unit_ += idle, left_ -= idle;
    read_ids();
  }

  // Reads the page ids of the item's next tiles, that of the last in lane 0.
  __device__ __forceinline__ void read_ids() {
    const int size = batch_size(), lane = threadIdx.x % 32;
    if (lane >= size) return;
    const int32_t* const table =
        params_.page_table + int64_t{params_.row_entry(state_.row, params_.table_rows)} * params_.table_width;
    const int tile = batch_tile(size);
    ids_ = table[plan_.page_tiles == 1 ? tile : tile / plan_.page_tiles];  // mostly, without a division
  }
  __device__ __forceinline__ int batch_size() const { return min(min(left_, state_.work.tiles - unit_), 32); }
  // The row's tile that is the lane's in the batch of `size` tiles from `unit_` on.
  __device__ __forceinline__ int batch_tile(int size) const {
    return state_.work.first_tile + unit_ + size - 1 - static_cast<int>(threadIdx.x % 32);
  }

  // Those become tiles to copy; reads the ids behind them.
  __device__ __forceinline__ void begin_batch() {
    const int size = batch_size(), lane = threadIdx.x % 32;
    if (size <= 0) return;
    const bool bad = lane < size && static_cast<unsigned>(ids_) >= static_cast<unsigned>(params_.pages);
    if (__any_sync(kAllLanes, bad)) [[unlikely]] {
      mark_bad();
      if (bad) ids_ = 0;  // another page's tile comes instead
    }
    batch_ = state_.head + ids_ * params_.num_kv_heads;
    if (plan_.page_tiles > 1) batch_ = batch_ * plan_.page_tiles + batch_tile(size) % plan_.page_tiles;
    ready_ = size, left_ -= size, unit_ += size;
    pick_tile();
    read_ids();
  }

  // The next of the batch, if there is one.
  __device__ __forceinline__ void pick_tile() { tile_ = __shfl_sync(kAllLanes, batch_, (ready_ - 1) & 31); }

  // Starts the copy of the next unit's keys into the current stage.
  __device__ __forceinline__ void copy_keys() {
    if (ready_ == 0 && left_ > 0) [[unlikely]]
      begin_batch();
    if (ready_ > 0) {
      const TileBytes bytes = Sizes::get(plan_);
      copy(0, params_.key, 0, bytes.key_codes, bytes.key_params_at(), bytes.key_params);
    } else if (left_ > 0) {
      copy_exact(0, exact_apart() ? nullptr : params_.key.exact, 0);
    }
    if constexpr (!kBulkCopies) ptx::cp_async_commit();
  }

  // The same of its values; then moves on to the unit after it.
  __device__ __forceinline__ void copy_values() {
    const TileBytes bytes = Sizes::get(plan_);
    if (ready_ > 0) {
      copy(1, params_.value, bytes.value_codes_at(), bytes.value_codes, bytes.value_params_at(), bytes.value_params);
      --ready_;
      pick_tile();
      if (ready_ == 0) [[unlikely]] {
        if (unit_ == state_.work.tiles) {
          if (is_first()) ++state_.items_copied;
          seek();
        } else {
          begin_batch();
        }
      }
    } else if (left_ > 0) {
      const bool apart = exact_apart(), keys = apart && !exact_keys_copied_;
      copy_exact(1, keys ? params_.key.exact : params_.value.exact, apart ? 0 : bytes.value_codes_at());
      exact_keys_copied_ = keys;
      if (!keys) {
        --left_, ++unit_;
        if (unit_ == state_.work.units) seek();
      }
    }
    if constexpr (!kBulkCopies) ptx::cp_async_commit();
  }

  // The keys or values of a chunk of exact tokens, or nothing if `from` is null.
  __device__ __forceinline__ void copy_exact(int part, const uint16_t* from, int at) {
    const int number = unit_ - state_.work.tiles;
    const uint32_t to = ptx::shared_address(stage()) + at;
    if constexpr (kBulkCopies) {
      const uint32_t barrier = barriers_ + 8 * (2 * stage_ + part);
      const int thread = threadIdx.x % kThreads;
      const bool wanted = from != nullptr && thread < kExactTokens;
      const int place = wanted ? state_.place(params_.windows, number * kExactTokens + thread) : -1;
      const int count = __popc(__ballot_sync(kAllLanes, place >= 0));
      if (thread == 0) ptx::mbarrier_expect(barrier, count * 16 * kExactUnits);
      __syncwarp();
      if (place >= 0)
        ptx::bulk_copy(to + exact_at(thread, 0), from + int64_t{place} * Sizes::kDim, 16 * kExactUnits, barrier);
    } else if (from != nullptr) {
      copy_exact_lanes(params_.windows, state_, number, from, to);
    }
  }

  // The lane's 16 bytes of some of the rows.  Not inlined: it is asked for in four places, and the code of a tile
  // should lie together.
  __device__ __noinline__ static void copy_exact_lanes(const Windows& windows, const StreamState& state, int number,
                                                       const uint16_t* from, uint32_t to) {
    constexpr int kRows = kThreads / kExactUnits;  // a turn
    static_assert(!kSwizzled || (kRows & (kRows - 1)) == 0, "turns would share bits of a row's number");
    const int thread = threadIdx.x % kThreads, row = thread / kExactUnits, unit = thread % kExactUnits;
    from += 8 * unit, to += exact_at(row, unit);
    const int place = state.place_of_chunk(windows, number);
    if (place >= 0) {
      from += int64_t{place + row} * Sizes::kDim;
#pragma unroll
      for (int first = 0; first < kExactTokens; first += kRows)
        ptx::cp_async16(exact_behind(to, first, 0), from + first * Sizes::kDim,
                        row < kRows && first + row < kExactTokens);
    } else {
#pragma unroll 1
      for (int first = 0; first < kExactTokens; first += kRows) {
        const int place = state.place(windows, number * kExactTokens + first + row);
        ptx::cp_async16(exact_behind(to, first, 0), from + int64_t{place} * Sizes::kDim,
                        place >= 0 && row < kRows && first + row < kExactTokens);
      }
    }
  }

  // Part 0 or 1 of a tile, the keys or the values.
  __device__ __forceinline__ void copy(int part, const OperandParams& operand, int codes_at, int codes, int pairs_at,
                                       int pairs) {
    if constexpr (Sizes::kFixed) {
      copy_lanes(codes_at, codes_[part], codes);
      copy_lanes(pairs_at, pairs_[part], pairs);
    } else {
      const uint8_t* const codes_from = operand.codes + int64_t{tile_} * codes;
      const uint8_t* const pairs_from = static_cast<const uint8_t*>(operand.params) + int64_t{tile_} * pairs;
      const int lane = threadIdx.x % kThreads;
      const uint32_t to = ptx::shared_address(stage());
      if constexpr (kBulkCopies) {
        if (lane == 0) {
          const uint32_t barrier = barriers_ + 8 * (2 * stage_ + part);
          ptx::mbarrier_expect(barrier, codes + pairs);
          ptx::bulk_copy(to + codes_at, codes_from, codes, barrier);
          ptx::bulk_copy(to + pairs_at, pairs_from, pairs, barrier);
        }
      } else {
        for (int i = 16 * lane; i < codes; i += 16 * kThreads) ptx::cp_async16(to + codes_at + i, codes_from + i);
        for (int i = 16 * lane; i < pairs; i += 16 * kThreads) ptx::cp_async16(to + pairs_at + i, pairs_from + i);
      }
    }
  }

  // To the current stage; `from` is the lane's own.
  __device__ __forceinline__ void copy_lanes(int at, const uint8_t* from, int size) {
    from += uint64_t{static_cast<uint32_t>(tile_)} * static_cast<uint32_t>(size);
    const uint32_t to = to_ + at_ + at;
    const int thread = threadIdx.x % kThreads;
#pragma unroll
    for (int i = 0; i < size; i += 16 * kThreads)
      ptx::cp_async16(to + i, from + i, size - i >= 16 * kThreads || 16 * thread < size - i);
  }

  const DecodeParams& params_;
  const Plan& plan_;
  const int kv_head_;
  const uint8_t* const ring_;
  const uint32_t barriers_;
  StreamState& state_;
  int at_ = 0;  // where the current stage is in the ring
  // For barriers: its number, and the parity of how often the ring was filled.
  int stage_ = 0;
  uint32_t phase_ = 0;
  bool exact_keys_copied_ = false;  // of the chunk whose values the next stage takes
  // With known sizes, the lane's own addresses: in the first stage, and in the first tile of keys and of values.
  uint32_t to_ = 0;
  const uint8_t *codes_[2], *pairs_[2];
  // The tiles whose copies come next, in the pools, the last in lane 0.  Below 2^31: decode_mma.cu checks.
  int batch_ = 0, ready_ = 0;
  int tile_;  // the first of them
  // Behind them: units of the range, the first one's place, the page ids of the first ones that are tiles.
  int left_, block_, unit_, ids_ = 0;
};

}  // namespace jax_foscar::cuda
