// The fast decode-attention kernel: affine folding on integer tensor cores, for 2- and 4-bit keys and values.
//
// Grid: one CTA an SM (at most kMaxWorkers workers in all).  Each CTA finds its workers' ranges of the work
// (schedule.cuh); a worker is a warp, or for more than eight query rows a team of warps that shares a ring.  From then
// on it is alone: it streams its tiles of 64 tokens through its ring (tile_stream.cuh), scores them (keys.cuh), runs
// the online softmax and adds the values (values.cuh) for up to kRows query rows of one KV head, then the item's exact
// tokens (exact.cuh).  What it has of an item goes to the outputs if the whole item was its own, else to the workspace
// for combine.cu.
//
// Not handled: 16-bit operands, head dims that differ, and what is not in the kernel's lists of kinds.
#pragma once

#include <algorithm>

#include "channel_keys.cuh"
#include "exact.cuh"
#include "results.cuh"
#include "softmax.cuh"
#include "tile_stream.cuh"
#include "workspace.h"

namespace jax_foscar::cuda {

template <int kBits_, bool kPerChannel_, int kGroup_ = 0>
struct Kind {
  static constexpr int kBits = kBits_;
  static constexpr bool kPerChannel = kPerChannel_;
  static constexpr int kGroup = kGroup_;
};

// The kinds of keys or values a kernel serves: chosen by number at run time, once a tile, which costs a branch.
template <class... Kinds>
struct KindList {
  static constexpr int kCount = sizeof...(Kinds);
  static constexpr bool kAnyPerChannel = (Kinds::kPerChannel || ...);
  static constexpr QuantKind kTable[kCount] = {QuantKind{Kinds::kBits, Kinds::kPerChannel, Kinds::kGroup}...};

  // The most channel groups that a kind divides `dim` into.
  static constexpr int max_groups(int dim) {
    int most = 1;
    for (const QuantKind& kind : kTable) most = std::max(most, kind.channel_groups(dim));
    return most;
  }

  template <typename Call>
  __device__ __forceinline__ static void call(int number, const Call& call_with) {
    if constexpr (kCount == 1) {
      (call_with(Kinds{}), ...);
    } else {
      int i = 0;
      ((number == i++ ? call_with(Kinds{}) : void()), ...);
    }
  }
};

// Of a kernel with one kind of keys and of values, of known groups; zeros for any other, whose sizes come with the
// launch.
template <class Keys, class Values>
constexpr TileBytes fixed_tile_bytes(int dim, int pair_bytes) {
  const QuantKind key = Keys::kTable[0], value = Values::kTable[0];
  for (const QuantKind& kind : {key, value})
    if (kind.per_channel && kind.group == 0) return {};
  if (Keys::kCount > 1 || Values::kCount > 1) return {};
  const auto pairs = [&](const QuantKind& kind) {
    const int count = kind.per_channel ? kTileTokens / kind.group * dim : kTileTokens * kind.channel_groups(dim);
    return count * pair_bytes;
  };
  return {kTileTokens * token_bytes(key.bits, dim), kTileTokens * token_bytes(value.bits, dim), pairs(key),
          pairs(value)};
}

struct Nothing {};  // in the place of a member that a kernel does not have

inline constexpr int kScanBytes = 4 * 32;  // of a warp, for find_start

// As many stages as Hopper's shared memory holds for all workers, but at least two.  `own_bytes`: beside the ring.
constexpr int fixed_stages(int workers, int tile_bytes, int own_bytes) {
  const int stages = ((227 << 10) / workers - own_bytes) / tile_bytes;
  return stages < 2 ? 2 : stages > kMaxStages ? kMaxStages : stages;
}

template <class Keys_, class Values_, int kDim_, int kRows_, int kPairBytes_>
struct Traits {
  using Keys = Keys_;
  using Values = Values_;
  static constexpr int kDim = kDim_;    // of keys and values
  static constexpr int kRows = kRows_;  // query rows of an item
  // Warps of a worker, which share its ring.  Registers hold eight rows a warp, or as good as; of wide heads four, and
  // with 4-bit keys per channel four measured faster.
  static constexpr bool kFourRows =
      kDim > 128 || (Keys::kCount == 1 && Keys::kTable[0].bits == 4 && Keys::kTable[0].per_channel);
  static constexpr int kMostRows = kFourRows ? 4 : 8;
  static constexpr int kTeam = kRows <= kMostRows ? 1 : kRows / kMostRows;
  static constexpr int kWarpRows = kRows / kTeam, kTiles = kWarpRows / 4;
  static constexpr int kPairBytes = kPairBytes_;
  static constexpr int kMaxWarps = kTiles * kDim > 256 || kDim > 192 ? 8 : 12;  // what registers allow
  using Queries = jax_foscar::cuda::Queries<kDim, kTiles, Keys::kAnyPerChannel>;
  static constexpr int kGroups = Values::max_groups(padded_dim(kDim));
  using Outputs = jax_foscar::cuda::Outputs<kDim, kTiles, kGroups>;
  static constexpr TileBytes kTileBytes = fixed_tile_bytes<Keys, Values>(kDim, kPairBytes);
  // What a warp has behind the ring; of `stream` and `barriers` the team uses its first warp's.  Rings begin at
  // multiples of 128 bytes: copies to other addresses cost 5 % of the read rate.
  struct alignas(128) Own {
    Queries queries;
    StreamState stream;
    std::conditional_t<kTileBytes.total() != 0, Nothing, uint64_t[kNumBarriers]> barriers;  // of bulk copies
  };
  struct Sizes {
    static constexpr TileBytes kBytes = kTileBytes;
    static constexpr bool kFixed = kBytes.total() != 0;
    static constexpr int kDim = kDim_, kTeam = Traits::kTeam;
    static constexpr int kStages =
        kFixed ? fixed_stages(kMaxWarps / kTeam, kBytes.total(), kTeam * (sizeof(Own) + kScanBytes)) : 0;
    __device__ static TileBytes get(const Plan& plan) { return kFixed ? kBytes : plan.bytes; }
    __device__ static int stages(const Plan& plan) { return kFixed ? kStages : plan.stages; }
  };
  using Stream = TileStream<Sizes>;
  static constexpr int kWarpBytes = sizeof(Own) + kScanBytes;  // of shared memory, beside the ring
};

template <class T>
__device__ __forceinline__ void attend_tile(const DecodeParams& params, const Plan& plan, typename T::Stream& stream,
                                            const RowWork& work, int first_token, bool masked, int lane,
                                            typename T::Queries& queries, Softmax<T::kTiles>& softmax,
                                            typename T::Outputs& out) {
  constexpr int kTiles = T::kTiles, kDim = T::kDim, kPairBytes = T::kPairBytes;
  float scores[kTiles][4][2], steps[kTiles];
  stream.wait_for_keys();
  const uint8_t* const stage = stream.stage();
  T::Keys::call(plan.key_kind, [&](auto kind) {
    using Key = decltype(kind);
    const uint8_t* pairs = stage + T::Sizes::get(plan).key_params_at();
    if constexpr (Key::kPerChannel) {
      score_per_channel<Key::kBits, Key::kGroup, kPairBytes>(params, stage, pairs, lane, queries, scores);
    } else {
      constexpr int kGroup = Key::kGroup == 0 ? padded_dim(kDim) : Key::kGroup;
      score_per_token<Key::kBits, kGroup, kPairBytes>(stage, pairs, queries, lane, scores);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      steps[tile] = Key::kPerChannel ? 1.0f : queries.rows[4 * tile + lane % 4].step;
  });
  stream.replace_keys();
  if (params.features.soft_cap != 0.0f) cap_scores<T>(params, steps, scores);
  if (masked) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const Visible visible = queries.rows[4 * tile + lane % 4].visible;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int token = first_token + 8 * i + lane / 4;
        if (!visible.sees_paged(token, params.windows.sink)) scores[tile][i / 2][i % 2] = -INFINITY;
      }
    }
  }
  exponentiate<T>(steps, scores, softmax, out);
  stream.wait_for_values();
  T::Values::call(plan.value_kind, [&](auto kind) {
    using Value = decltype(kind);
    const uint8_t* codes = stage + T::Sizes::get(plan).value_codes_at();
    const uint8_t* pairs = stage + T::Sizes::get(plan).value_params_at();
    if constexpr (Value::kPerChannel) {
      add_values_per_channel<Value::kBits, kPairBytes>(
          codes, pairs, Value::kGroup == 0 ? params.value.group : Value::kGroup, params.windows.sink - first_token,
          work.quantized - first_token, scores, lane, out);
    } else {
      constexpr int kGroup = Value::kGroup == 0 ? padded_dim(kDim) : Value::kGroup;
      add_values_per_token<Value::kBits, kGroup, kPairBytes>(codes, pairs, masked, scores, lane, out);
    }
  });
  stream.replace_values();
}

// A chunk of exact tokens; `masked` unless all query rows see all of them.
template <class T>
__device__ __forceinline__ void attend_exact(const DecodeParams& params, const Plan& plan, typename T::Stream& stream,
                                             const RowWork& work, int number, bool masked, int lane,
                                             const ExactQueries<T::kDim, T::kTiles>& exact_queries,
                                             const typename T::Queries& queries, Softmax<T::kTiles>& softmax,
                                             typename T::Outputs& out) {
  using Row = ExactRow<typename T::Stream>;
  float scores[T::kTiles][1][2], steps[T::kTiles];
  const bool apart = stream.exact_apart();
  apart ? stream.wait_for_stage() : stream.wait_for_keys();
  score_exact(Row(stream, 0, lane % 16, lane / 16), exact_queries, scores);
  stream.replace_keys();
  if (apart) stream.replace_values();
#pragma unroll
  for (int tile = 0; tile < T::kTiles; ++tile) steps[tile] = params.scale * 1.4426950408889634f;
  if (params.features.soft_cap != 0.0f) cap_scores<T>(params, steps, scores);
  unsigned seen[2][T::kTiles] = {};  // by lane 4 g + c: its query row sees token 8 r + g
  if (masked) {
#pragma unroll
    for (int tile = 0; tile < T::kTiles; ++tile) {
      const Visible visible = queries.rows[4 * tile + lane % 4].visible;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int token = work.exact_token(number * kExactTokens + 8 * r + lane / 4);
        const bool sees = token >= 0 && visible.sees_exact(token, params.windows.sink);
        if (!sees) scores[tile][0][r] = -INFINITY;
        seen[r][tile] = __ballot_sync(kAllLanes, sees);
      }
    }
  }
  exponentiate<T>(steps, scores, softmax, out);
  apart ? stream.wait_for_stage() : stream.wait_for_values();
  const int values_at = apart ? 0 : T::Sizes::get(plan).value_codes_at();
  add_values_exact(Row(stream, values_at, lane / 16 * 8 + lane % 8, lane / 8 % 2), masked, seen, scores, lane, out);
  if (apart) stream.replace_keys();
  stream.replace_values();
}

// Leaves an item, or the worker's part of it; the warp's rows are those of the piece from `first_row` on.  Its code is
// kept short: what is not in the instruction cache comes from behind all the tiles that are under way.
template <class T>
__device__ __forceinline__ void finish(const DecodeParams& params, const ItemRows& rows, bool whole, bool bad,
                                       float* piece, int first_row, int value_group, int lane,
                                       const typename T::Queries& queries, Softmax<T::kTiles>& softmax,
                                       typename T::Outputs& out) {
  const int g = lane / 4, c = lane % 4;
#pragma unroll
  for (int tile = 0; tile < T::kTiles; ++tile) {
    float sum = sum_over_tokens(softmax.sum[tile]);
#pragma unroll
    for (int group = 0; group < T::kGroups; ++group) {
      const unsigned negative = __ballot_sync(kAllLanes, out.weight_bits[tile][group] & kNegative);
      out.offsets[tile][group] = sum_over_tokens(out.offsets[tile][group]);
      if (negative & 0x11111111u << c) out.offsets[tile][group] = NAN;
    }
    const int r = 4 * tile + c, in_piece = first_row + r;
    const int64_t index = rows.index(r);
    if (index < 0) continue;
    if (bad || !queries.rows[r].finite) sum = NAN;
    float max = softmax.max[tile], factor = 1.0f;
    const bool real = rows.is_real(r);
    if (!real) max = -INFINITY, sum = 0.0f;
    if (whole) {
      factor = real ? normalize(params, index, &max, &sum) : 0.0f;
      if (g == 0) params.lse[index] = natural_lse(max, sum);
    } else if (g == 0) {
      float* const maxima = piece + T::kRows * T::kDim + in_piece;
      maxima[0] = max, maxima[T::kRows] = sum;
    }
    float x[T::Outputs::kRowTiles][2];
#pragma unroll
    for (int u = 0; u < T::Outputs::kRowTiles; ++u) {
      // The offset of the channel's group.
      float offset = out.offsets[tile][0];
#pragma unroll
      for (int group = 1; group < T::kGroups; ++group) {
        const float other = out.offsets[tile][group];
        offset = 16 * u / value_group == group ? other : offset;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) x[u][r] = real ? (out.sums[tile][u][r] + offset) * factor : 0.0f;
    }
    const auto store = [&](auto* to) {
#pragma unroll
      for (int u = 0; u < T::kDim / 16; ++u) convert(x[u][0], to + 16 * u), convert(x[u][1], to + 16 * u + 8);
    };
    if (whole) {
      with_output(params, index * T::kDim + g, store);
    } else {
      store(piece + in_piece * T::kDim + g);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(32 * T::kMaxWarps, 1)
    decode_mma(const __grid_constant__ DecodeParams params, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kTeam = T::kTeam;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32, member = warp % kTeam;
  const int ring = T::Sizes::stages(plan) * T::Sizes::get(plan).total();
  uint8_t* const stages = shared + warp / kTeam * (ring + kTeam * sizeof(typename T::Own));
  typename T::Own* const own = reinterpret_cast<typename T::Own*>(stages + ring);  // of the team's warps
  typename T::Queries& queries = own[member].queries;
  int* const scan = reinterpret_cast<int*>(shared + warps / kTeam * (ring + kTeam * sizeof(typename T::Own)));
  ptx::wait_for_dependency();
  ptx::launch_dependents();  // combine.cu's CTAs may come as soon as there is room; they wait for this grid's end
  const Worker worker(params, kTeam);
  const int kv_head = worker.kv_head;
  // The warp's query rows of the item: rather found again than kept in registers.
  int row, block, real_queries;
  const auto rows = [&] {
    return ItemRows(params, row, real_queries, block * T::kRows + member * T::kWarpRows, kv_head);
  };
  // Their numbers, and what they see.
  const auto load = [&](const RowQueries& row_queries) {
    real_queries = row_queries.count;
    const ItemRows item = rows();
    T::Keys::call(plan.key_kind, [&](auto kind) {
      using Key = decltype(kind);
      if constexpr (Key::kPerChannel) {
        load_channel_queries<Key::kBits>(params, item, lane, queries);
      } else {
        constexpr int kGroup = Key::kGroup == 0 ? padded_dim(T::kDim) : Key::kGroup;
        load_queries<Key::kBits, kGroup>(params, item, lane, queries);
      }
    });
    load_visible(params, item, row_queries, lane, queries.rows);  // behind, while the length is on its way
  };
  // Queries come before the copies, or they would wait behind them.  Those of an even batch come even before the
  // lengths: where the range would begin is known.
  const float items = static_cast<float>(params.batch) * plan.blocks;
  const int guess = min(static_cast<int>(items * worker.range / worker.ranges), params.batch * plan.blocks - 1);
  row = guess / plan.blocks, block = guess % plan.blocks;
  const Start start =
      find_start(params, worker, plan.blocks, scan, plan.row_start, [&] { load(params.row_queries(row)); });
  if (start.count == 0) return;
  if (row != start.row || block != start.block) {
    row = start.row, block = start.block;
    load(params.row_queries(row, start.work.length));
  }
  typename T::Stream stream(params, plan, kv_head, start, stages, &own->barriers, &own->stream);

  RowWork work = start.work;
  // The first warp first finishes an item without having begun it, while it waits for its first tile: the code for that
  // is then at hand when the first warp comes to the end of an item.  It does so alone, and must not wait for its team.
  bool rehearses = warp == 0;
  int left = rehearses ? 0 : start.count;
  int unit = start.unit;
  while (true) {
    // One item, or the part of it that is the warp's.
    Softmax<T::kTiles> softmax;
    typename T::Outputs out;
    // Paged tokens that every query row sees.
    int plain_first = params.windows.sink, plain_last = work.quantized;
#pragma unroll
    for (int tile = 0; tile < T::kTiles; ++tile) {
#pragma unroll
      for (int group = 0; group < T::kGroups; ++group)
        out.offsets[tile][group] = 0.0f, out.weight_bits[tile][group] = 0;
#pragma unroll
      for (int u = 0; u < T::Outputs::kRowTiles; ++u) out.sums[tile][u][0] = out.sums[tile][u][1] = 0.0f;
      softmax.max[tile] = -INFINITY, softmax.sum[tile] = 0.0f;
      if (rows().is_real(4 * tile + lane % 4)) {
        const Visible visible = queries.rows[4 * tile + lane % 4].visible;
        plain_first = max(plain_first, visible.begin);
        plain_last = min(plain_last, min(visible.boundary, visible.end));
        if (visible.drafts != nullptr) plain_last = min(plain_last, visible.first_draft);
      }
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      plain_first = max(plain_first, __shfl_xor_sync(kAllLanes, plain_first, distance));
      plain_last = min(plain_last, __shfl_xor_sync(kAllLanes, plain_last, distance));
    }
    const int plain_begin = (plain_first + kTileTokens - 1) / kTileTokens - work.first_tile;
    const int plain_end = plain_last / kTileTokens - work.first_tile;

    const bool begins_here = unit == 0;
    const int end = min(work.units, unit + left);
    left -= end - unit;
    unit = max(unit, work.idle(params));
    const int tiles_end = ptx::opaque(min(end, work.tiles));
    const bool has_tiles = unit < tiles_end;
    for (; unit < tiles_end; ++unit) {
      const int first_token = (work.first_tile + unit) * kTileTokens;
      const bool masked = unit < plain_begin || unit >= plain_end;
      attend_tile<T>(params, plan, stream, work, first_token, masked, lane, queries, softmax, out);
    }
    if (unit < end) {
      const ExactQueries<T::kDim, T::kTiles> exact_queries(params, rows(), lane);
      SeenByAll seen_by_all;
#pragma unroll
      for (int tile = 0; tile < T::kTiles; ++tile)
        if (rows().is_real(4 * tile + lane % 4)) seen_by_all.meet(queries.rows[4 * tile + lane % 4].visible);
      seen_by_all.meet_lanes();
      for (; unit < end; ++unit) {
        const int number = unit - work.tiles;
        attend_exact<T>(params, plan, stream, work, number, !seen_by_all.has_chunk(work, number), lane, exact_queries,
                        queries, softmax, out);
      }
    }

    finish<T>(params, rows(), begins_here && end == work.units, has_tiles && stream.item_was_bad(),
              plan.pieces + (int64_t{worker.number} * 2 + begins_here) * piece_floats(T::kRows, T::kDim),
              member * T::kWarpRows, params.value.per_channel ? T::kDim : params.value.group, lane, queries, softmax,
              out);

    if (rehearses) {
      rehearses = false, left = start.count, unit = start.unit;
      continue;
    }
    if (left <= 0) break;
    unit = 0;
    if (++block == plan.blocks) {
      block = 0;
      do work = stream.work_of(++row);
      while (work.units == 0);
    }
    load(params.row_queries(row, work.length));
  }
}

}  // namespace jax_foscar::cuda
