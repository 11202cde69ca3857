#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

namespace jax_foscar::cpu {
namespace {

// Lives as long as the last helper that knows it.
class Job {
 public:
  Job(int64_t items, int64_t scratch_floats, std::function<void(float*, int64_t)> work)
      : items_(items), scratch_floats_(scratch_floats), work_(std::move(work)) {
    std::fegetenv(&environment_);
  }

  // Helpers compute as the caller does: XLA flushes denormals, and a row's bits must not depend on who computed it.
  void help() {
    if (next_.load(std::memory_order_relaxed) >= items_) return;
    std::fenv_t own;
    std::fegetenv(&own);
    std::fesetenv(&environment_);
    drain();
    std::fesetenv(&own);
  }

  void drain() {
    int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
    if (item >= items_) return;
    const std::unique_ptr<float[], Free> scratch(
        static_cast<float*>(::operator new[](std::max<int64_t>(scratch_floats_, 1) * sizeof(float), kAlign)));
    int64_t done = 0;
    for (; item < items_; item = next_.fetch_add(1, std::memory_order_relaxed), ++done) work_(scratch.get(), item);
    const std::lock_guard<std::mutex> lock(mutex_);
    done_ += done;
    if (done_ == items_) all_done_.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [this] { return done_ == items_; });
  }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(float* p) const { ::operator delete[](p, kAlign); }
  };

  const int64_t items_, scratch_floats_;
  const std::function<void(float*, int64_t)> work_;
  std::fenv_t environment_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable all_done_;
  int64_t done_ = 0;
};

}  // namespace

void parallel_for(int64_t items, int helpers, const Schedule& schedule, int64_t scratch_floats,
                  std::function<void(float*, int64_t)> work) {
  if (items <= 0) return;
  const auto job = std::make_shared<Job>(items, scratch_floats, std::move(work));
  const int64_t offered = std::min<int64_t>(helpers, items - 1);
  for (int64_t i = 0; i < offered; ++i) schedule([job] { job->help(); });
  job->drain();
  job->wait();
}

}  // namespace jax_foscar::cpu
