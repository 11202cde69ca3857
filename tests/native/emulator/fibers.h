// A CTA's threads as fibers: each runs until it has to wait, then another one does.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace emulator {

class Fibers {
 public:
  explicit Fibers(int count) : fibers_(count) {
    for (Fiber& fiber : fibers_) fiber.stack = std::make_unique<uint8_t[]>(kStack);
  }

  void start(const std::function<void(int)>& body) {
    body_ = body;
    for (int i = 0; i < static_cast<int>(fibers_.size()); ++i) {
      Fiber& fiber = fibers_[i];
      fiber.started = fiber.done = false;
      fiber.ready = nullptr;
    }
    error_.clear();
  }

  bool done(int i) const { return fibers_[i].done; }
  bool runnable(int i) const { return !fibers_[i].done && (!fibers_[i].ready || fibers_[i].ready()); }
  const std::string& error() const { return error_; }

  // Runs fiber i until it waits or ends.
  void resume(int i) {
    current_ = i;
    Fiber& fiber = fibers_[i];
    if (_setjmp(scheduler_) != 0) return;
    if (fiber.started) _longjmp(fiber.at, 1);
    fiber.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack.get();
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    self_ = this;
    makecontext(&context, &Fibers::enter, 0);
    setcontext(&context);
  }

  // Called by the running fiber: gives way until `ready`.
  void wait(std::function<bool()> ready) {
    Fiber& fiber = fibers_[current_];
    fiber.ready = std::move(ready);
    if (_setjmp(fiber.at) == 0) _longjmp(scheduler_, 1);
    fiber.ready = nullptr;
  }

 private:
  static constexpr int kStack = 64 << 10;
  struct Fiber {
    std::unique_ptr<uint8_t[]> stack;
    jmp_buf at;
    bool started = false, done = false;
    std::function<bool()> ready;
  };

  static void enter() {
    Fibers& self = *self_;
    try {
      self.body_(self.current_);
    } catch (const std::exception& error) {
      self.error_ = error.what();
    }
    self.fibers_[self.current_].done = true;
    _longjmp(self.scheduler_, 1);
  }

  static inline Fibers* self_ = nullptr;
  std::vector<Fiber> fibers_;
  std::function<void(int)> body_;
  std::string error_;
  jmp_buf scheduler_;
  int current_ = 0;
};

}  // namespace emulator
