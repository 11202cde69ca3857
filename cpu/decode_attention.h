// Decode attention on the host.
#pragma once

#include <functional>
#include <string_view>

#include "params.h"

namespace jax_foscar::cpu {

// Runs fn on another thread, some time.
using Schedule = std::function<void(std::function<void()>)>;

// Computes the whole call.  `helpers` tasks at most are offered to `schedule`; the calling thread works too and never
// waits for a task that has not started, so it may itself run on the pool that `schedule` feeds.
void decode_attention(const DecodeParams& params, int helpers, const Schedule& schedule);

// The instruction set the kernel dispatches to on this machine: "avx512", "avx2", "baseline" or "neon".
std::string_view instruction_set();

}  // namespace jax_foscar::cpu
