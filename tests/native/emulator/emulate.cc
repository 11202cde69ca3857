// decode_attention as the Blackwell kernel computes it, on the CPU: the kernel's own roles on emulated CTAs, one after
// the other, then the combination of their parts.  A C interface for tests/test_blackwell_emulator.py.
#include <algorithm>
#include <cstdio>

#include "blackwell/decode.h"
#include "blackwell/shapes.h"
#include "combine_parts.h"
#include "machine.h"

namespace emulator {
namespace {

using namespace jax_foscar;

struct Sizes {
  int64_t batch, num_queries, num_heads, num_kv_heads, pools, layers, pages, page_size, table_width, causal, dim;
  int64_t key_bits, key_per_channel, key_group, value_bits, value_per_channel, value_group;
  int64_t blocks, stages, seed, fault;  // stages: at most
};
struct Arrays {
  const float* q;
  const uint8_t *key_codes, *value_codes;
  const void *key_params, *value_params;
  const int32_t *page_table, *length, *layer;
  float *out, *lse;
};

template <int kDim, int kRows>
std::vector<Event> run_ctas(const DecodeParams& params, Launch launch, const Sizes& sizes) {
  constexpr int kCapacity = 227 << 10;
  check(plan_launch<kRows>(params, kCapacity, &launch), "a tile does not fit into shared memory");
  launch.shared.stages = std::min(launch.shared.stages, static_cast<int>(sizes.stages));
  const int blocks = static_cast<int>(sizes.blocks);
  static Fibers fibers(kThreads);
  std::vector<Event> trace;
  for (int block = 0; block < blocks; ++block) {
    Cta cta(launch.shared, block, blocks, static_cast<uint64_t>(sizes.seed + block), static_cast<Fault>(sizes.fault),
            fibers);
    fibers.start([&](int thread) {
      Thread machine(cta, thread);
      decode<kDim, kRows>(machine, params, launch);
    });
    cta.run();
    if (block == 0) trace = cta.trace;
  }
  return trace;
}

DecodeParams decode_params(const Sizes& s, const Arrays& a, float scale) {
  const auto i = [](int64_t x) { return static_cast<int>(x); };
  DecodeParams p = {};
  p.batch = i(s.batch), p.num_kv_heads = i(s.num_kv_heads), p.num_heads = i(s.num_heads);
  p.num_queries = i(s.num_queries), p.pools = i(s.pools), p.layers = i(s.layers), p.pages = i(s.pages);
  p.page_size = i(s.page_size), p.table_width = i(s.table_width);
  p.windows = {0, 0, 1, 0};
  p.param_dtype = DType::kF16, p.q_dtype = DType::kF32;
  static_cast<OperandFormat&>(p.key) = {i(s.key_bits), i(s.dim), i(s.key_group), s.key_per_channel != 0};
  static_cast<OperandFormat&>(p.value) = {i(s.value_bits), i(s.dim), i(s.value_group), s.value_per_channel != 0};
  p.key.codes = a.key_codes, p.key.params = a.key_params;
  p.value.codes = a.value_codes, p.value.params = a.value_params;
  p.q = a.q, p.page_table = a.page_table, p.length = a.length, p.layer = a.layer, p.out = a.out, p.lse = a.lse;
  p.table_rows = p.length_rows = p.batch, p.layer_rows = 1;
  p.features.causal = s.causal != 0;
  p.features.window_left = p.features.window_right = kUnbounded;
  p.scale = scale;
  return p;
}

std::vector<Event> emulate(const Sizes& s, const Arrays& a, float scale) {
  const DecodeParams params = decode_params(s, a, scale);
  const char* why = refuse_shape(params);
  check(why == nullptr, why);
  const int rows = kernel_rows(s.num_queries * (s.num_heads / s.num_kv_heads)), blocks = static_cast<int>(s.blocks);
  std::vector<int> row_start(params.batch + 1);
  std::vector<float> pieces(2 * blocks * piece_floats(rows, s.dim), NAN);
  Launch launch = {};
  launch.row_start = row_start.data(), launch.pieces = pieces.data();
  const auto run =
      s.dim == 64 ? (rows == 4 ? run_ctas<64, 4> : run_ctas<64, 8>) : (rows == 4 ? run_ctas<128, 4> : run_ctas<128, 8>);
  std::vector<Event> trace = run(params, launch, s);
  combine_parts(params, row_start.data(), pieces.data(), blocks, rows);
  return trace;
}

}  // namespace
}  // namespace emulator

extern "C" {

// Returns the number of events of the first CTA (at most `capacity` are left in `events`), or -1 and a message.
int64_t emulate(const emulator::Sizes* sizes, const emulator::Arrays* arrays, float scale, emulator::Event* events,
                int64_t capacity, char* message, int64_t message_size) {
  try {
    const std::vector<emulator::Event> trace = emulator::emulate(*sizes, *arrays, scale);
    std::copy_n(trace.begin(), std::min<int64_t>(capacity, trace.size()), events);
    return static_cast<int64_t>(trace.size());
  } catch (const std::exception& error) {
    std::snprintf(message, message_size, "%s", error.what());
    return -1;
  }
}

// Name, number of slots and arrivals of a barrier of the pipeline; null past the last.
const char* barrier(int number, bool keys_per_channel, int* slots, int* arrivals, int* index) {
  if (number >= static_cast<int>(emulator::Barrier::kCount)) return nullptr;
  const auto which = static_cast<emulator::Barrier>(number);
  const auto spec = emulator::barrier_spec(which, keys_per_channel);
  *slots = spec.slots, *arrivals = spec.arrivals, *index = emulator::barrier_index(which, 0);
  return spec.name;
}
}
