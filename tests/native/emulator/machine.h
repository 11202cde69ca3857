// The Machine on which the kernel's roles run here (cuda/blackwell/roles.h): one CTA, its threads as fibers in a random
// order, its shared and tensor memory, its mbarriers, and two engines that finish copies and products whenever a random
// choice lets them, as late as can be.  Tensor memory is written at the wait for the stores, not before.
#pragma once

#include <deque>
#include <random>

#include "blackwell/builders.h"
#include "fibers.h"
#include "tensor_core.h"

namespace emulator {

using namespace jax_foscar::blackwell;

// What a test may break, to see that it is noticed.
enum class Fault {
  kNone,
  kSwizzleBit,         // B's descriptor says that it is swizzled
  kSwappedFragment,    // two registers of a store to tensor memory
  kMissingFlush,       // sums go on from tile to tile
  kMissingWait,        // for the sums
  kMissingFence,       // between a store to shared memory and its use by the tensor cores
  kMissingStoreWait,   // for stores to tensor memory
  kMissingTensorFence  // tcgen05.fence, between tensor memory and a barrier
};

// One thing that the first lane of a warp did, for the model of the pipeline.
enum class Act : int32_t { kWait, kArrive, kExpect, kCopy, kCommit, kRead, kWrite, kMultiplyRead, kMultiplyWrite };
struct Event {
  int32_t warp;
  Act act;
  int32_t what;   // a barrier or a buffer
  int32_t value;  // a wait's parity, a copy's barrier
};

// Buffers, by number: what the pipeline keeps from being overwritten.
inline constexpr int kStageBuffer = 0, kQueryBuffer = kMaxStages, kWeightBuffer = kQueryBuffer + 2,
                     kKeyBuffer = kWeightBuffer + 2, kValueBuffer = kKeyBuffer + 2, kScoreBuffer = kValueBuffer + 2,
                     kSumBuffer = kScoreBuffer + 2;

class Cta {
 public:
  Cta(const SharedPlan& plan, int block, int blocks, uint64_t seed, Fault fault, Fibers& fibers)
      : plan(plan),
        block(block),
        blocks(blocks),
        fault(fault),
        fibers(fibers),
        // Junk: NaN as f16 and E4M3.
        shared_(plan.total() + 1024, 0xff),
        unfenced_(plan.total(), 0),
        stored_(kThreads),
        pending_stores_(kThreads),
        random_(seed) {}

  // All threads to their end; throws if one fails or all wait for each other.
  void run() {
    std::vector<int> ready;
    while (true) {
      ready.clear();
      bool all_done = true;
      for (int warp = 0; warp < kWarps; ++warp) {
        for (int lane = 0; lane < 32; ++lane) {
          all_done &= fibers.done(32 * warp + lane);
          if (fibers.runnable(32 * warp + lane)) {
            ready.push_back(warp);
            break;
          }
        }
      }
      const int warps = static_cast<int>(ready.size());
      const bool copy = !copies_.empty(), product = !products_.empty();
      if (warps + copy + product == 0) {
        check(all_done, "deadlock: every thread waits");
        return;
      }
      const int choice = static_cast<int>(random_() % (warps + copy + product));
      if (choice < warps) {
        run_warp(ready[choice]);
      } else if (copy && choice == warps) {
        finish_copy();
      } else {
        finish_product();
      }
    }
  }

  uint8_t* shared() {
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(shared_.data()) + 127) & ~127ull);
  }

  // --- Barriers: mbarrier objects, with arrivals and bytes pending in the current phase ---
  struct MBarrier {
    int arrivals = 0, pending = 0, bytes = 0;
    uint32_t phase = 0;
  };
  bool phase_ended(int barrier, uint32_t parity) const { return (barriers[barrier].phase & 1) != parity; }
  void arrive(int barrier) {
    check(barriers[barrier].pending > 0, "an arrival more than a barrier counts");
    --barriers[barrier].pending;
    end_phase(barrier);
  }
  void add_bytes(int barrier, int bytes) {
    barriers[barrier].bytes += bytes;
    end_phase(barrier);
  }

  struct Copy {
    int to;
    const uint8_t* from;
    int bytes, barrier;
  };
  struct Product {
    bool is_commit, a_shared, accumulate;
    uint32_t d, form;
    uint64_t a, b;
    int barrier;
  };
  void add_copy(const Copy& copy) { copies_.push_back(copy); }
  void add_product(const Product& product) { products_.push_back(product); }

  void record(int thread, Act act, int what, int value = 0) {
    if (thread % 32 != 0) return;
    const Event event = {thread / 32, act, what, value};
    // Once between two dealings with barriers is enough.
    if (act == Act::kRead || act == Act::kWrite || act == Act::kMultiplyRead || act == Act::kMultiplyWrite) {
      for (const Event& seen : since_[event.warp]) {
        if (seen.act == act && seen.what == what) return;
      }
      since_[event.warp].push_back(event);
    } else {
      since_[event.warp].clear();
    }
    trace.push_back(event);
  }
  void touch(int thread, Act act, int at) {
    const SharedPlan& p = plan;
    if (at < p.queries_at(0)) return record(thread, act, kStageBuffer + at / p.stage_bytes);
    if (at < p.weights_at(0)) return record(thread, act, kQueryBuffer + (at - p.queries_at(0)) / p.query_bytes);
    if (at < p.keys_at(0)) return record(thread, act, kWeightBuffer + (at - p.weights_at(0)) / p.weight_bytes);
    if (at < p.own_at()) return record(thread, act, kKeyBuffer + (at - p.keys_at(0)) / p.key_bytes);
  }
  void touch_tensor(int thread, Act act, uint32_t address) {
    const int column = static_cast<int>(address & 0xffff);
    if (column < sums_at()) return record(thread, act, kKeyBuffer + column / kOperandColumns);  // keys, then values
    if (column < scores_at(0)) return record(thread, act, kSumBuffer);
    record(thread, act, kScoreBuffer + (column - scores_at(0)) / kAccumulatorColumns);
  }

  void mark_store(int thread, int at, int bytes) {
    for (int i = at; i < at + bytes; ++i) unfenced_[i] = 1;
    stored_[thread].push_back({at, bytes});
  }
  void fence(int thread) {
    for (const auto& [at, bytes] : stored_[thread]) {
      for (int i = at; i < at + bytes; ++i) unfenced_[i] = 0;
    }
    stored_[thread].clear();
  }

  void store_later(int thread, uint32_t address, int count, const uint32_t* registers) {
    pending_stores_[thread].push_back({address, {registers, registers + count}});
  }
  void apply_stores(int thread) {
    for (const auto& [address, registers] : pending_stores_[thread])
      store_16x256b(tensor, address, thread / 32, thread % 32, static_cast<int>(registers.size()), registers.data());
    pending_stores_[thread].clear();
  }

  // Threads of one group meet: each leaves a value and reads any other's.  Two buffers, for a fast thread may already
  // be at the next meeting.
  struct Meeting {
    int count = 0;
    uint64_t round = 0;
    uint64_t values[2][kThreads] = {};
  };
  uint64_t meet(Meeting& meeting, int size, int place, uint64_t value,
                const std::function<uint64_t(const uint64_t*)>& f) {
    const uint64_t round = meeting.round;
    meeting.values[round % 2][place] = value;
    if (++meeting.count == size) {
      meeting.count = 0, ++meeting.round;
    } else {
      fibers.wait([&meeting, round] { return meeting.round != round; });
    }
    return f(meeting.values[round % 2]);
  }

  const SharedPlan plan;
  const int block, blocks;
  const Fault fault;
  Fibers& fibers;
  TensorMemory tensor;
  MBarrier barriers[kNumBarriers];
  Meeting all, softmax, queries, warps[kWarps];
  std::vector<Event> trace;
  int tensor_users = 0;

 private:
  void end_phase(int barrier) {
    MBarrier& b = barriers[barrier];
    if (b.pending == 0 && b.bytes == 0) b.pending = b.arrivals, ++b.phase;
  }

  // Until none of its threads can go on.
  void run_warp(int warp) {
    bool moved = true;
    while (moved) {
      moved = false;
      for (int i = 32 * warp; i < 32 * warp + 32; ++i) {
        if (!fibers.runnable(i)) continue;
        fibers.resume(i);
        moved = true;
        if (!fibers.error().empty()) throw std::runtime_error(fibers.error());
      }
    }
  }

  void finish_copy() {
    const int i = static_cast<int>(random_() % copies_.size());
    const Copy copy = copies_[i];
    copies_.erase(copies_.begin() + i);
    check(copy.to % 16 == 0 && copy.bytes % 16 == 0 && reinterpret_cast<uintptr_t>(copy.from) % 16 == 0,
          "a bulk copy that is not a multiple of 16 bytes");
    std::memcpy(shared() + copy.to, copy.from, copy.bytes);
    add_bytes(copy.barrier, -copy.bytes);
  }

  void finish_product() {
    const Product p = products_.front();
    products_.pop_front();
    if (p.is_commit) return arrive(p.barrier);
    multiply(
        tensor,
        [this](uint32_t at) {
          check(at >= kSharedBase && at - kSharedBase < static_cast<uint32_t>(plan.total()),
                "a descriptor outside shared memory");
          check(unfenced_[at - kSharedBase] == 0, "the tensor cores read a store that no fence made visible");
          return shared()[at - kSharedBase];
        },
        p.d, p.a, p.a_shared, p.b, p.form, p.accumulate);
  }

 public:
  static constexpr uint32_t kSharedBase = 1024;  // where dynamic shared memory begins

 private:
  std::vector<uint8_t> shared_, unfenced_;
  std::vector<std::vector<std::pair<int, int>>> stored_;
  std::vector<std::vector<std::pair<uint32_t, std::vector<uint32_t>>>> pending_stores_;
  std::vector<Copy> copies_;
  std::deque<Product> products_;
  std::vector<Event> since_[kWarps];
  std::mt19937_64 random_;
};

// One thread of the CTA.
class Thread {
 public:
  Thread(Cta& cta, int thread) : cta_(cta), thread_(thread) {}

  int thread() const { return thread_; }
  int warp() const { return thread_ / 32; }
  int lane() const { return thread_ % 32; }
  int block() const { return cta_.block; }
  int blocks() const { return cta_.blocks; }

  void sync() { meet(cta_.all, kThreads, thread_); }
  void sync_warp() { meet(cta_.warps[warp()], 32, lane()); }
  void sync_softmax() { meet(cta_.softmax, 32 * kSoftmaxWarps, thread_ - 32 * kSoftmaxWarp); }
  void sync_queries() { meet(cta_.queries, 32 * kQueryWarps, thread_ - 32 * kQueryWarp); }
  int shuffle(int x, int from) {
    return static_cast<int>(exchange(static_cast<uint32_t>(x), [from](const uint64_t* v) { return v[from]; }));
  }
  int shuffle_up(int x, int distance) {
    const int from = lane() >= distance ? lane() - distance : lane();
    return shuffle(x, from);
  }
  float shuffle_xor(float x, int mask) {
    const int from = lane() ^ mask;
    return float_of(static_cast<uint32_t>(exchange(bits_of(x), [from](const uint64_t* v) { return v[from]; })));
  }
  uint32_t warp_max(uint32_t x) {
    return static_cast<uint32_t>(exchange(x, [](const uint64_t* v) { return *std::max_element(v, v + 32); }));
  }
  float exp2(float x) { return std::exp2(x); }

  uint8_t* shared() { return cta_.shared(); }
  uint32_t shared_address(int at) const { return Cta::kSharedBase + at; }
  template <typename T>
  T load(int at) {
    check_access(at, sizeof(T));
    cta_.touch(thread_, Act::kRead, at);
    T x;
    std::memcpy(&x, shared() + at, sizeof(T));
    return x;
  }
  template <typename T>
  void store(int at, T x) {
    check_access(at, sizeof(T));
    cta_.touch(thread_, Act::kWrite, at);
    std::memcpy(shared() + at, &x, sizeof(T));
    cta_.mark_store(thread_, at, sizeof(T));
  }
  void fence_async() {
    if (cta_.fault != Fault::kMissingFence) cta_.fence(thread_);
  }

  void barrier_init(int barrier, int arrivals) {
    cta_.barriers[barrier].arrivals = cta_.barriers[barrier].pending = arrivals;
  }
  void barrier_init_fence() {}
  void arrive(int barrier) {
    check(!unordered_, "an arrival that tcgen05.fence::before_thread_sync does not order behind tensor memory");
    cta_.record(thread_, Act::kArrive, barrier);
    cta_.arrive(barrier);
  }
  void expect(int barrier, int bytes) {
    cta_.record(thread_, Act::kExpect, barrier);
    cta_.add_bytes(barrier, bytes);
    cta_.arrive(barrier);
  }
  void wait(int barrier, uint32_t parity) {
    if (cta_.fault == Fault::kMissingWait && warp() >= kSoftmaxWarp &&
        barrier / 2 == barrier_index(Barrier::kSumsFull, 0) / 2)
      return;
    waited_ = true;
    cta_.record(thread_, Act::kWait, barrier, static_cast<int>(parity));
    Cta& cta = cta_;
    cta_.fibers.wait([&cta, barrier, parity] { return cta.phase_ended(barrier, parity); });
  }
  void bulk_copy(int to, const void* from, int bytes, int barrier) {
    check(to >= 0 && to + bytes <= cta_.plan.own_at(), "a copy outside the buffers");
    cta_.touch(thread_, Act::kCopy, to);
    cta_.add_copy({to, static_cast<const uint8_t*>(from), bytes, barrier});
  }

  void tensor_alloc(uint32_t* to) { *to = 0; }
  void tensor_free(uint32_t) {}
  template <int kCount>
  void tensor_load(uint32_t address, uint32_t (&x)[kCount]) {
    touch_tensor(Act::kRead, address);
    load_32x32b(cta_.tensor, address, warp(), lane(), kCount, x);
  }
  template <int kCount>
  void tensor_store(uint32_t address, const uint32_t (&x)[kCount]) {
    touch_tensor(Act::kWrite, address);
    uint32_t registers[kCount];
    std::memcpy(registers, x, sizeof(x));
    if (cta_.fault == Fault::kSwappedFragment) std::swap(registers[1], registers[2]);
    cta_.store_later(thread_, address, kCount, registers);
  }
  void wait_tensor_stores() {
    if (cta_.fault != Fault::kMissingStoreWait) cta_.apply_stores(thread_);
  }
  void fence_before_sync() {
    if (cta_.fault != Fault::kMissingTensorFence) unordered_ = false;
  }
  void fence_after_sync() { waited_ = false; }

  void multiply(uint32_t d, uint32_t a, uint64_t b, uint32_t form, bool accumulate) {
    cta_.touch_tensor(thread_, Act::kMultiplyRead, a);
    issue(d, a, false, b, form, accumulate);
  }
  void multiply_shared(uint32_t d, uint64_t a, uint64_t b, uint32_t form, bool accumulate) {
    cta_.touch(thread_, Act::kMultiplyRead, matrix_at(a));
    issue(d, a, true, b, form, accumulate);
  }
  void commit(int barrier) {
    cta_.record(thread_, Act::kCommit, barrier);
    cta_.add_product({true, false, false, 0, 0, 0, 0, barrier});
  }

 private:
  void touch_tensor(Act act, uint32_t address) {
    check(!waited_, "tensor memory that tcgen05.fence::after_thread_sync does not order behind a wait");
    unordered_ = true;
    cta_.touch_tensor(thread_, act, address);
  }
  void check_access(int at, int bytes) {
    check(at >= 0 && at + bytes <= cta_.plan.total(), "an access outside shared memory");
    check(at % bytes == 0, "a misaligned access to shared memory");
  }
  void meet(Cta::Meeting& meeting, int size, int place) {
    cta_.meet(meeting, size, place, 0, [](const uint64_t*) { return uint64_t{0}; });
  }
  uint64_t exchange(uint64_t x, const std::function<uint64_t(const uint64_t*)>& f) {
    return cta_.meet(cta_.warps[warp()], 32, lane(), x, f);
  }
  static int matrix_at(uint64_t descriptor) { return static_cast<int>((descriptor & 0x3fff) << 4) - Cta::kSharedBase; }

  void issue(uint32_t d, uint64_t a, bool a_shared, uint64_t b, uint32_t form, bool accumulate) {
    check(!waited_, "a product that tcgen05.fence::after_thread_sync does not order behind a wait");
    cta_.touch(thread_, Act::kMultiplyRead, matrix_at(b));
    cta_.touch_tensor(thread_, Act::kMultiplyWrite, d);
    const int column = static_cast<int>(d & 0xffff);
    const bool sums = column >= sums_at() && column < scores_at(0);
    if (cta_.fault == Fault::kMissingFlush && sums && flushed_++ >= kTokens / kMmaDepth) accumulate = true;
    if (cta_.fault == Fault::kSwizzleBit) b |= uint64_t{6} << 61;
    cta_.add_product({false, a_shared, accumulate, d, form, a, b, 0});
  }

  Cta& cta_;
  const int thread_;
  int flushed_ = 0;
  bool waited_ = false, unordered_ = false;
};

}  // namespace emulator
