// Who does what, decided on the device from the real lengths.
//
// Every KV head has the same work, one flattened list of units: rows in order, in each row its blocks of query rows in
// order, in each block first idle ones, which stand for what an item costs beside the others, then the row's tiles of
// 64 quantized tokens, then its chunks of exact tokens.  The list is cut into equal contiguous ranges (all counts stay
// below 2^31: decode_mma.cu checks), one a worker (a warp) of the head, so that a ragged batch or a single row fills
// the chip, and an item (row, head, block) wholly inside one range needs no combining.
//
// Workers of all heads with the same range are neighbours, since the heads of a page lie side by side.
#pragma once

#include <cstdint>

#include "cut.h"
#include "params.h"
#include "ptx.cuh"

namespace jax_foscar::cuda {

inline constexpr int kExactTokens = 16;  // a chunk

// What ends one item and begins the next takes about as long as two tiles; a chunk of exact tokens, which has the bytes
// of a 4-bit tile and twice those of a 2-bit one, half as long again as the latter.
inline constexpr int kIdleUnits = 2;
__device__ __forceinline__ int idle_units(const DecodeParams& params, int chunks) {
  return kIdleUnits + chunks * (8 - params.key.bits - params.value.bits) / 8;
}

// One row's work, the same for each of its items.
struct RowWork {
  int length;  // tokens cached
  int layer;
  int quantized;    // tokens below it are in pages, but for the sinks
  int first_tile;   // what unit 0 would be, were it a tile of 64 paged tokens
  int tiles;        // units up to the last tile
  int exact_begin;  // exact tokens: [0, exact_sinks) and [exact_begin, length)
  int exact_sinks;
  int units;  // those, then chunks of exact tokens; 0 for a row that is empty, without queries, or cannot be read
  bool bad;   // the length or the layer is out of range: the row's results are NaN

  __device__ __forceinline__ int idle(const DecodeParams& params) const { return idle_units(params, units - tiles); }
  __device__ __forceinline__ int exact_count() const { return exact_sinks + max(length - exact_begin, 0); }
  // Exact token number i, or -1 past the last.
  __device__ __forceinline__ int exact_token(int i) const {
    return i >= exact_count() ? -1 : i < exact_sinks ? i : exact_begin + i - exact_sinks;
  }
};

// Not inlined: it is long, and rare.
__device__ __noinline__ inline RowWork row_work(const DecodeParams& params, int row) {
  const Windows& windows = params.windows;
  const RowQueries queries = params.row_queries(row);
  RowWork work = {};
  work.length = queries.length;
  work.layer = params.layer[params.row_entry(row, params.layer_rows)];
  work.bad =
      work.length > int64_t{params.table_width} * params.page_size || work.layer < 0 || work.layer >= params.layers;
  if (work.bad || queries.count == 0) return work;
  const int first_seen = first_visible(params.features, queries), first_paged = max(windows.sink, first_seen);
  work.quantized = windows.ring == 0 ? work.length : windows.quantized_length(work.length);
  if (windows.ring > 0 && work.length > 0) {
    // The oldest query reaches furthest back into the ring.
    const int oldest = params.features.causal ? max(queries.first, 0) : work.length - 1;
    work.exact_sinks = first_seen < windows.sink ? min(windows.sink, work.length) : 0;
    work.exact_begin = max(first_paged, windows.boundary(oldest, work.length));
  } else {
    work.exact_begin = work.length;
  }
  const int chunks = (work.exact_count() + kExactTokens - 1) / kExactTokens;
  const int idle = idle_units(params, chunks);
  work.first_tile = first_paged / kTileTokens - idle;
  work.tiles = work.quantized > first_paged ? (work.quantized - 1) / kTileTokens + 1 - work.first_tile : idle;
  work.units = work.tiles + chunks;
  if (work.units == idle) work.units = 0;
  return work;
}

// The query rows of one item.
struct ItemRows {
  int64_t first_query;  // row * T
  int first;            // of the KV head's T * ratio rows
  int ratio, num_heads, first_head;
  int count, real;  // those rows, and those of them whose query is no padding

  // Those of a row's KV head from number `first` on; `queries` of the row are real.
  __device__ __forceinline__ ItemRows(const DecodeParams& params, int row, int queries, int first, int kv_head)
      : first_query(int64_t{row} * params.num_queries),
        first(first),
        ratio(params.num_heads / params.num_kv_heads),
        num_heads(params.num_heads),
        first_head(kv_head * ratio) {
    count = params.num_queries * ratio, real = queries * ratio;
  }

  // Index in [B, T, N] of the item's row r, or -1 past the last.
  __device__ __forceinline__ int64_t index(int r) const {
    const int i = first + r;
    return i < count ? (first_query + i / ratio) * num_heads + first_head + i % ratio : -1;
  }
  __device__ __forceinline__ bool is_real(int r) const { return first + r < real; }
  // The same where there is a query to read, else -1.
  __device__ __forceinline__ int64_t query_index(int r) const { return is_real(r) ? index(r) : -1; }
};

// Where a worker begins.
struct Start {
  int row, block, unit;
  int count;     // units of the range
  RowWork work;  // of the row
};

// Inclusive sum over the lanes up to each.
__device__ __forceinline__ int scan_lanes(int x, int lane) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kAllLanes, x, distance);
    if (lane >= distance) x += other;
  }
  return x;
}

// A team of warps of the grid as a worker.
struct Worker {
  int number, kv_head, range, ranges;  // no worker if range >= ranges

  __device__ __forceinline__ Worker(const DecodeParams& params, int team_warps) {
    const int teams = blockDim.x / 32 / team_warps;
    number = blockIdx.x * teams + threadIdx.x / 32 / team_warps;
    kv_head = number % params.num_kv_heads, range = number / params.num_kv_heads;
    ranges = gridDim.x * teams / params.num_kv_heads;
  }
};

// Every CTA sums all rows' units (a thread takes `chunk` neighbouring rows), then every warp finds its own range.  CTA
// 0 leaves each row's first unit, counted for one block, in `row_start` for the combine kernel.  `scan` has one int a
// thread.  `meanwhile` is called before the warps wait for each other.
template <class Call>
__device__ __forceinline__ Start find_start(const DecodeParams& params, const Worker& worker, int blocks, int* scan,
                                            int* row_start, const Call& meanwhile) {
  const int thread = threadIdx.x, threads = blockDim.x, lane = thread % 32, warp = thread / 32, warps = threads / 32;
  const int chunk = (params.batch + threads - 1) / threads;
  const int first = min(thread * chunk, params.batch), last = min(first + chunk, params.batch);
  int sum = 0;
#pragma unroll 1
  for (int row = first; row < last; ++row) sum += row_work(params, row).units;
  const int of_warp = scan_lanes(sum, lane);
  scan[thread] = of_warp;
  meanwhile();
  __syncthreads();
  const int of_warps = scan_lanes(lane < warps ? scan[32 * lane + 31] : 0, lane);  // lane w: warps 0 .. w
  const int all = __shfl_sync(kAllLanes, of_warps, warps - 1);

  if (blockIdx.x == 0) {
    int start = of_warp - sum + (warp == 0 ? 0 : __shfl_sync(kAllLanes, of_warps, warp - 1));
#pragma unroll 1
    for (int row = first; row < last; ++row) {
      row_start[row] = start;
      if (chunk > 1) start += row_work(params, row).units;
    }
    if (thread == 0) row_start[params.batch] = all;
  }

  const Cut cut(all * blocks, worker.ranges);
  Start start = {};
  start.count = worker.range < worker.ranges ? cut.count(worker.range) : 0;
  if (start.count == 0) return start;
  // The warp, then the thread, whose rows hold the range's first unit.
  const int begin = cut.begin(worker.range), target = begin / blocks;
  const int warps_before = __popc(__ballot_sync(kAllLanes, lane < warps && of_warps <= target));
  int units_before = warps_before == 0 ? 0 : __shfl_sync(kAllLanes, of_warps, warps_before - 1);
  const int of_threads = scan[32 * warps_before + lane];
  const int threads_before = __popc(__ballot_sync(kAllLanes, units_before + of_threads <= target));
  if (threads_before > 0) units_before += __shfl_sync(kAllLanes, of_threads, threads_before - 1);
  start.row = (32 * warps_before + threads_before) * chunk;
  while (true) {
    start.work = row_work(params, start.row);
    if (units_before + start.work.units > target) break;
    units_before += start.work.units;
    ++start.row;
  }
  const int unit = begin - units_before * blocks;  // in the row, blocks one after the other
  start.block = unit / start.work.units, start.unit = unit % start.work.units;
  return start;
}

}  // namespace jax_foscar::cuda
