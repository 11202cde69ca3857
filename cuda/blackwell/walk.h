// Which tiles a CTA works on: the list of all tiles of a KV head, rows in order, cut into equal contiguous ranges
// (cut.h), one a CTA.  Found on the device from the real lengths; CTAs of all heads with the same range are neighbours.
#pragma once

#include "../cut.h"
#include "pipeline.h"

namespace jax_foscar::blackwell {

struct RowShape {
  int length, layer;
  int tiles;  // 0 for a row that is empty or cannot be read
};

JF_HOST_DEVICE inline RowShape row_shape(const DecodeParams& params, int row) {
  const int length = params.row_queries(row).length, layer = params.layer[params.row_entry(row, params.layer_rows)];
  const bool bad = length > int64_t{params.table_width} * params.page_size || layer < 0 || layer >= params.layers;
  return {length, layer, bad ? 0 : (length + kTokens - 1) / kTokens};
}

struct Start {
  int kv_head, row, tile;
  int count;  // tiles of the range
};

// Called by all threads.  Every CTA sums all rows' tiles, a thread `chunk` neighbouring rows; the thread whose rows
// hold the range's first tile walks them.  CTA 0 leaves each row's first tile in `row_start`, for the combine kernel.
template <class Machine>
JF_HOST_DEVICE void find_start(Machine& m, const DecodeParams& params, int* row_start, int* scan, Start* start) {
  const int thread = m.thread(), lane = m.lane(), warp = m.warp(), batch = params.batch;
  const auto clipped = [batch](int row) { return row < batch ? row : batch; };
  const int chunk = (batch + kThreads - 1) / kThreads;
  const int first = clipped(thread * chunk), last = clipped((thread + 1) * chunk);
  int sum = 0;
  for (int row = first; row < last; ++row) sum += row_shape(params, row).tiles;
  int up_to = sum;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = m.shuffle_up(up_to, distance);
    if (lane >= distance) up_to += other;
  }
  if (lane == 31) scan[warp] = up_to;
  m.sync();
  int before = up_to - sum, all = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += scan[w];
    all += scan[w];
  }

  const int ranges = m.blocks() / params.num_kv_heads, range = m.block() / params.num_kv_heads;
  const Cut cut(all, ranges);
  const int begin = cut.begin(range), count = range < ranges ? cut.count(range) : 0;
  if (thread == 0) start->count = count;
  for (int row = first; row < last; ++row) {
    if (m.block() == 0) row_start[row] = before;
    const int after = before + row_shape(params, row).tiles;
    if (count > 0 && before <= begin && begin < after) {
      start->kv_head = m.block() % params.num_kv_heads;
      start->row = row, start->tile = begin - before;
    }
    before = after;
  }
  if (m.block() == 0 && thread == 0) row_start[batch] = all;
  m.sync();
}

// The tiles of a range, one after the other; every role walks them for itself.
class Walk {
 public:
  JF_HOST_DEVICE Walk(const DecodeParams& params, const Start& start)
      : params_(params), left_(start.count), row_(start.row), tile_(start.tile), begins_(true) {
    if (left_ > 0) shape_ = row_shape(params, row_);
    whole_ = tile_ == 0;
  }

  JF_HOST_DEVICE bool done() const { return left_ == 0; }
  JF_HOST_DEVICE int row() const { return row_; }
  JF_HOST_DEVICE int tile() const { return tile_; }
  JF_HOST_DEVICE int length() const { return shape_.length; }
  JF_HOST_DEVICE int layer() const { return shape_.layer; }
  // The tile is the first, or the last, that the range has of its row.
  JF_HOST_DEVICE bool begins() const { return begins_; }
  JF_HOST_DEVICE bool ends() const { return left_ == 1 || tile_ + 1 == shape_.tiles; }
  // The range holds the row's first tile; its first and last.
  JF_HOST_DEVICE bool has_first() const { return whole_; }
  JF_HOST_DEVICE bool has_all() const { return whole_ && tile_ + 1 == shape_.tiles; }

  JF_HOST_DEVICE void next() {
    --left_;
    begins_ = ++tile_ == shape_.tiles;
    if (!begins_ || left_ == 0) return;
    do shape_ = row_shape(params_, ++row_);
    while (shape_.tiles == 0);
    tile_ = 0, whole_ = true;
  }

 private:
  const DecodeParams& params_;
  int left_, row_, tile_;
  RowShape shape_ = {};
  bool begins_, whole_;
};

}  // namespace jax_foscar::blackwell
