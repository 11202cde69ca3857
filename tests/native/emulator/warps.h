// A CTA's warps on the CPU, for kernels written in CUDA C++: threads are fibers in a random order, what a warp does
// together happens when its last thread has come, and cp.async copies as late as it may.  Below stands what nvcc has
// built in.  Not emulated: mbarriers and bulk copies, several CTAs at once, and warps whose threads diverge at a vote.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <stdexcept>
#include <vector>

#include "fibers.h"

namespace emulator {

// What a test may break, to see that it is noticed.
enum class Fault {
  kNone,
  kEarlyWait  // cp.async.wait_group lets one group more be under way
};

class Block {
 public:
  Block(int threads, uint8_t* shared, int shared_bytes, uint64_t seed, Fault fault)
      : fault(fault), shared_(shared), shared_bytes_(shared_bytes), fibers_(threads), threads_(threads), rng_(seed) {
    std::fill_n(shared, shared_bytes, 0xff);
  }

  template <class Body>
  void run(const Body& body) {
    running_ = this;
    fibers_.start([&](int) { body(); });
    std::vector<int> left(threads_.size());
    for (size_t i = 0; i < left.size(); ++i) left[i] = static_cast<int>(i);
    while (!left.empty()) {
      std::shuffle(left.begin(), left.end(), rng_);
      bool moved = false;
      for (const int i : left) {
        if (!fibers_.runnable(i)) continue;
        current_ = i, moved = true;
        fibers_.resume(i);
      }
      if (!moved) throw std::runtime_error("deadlock: every thread waits");
      if (!fibers_.error().empty()) throw std::runtime_error(fibers_.error());
      left.erase(std::remove_if(left.begin(), left.end(), [&](int i) { return fibers_.done(i); }), left.end());
    }
  }

  static Block& running() { return *running_; }
  int thread() const { return current_; }
  int size() const { return static_cast<int>(threads_.size()); }
  uint8_t* shared(uint32_t at) const {
    if (at % 2 != 0 || at + 16 > static_cast<uint32_t>(shared_bytes_)) throw std::out_of_range("shared memory");
    return shared_ + at;
  }
  uint32_t shared_at(const void* pointer) const {
    return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - shared_);
  }

  // A lane gives an In and gets an Out, once all lanes of its warp have: `compute(ins, outs)` makes them, for all.
  template <class Out, class In, class Compute>
  Out together(const In& in, const Compute& compute) {
    static_assert(sizeof(In) <= kMost && sizeof(Out) <= kMost);
    Meeting& meeting = meetings_[-1 - current_ / 32];
    const int lane = current_ % 32;
    auto& data = meeting.data[meeting.number % 2];  // a warp's next meeting may fill before all have read this one
    std::memcpy(data.in[lane], &in, sizeof in);
    meet(&meeting, 32, [&] {
      std::array<In, 32> ins;
      std::array<Out, 32> outs;
      for (int i = 0; i < 32; ++i) std::memcpy(&ins[i], data.in[i], sizeof(In));
      compute(ins, outs);
      for (int i = 0; i < 32; ++i) std::memcpy(data.out[i], &outs[i], sizeof(Out));
    });
    Out out;
    std::memcpy(&out, data.out[lane], sizeof out);
    return out;
  }

  // A barrier of `count` threads.
  void sync(int barrier, int count) {
    meet(&meetings_[barrier], count, [] {});
  }

  // cp.async: copies happen when they are waited for.
  void copy(uint32_t to, const void* from) { own().open.push_back({to, from}); }
  void commit() {
    own().groups.push_back(std::move(own().open));
    own().open.clear();
  }
  void wait_for_copies(size_t pending) {
    for (auto& groups = own().groups; groups.size() > pending; groups.pop_front())
      for (const Copy& copy : groups.front()) std::memcpy(shared(copy.to), copy.from, 16);
  }

  const Fault fault;

 private:
  static constexpr int kMost = 48;
  struct Copy {
    uint32_t to;
    const void* from;
  };
  struct Thread {
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
  };
  struct Meeting {
    int came = 0;
    uint64_t number = 0;
    struct {
      alignas(16) uint8_t in[32][kMost], out[32][kMost];
    } data[2];
  };

  Thread& own() { return threads_[current_]; }
  template <class Last>
  void meet(Meeting* meeting, int count, const Last& last) {
    const uint64_t number = meeting->number;
    if (++meeting->came < count) {
      fibers_.wait([=] { return meeting->number != number; });
      return;
    }
    last();
    meeting->came = 0, ++meeting->number;
  }

  static inline Block* running_ = nullptr;
  uint8_t* const shared_;
  const int shared_bytes_;
  Fibers fibers_;
  std::vector<Thread> threads_;
  std::map<int, Meeting> meetings_;  // barriers by their numbers, warps before them
  std::mt19937_64 rng_;
  int current_ = 0;
};

inline struct {
  unsigned x;
} block_index, block_size, grid_size;

// Lane i gets what lane from(i) gave.
template <class Value, class From>
Value shuffle(const Value& value, const From& from) {
  return Block::running().together<Value>(value, [&](const auto& in, auto& out) {
    for (int i = 0; i < 32; ++i) out[i] = in[from(i)];
  });
}

}  // namespace emulator

// Behind the standard headers, which use the first name.
#define __noinline__
#define __launch_bounds__(...)

struct EmulatedThread {
  int x = emulator::Block::running().thread();
};
#define threadIdx (EmulatedThread())
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size

inline void __syncthreads() { emulator::Block::running().sync(0, emulator::Block::running().size()); }
inline void __syncwarp() {
  emulator::Block::running().together<char>(char{}, [](const auto&, auto&) {});
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  return emulator::Block::running().together<unsigned>(vote, [](const auto& in, auto& out) {
    unsigned votes = 0;
    for (int i = 0; i < 32; ++i) votes |= static_cast<unsigned>(in[i]) << i;
    out.fill(votes);
  });
}
inline bool __any_sync(unsigned lanes, bool vote) { return __ballot_sync(lanes, vote) != 0; }
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  return emulator::Block::running().together<unsigned>(
      x, [](const auto& in, auto& out) { out.fill(*std::max_element(in.begin(), in.end())); });
}
template <class Value>
Value __shfl_xor_sync(unsigned, Value x, int distance) {
  return emulator::shuffle(x, [=](int i) { return i ^ distance; });
}
template <class Value>
Value __shfl_up_sync(unsigned, Value x, int distance) {
  return emulator::shuffle(x, [=](int i) { return i < distance ? i : i - distance; });
}
template <class Value>
Value __shfl_sync(unsigned, Value x, int lane) {  // each lane asks for one of its own
  struct Asked {
    Value value;
    int lane;
  };
  return emulator::Block::running().together<Value>(Asked{x, lane}, [](const auto& in, auto& out) {
    for (int i = 0; i < 32; ++i) out[i] = in[in[i].lane % 32].value;
  });
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __uint_as_float(uint32_t x) { return __builtin_bit_cast(float, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline uint32_t __float_as_uint(float x) { return __builtin_bit_cast(uint32_t, x); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selectors) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) picked |= static_cast<uint8_t>(bytes >> 8 * (selectors >> 4 * i & 7)) << 8 * i;
  return picked;
}
inline __half2 __hfma2(__half2 x, __half2 y, __half2 z) {
  const auto fma = [](__half x, __half y, __half z) {  // exact in double, but for the last rounding
    return __double2half(static_cast<double>(__half2float(x)) * __half2float(y) + __half2float(z));
  };
  return {fma(x.x, y.x, z.x), fma(x.y, y.y, z.y)};
}
inline int min(int x, int y) { return x < y ? x : y; }
inline int max(int x, int y) { return x > y ? x : y; }
inline uint32_t max(uint32_t x, uint32_t y) { return x > y ? x : y; }
