// decode_attention as the tensor-core kernel for sm_80 and newer computes it, on the CPU: cuda/decode_mma.cuh on
// emulated warps, one CTA after the other, then the merge of their parts.  A C interface for
// tests/test_mma_emulator.py, which compiles this with warp_ptx.cuh in the place of cuda/ptx.cuh.
#include "decode_mma.cuh"

#include <cstdio>

#include "call.h"
#include "combine_parts.h"
#include "warps.h"

namespace jax_foscar::cuda {
alignas(128) uint8_t shared[227 << 10];
}

namespace emulator {
namespace {

using namespace jax_foscar::cuda;

struct Sizes {
  CallSizes call;
  int64_t ctas, teams, seed, fault, half_queries;  // teams: workers a CTA
};

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
  const auto store = [&](int64_t i, float x) { store_output(params, i, x); };
  combine_parts(params, row_start.data(), pieces.data(), workers, T::kRows, store);
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
  DecodeParams p = decode_params(s.call, a, scale);
  if (s.half_queries != 0) p.q_dtype = DType::kF16;
  const bool ran = run_if<Token<4>, Token<4>, 128, 4>(p, s) || run_if<Token<2>, Token<2>, 128, 4>(p, s) ||
                   run_if<Token<4>, Token<2>, 128, 4>(p, s) || run_if<Token<2, 64>, Token<2, 64>, 128, 4>(p, s) ||
                   run_if<Channel<4>, Token<4, 64>, 128, 4>(p, s) || run_if<Channel<2>, Channel<2>, 128, 4>(p, s) ||
                   run_if<Channel<2>, Token<2, 64>, 128, 4>(p, s) || run_if<Token<2, 64>, Token<2, 64>, 128, 8>(p, s) ||
                   run_if<Channel<4>, Token<4, 64>, 128, 8>(p, s) || run_if<Token<4>, Token<4>, 128, 16>(p, s) ||
                   run_if<Token<2>, Token<2>, 128, 16>(p, s) || run_if<Channel<4>, Token<4, 64>, 128, 16>(p, s) ||
                   run_if<Channel<2>, Token<2, 64>, 128, 8>(p, s) || run_if<Token<2>, Token<2>, 64, 4>(p, s);
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
