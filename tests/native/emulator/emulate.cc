// decode_attention as the Blackwell kernel computes it, on the CPU: the kernel's own roles on emulated CTAs, one after
// the other, then the combination of their parts.  A C interface for tests/test_blackwell_emulator.py.
#include <algorithm>
#include <cstdio>

#include "blackwell/decode.h"
#include "blackwell/shapes.h"
#include "call.h"
#include "combine_parts.h"
#include "machine.h"

namespace emulator {
namespace {

using namespace jax_foscar;

struct Sizes {
  CallSizes call;
  int64_t blocks, stages, seed, fault;  // stages: at most
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

std::vector<Event> emulate(const Sizes& s, const Arrays& a, float scale) {
  const DecodeParams params = decode_params(s.call, a, scale);
  const char* why = refuse_shape(params);
  check(why == nullptr, why);
  const int rows = kernel_rows(params.rows_a_kv_head()), blocks = static_cast<int>(s.blocks);
  std::vector<int> row_start(params.batch + 1);
  std::vector<float> pieces(2 * blocks * piece_floats(rows, s.call.dim), NAN);
  Launch launch = {};
  launch.row_start = row_start.data(), launch.pieces = pieces.data();
  const auto run = s.call.dim == 64 ? (rows == 4 ? run_ctas<64, 4> : run_ctas<64, 8>)
                                    : (rows == 4 ? run_ctas<128, 4> : run_ctas<128, 8>);
  std::vector<Event> trace = run(params, launch, s);
  const auto store = [&](int64_t i, float x) { static_cast<float*>(params.out)[i] = x; };
  combine_parts(params, row_start.data(), pieces.data(), blocks, rows, store);
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
