// decode_attention as the tensor-core kernel for sm_80 and newer computes it, on the CPU: cuda/decode_mma.cuh on
// emulated warps, one CTA after the other, then the merge of their parts.  A C interface for
// tests/test_mma_emulator.py, which compiles this with warp_ptx.cuh in the place of cuda/ptx.cuh.
#include "decode_mma.cuh"

#include <cstdio>

#include "combine_parts.h"
#include "warps.h"

namespace jax_foscar::cuda {
alignas(128) uint8_t shared[227 << 10];
}

namespace emulator {
namespace {

using namespace jax_foscar::cuda;

struct Sizes {
  int64_t batch, num_queries, num_heads, num_kv_heads, pools, layers, pages, page_size, table_width, dim;
  int64_t key_bits, key_per_channel, key_group, value_bits, value_per_channel, value_group;
  int64_t sink, recent, token_group, ring, causal, window_left;
  int64_t ctas, teams, seed, fault;  // teams: workers a CTA
};
struct Arrays {
  const float* q;
  const uint8_t *key_codes, *value_codes;
  const void *key_params, *value_params;
  const uint16_t *key_exact, *value_exact;
  const int32_t *page_table, *length, *layer;
  float *out, *lse;
};

DecodeParams decode_params(const Sizes& s, const Arrays& a, float scale) {
  const auto i = [](int64_t x) { return static_cast<int>(x); };
  DecodeParams p = {};
  p.batch = i(s.batch), p.num_kv_heads = i(s.num_kv_heads), p.num_heads = i(s.num_heads);
  p.num_queries = i(s.num_queries), p.pools = i(s.pools), p.layers = i(s.layers), p.pages = i(s.pages);
  p.page_size = i(s.page_size), p.table_width = i(s.table_width);
  p.windows = {i(s.sink), i(s.recent), i(s.token_group), i(s.ring)};
  p.param_dtype = DType::kF16, p.q_dtype = DType::kF32;
  static_cast<OperandFormat&>(p.key) = {i(s.key_bits), i(s.dim), i(s.key_group), s.key_per_channel != 0};
  static_cast<OperandFormat&>(p.value) = {i(s.value_bits), i(s.dim), i(s.value_group), s.value_per_channel != 0};
  p.key.codes = a.key_codes, p.key.params = a.key_params, p.key.exact = a.key_exact;
  p.value.codes = a.value_codes, p.value.params = a.value_params, p.value.exact = a.value_exact;
  p.q = a.q, p.page_table = a.page_table, p.length = a.length, p.layer = a.layer, p.out = a.out, p.lse = a.lse;
  p.table_rows = p.length_rows = p.exact_rows = p.batch, p.layer_rows = 1;
  p.features.causal = s.causal != 0;
  p.features.window_left = i(s.window_left), p.features.window_right = kUnbounded;
  p.scale = scale;
  return p;
}

template <class T>
void run(const DecodeParams& params, const Sizes& s) {
  std::vector<int> row_start(params.batch + 1);
  const int workers = static_cast<int>(s.ctas * s.teams);
  std::vector<float> pieces(2 * workers * piece_floats(T::kRows, T::kDim), NAN);
  Plan plan = {};
  plan.blocks = 1, plan.page_tiles = params.page_size / kTileTokens;
  plan.stages = T::Sizes::kStages, plan.bytes = T::kTileBytes;
  plan.row_start = row_start.data(), plan.pieces = pieces.data();
  const int threads = static_cast<int>(s.teams) * T::kTeam * 32;
  const int bytes = static_cast<int>(s.teams) * (plan.stages * plan.bytes.total() + T::kTeam * T::kWarpBytes);
  if (bytes > static_cast<int>(sizeof shared)) throw std::invalid_argument("too many workers a CTA");
  grid_size.x = static_cast<unsigned>(s.ctas), block_size.x = threads;
  for (block_index.x = 0; block_index.x < grid_size.x; ++block_index.x) {
    Block block(threads, shared, bytes, s.seed + block_index.x, static_cast<Fault>(s.fault));
    block.run([&] { decode_mma<T>(params, plan); });
  }
  combine_parts(params, row_start.data(), pieces.data(), workers, T::kRows);
}

// Runs the kernel of the call's kinds and rows, or returns false.
template <class Key, class Value, int kDim, int kRows>
bool run_if(const DecodeParams& params, const Sizes& s) {
  const auto serves = [](const OperandParams& x, int bits, bool per_channel, int group) {
    return x.dim == kDim && x.bits == bits && x.per_channel == per_channel && x.group == (group == 0 ? kDim : group);
  };
  const auto rows = params.rows_a_kv_head();
  if (!serves(params.key, Key::kBits, Key::kPerChannel, Key::kGroup) ||
      !serves(params.value, Value::kBits, Value::kPerChannel, Value::kGroup) || rows > kRows ||
      (kRows > 4 && rows <= kRows / 2))
    return false;
  run<Traits<KindList<Key>, KindList<Value>, kDim, kRows, 4>>(params, s);
  return true;
}

template <int kBits, int kGroup = 0>
using Token = Kind<kBits, false, kGroup>;
template <int kBits>
using Channel = Kind<kBits, true, 64>;

void emulate(const Sizes& s, const Arrays& a, float scale) {
  const DecodeParams p = decode_params(s, a, scale);
  const bool ran = run_if<Token<4>, Token<4>, 128, 4>(p, s) || run_if<Token<2>, Token<2>, 128, 4>(p, s) ||
                   run_if<Token<4>, Token<2>, 128, 4>(p, s) || run_if<Token<2, 64>, Token<2, 64>, 128, 4>(p, s) ||
                   run_if<Channel<4>, Token<4, 64>, 128, 4>(p, s) || run_if<Channel<2>, Channel<2>, 128, 4>(p, s) ||
                   run_if<Token<2, 64>, Token<2, 64>, 128, 8>(p, s) || run_if<Channel<4>, Token<4, 64>, 128, 8>(p, s) ||
                   run_if<Token<4>, Token<4>, 128, 16>(p, s) || run_if<Token<2>, Token<2>, 128, 16>(p, s) ||
                   run_if<Token<2>, Token<2>, 64, 4>(p, s);
  if (!ran) throw std::invalid_argument("no such kernel is emulated");
}

}  // namespace
}  // namespace emulator

// Returns whether it ran; if not, a message says why.
extern "C" bool emulate_decode_mma(const emulator::Sizes* sizes, const emulator::Arrays* arrays, float scale,
                                   char* message, int64_t message_size) {
  try {
    emulator::emulate(*sizes, *arrays, scale);
    return true;
  } catch (const std::exception& error) {
    std::snprintf(message, message_size, "%s", error.what());
    return false;
  }
}
