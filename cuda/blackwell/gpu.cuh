// The GPU as the Machine that the roles run on (roles.h).
#pragma once

#include "builders.h"
#include "ptx.cuh"

namespace jax_foscar::blackwell {

class Gpu {
 public:
  __device__ __forceinline__ explicit Gpu(uint8_t* shared) : shared_(shared), base_(ptx::shared_address(shared)) {}

  // --- Place ---
  __device__ __forceinline__ int thread() const { return threadIdx.x; }
  __device__ __forceinline__ int warp() const { return __shfl_sync(kAll, threadIdx.x / 32, 0); }  // known to be uniform
  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int block() const { return blockIdx.x; }
  __device__ __forceinline__ int blocks() const { return gridDim.x; }

  // --- Exchange ---
  __device__ __forceinline__ void sync() { __syncthreads(); }
  __device__ __forceinline__ void sync_warp() { __syncwarp(); }
  __device__ __forceinline__ void sync_softmax() { ptx::sync_threads(1, 32 * kSoftmaxWarps); }
  __device__ __forceinline__ void sync_queries() { ptx::sync_threads(2, 32 * kQueryWarps); }
  __device__ __forceinline__ int shuffle(int x, int lane) { return __shfl_sync(kAll, x, lane); }
  __device__ __forceinline__ int shuffle_up(int x, int distance) { return __shfl_up_sync(kAll, x, distance); }
  __device__ __forceinline__ float shuffle_xor(float x, int mask) { return __shfl_xor_sync(kAll, x, mask); }
  __device__ __forceinline__ uint32_t warp_max(uint32_t x) { return ptx::warp_max(x); }
  __device__ __forceinline__ float exp2(float x) { return cuda::ptx::exp2(x); }

  // --- Shared memory, by offset ---
  __device__ __forceinline__ uint8_t* shared() { return shared_; }
  __device__ __forceinline__ uint32_t shared_address(int at) const { return base_ + at; }
  template <typename T>
  __device__ __forceinline__ T load(int at) {
    return *reinterpret_cast<const T*>(shared_ + at);
  }
  template <typename T>
  __device__ __forceinline__ void store(int at, T x) {
    *reinterpret_cast<T*>(shared_ + at) = x;
  }
  __device__ __forceinline__ void fence_async() { ptx::fence_async(); }

  // --- Barriers, by number; they lie at the start of the roles' state ---
  __device__ __forceinline__ void set_barriers(int at) { barriers_ = base_ + at; }
  __device__ __forceinline__ void barrier_init(int barrier, int arrivals) {
    ptx::barrier_init(address(barrier), arrivals);
  }
  __device__ __forceinline__ void barrier_init_fence() { cuda::ptx::mbarrier_init_fence(); }
  __device__ __forceinline__ void arrive(int barrier) { ptx::arrive(address(barrier)); }
  __device__ __forceinline__ void expect(int barrier, int bytes) {
    cuda::ptx::mbarrier_expect(address(barrier), bytes);
  }
  __device__ __forceinline__ void wait(int barrier, uint32_t parity) {
    cuda::ptx::mbarrier_wait(address(barrier), parity);
  }
  __device__ __forceinline__ void bulk_copy(int to, const void* from, int bytes, int barrier) {
    cuda::ptx::bulk_copy(base_ + to, from, bytes, address(barrier));
  }

  // --- Tensor memory ---
  __device__ __forceinline__ void tensor_alloc(uint32_t* to) {
    ptx::tensor_alloc(ptx::shared_address(to), kTensorColumns);
  }
  __device__ __forceinline__ void tensor_free(uint32_t base) { ptx::tensor_free(base, kTensorColumns); }
  // Waits for the values, too.
  template <int kCount>
  __device__ __forceinline__ void tensor_load(uint32_t address, uint32_t (&x)[kCount]) {
    constexpr int kFirst = kCount >= 32 ? 32 : kCount >= 16 ? 16 : 8, kRest = kCount - kFirst;
    ptx::tensor_load<kFirst>(address, x);
    if constexpr (kRest > 0) ptx::tensor_load<kRest>(address + kFirst, x + kFirst);
    ptx::wait_tensor_loads();
    // No use may move before the wait.
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = keep(x[i]);
  }
  template <int kCount>
  __device__ __forceinline__ void tensor_store(uint32_t address, const uint32_t (&x)[kCount]) {
    ptx::tensor_store<kCount>(address, x);
  }
  __device__ __forceinline__ void wait_tensor_stores() { ptx::wait_tensor_stores(); }
  __device__ __forceinline__ void fence_before_sync() { ptx::fence_before_sync(); }
  __device__ __forceinline__ void fence_after_sync() { ptx::fence_after_sync(); }

  // --- Products ---
  __device__ __forceinline__ void multiply(uint32_t d, uint32_t a, uint64_t b, uint32_t form, bool accumulate) {
    ptx::multiply(d, a, b, form, accumulate);
  }
  __device__ __forceinline__ void multiply_shared(uint32_t d, uint64_t a, uint64_t b, uint32_t form, bool accumulate) {
    ptx::multiply_shared(d, a, b, form, accumulate);
  }
  __device__ __forceinline__ void commit(int barrier) { ptx::commit(address(barrier)); }

 private:
  static constexpr unsigned kAll = 0xffffffffu;
  __device__ __forceinline__ uint32_t address(int barrier) const { return barriers_ + 8 * barrier; }
  __device__ __forceinline__ static uint32_t keep(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
  }

  uint8_t* const shared_;
  const uint32_t base_;
  uint32_t barriers_ = 0;
};

// 16 bytes at once.
template <>
__device__ inline Word4 Gpu::load<Word4>(int at) {
  const uint4 x = *reinterpret_cast<const uint4*>(shared_ + at);
  return {{x.x, x.y, x.z, x.w}};
}

}  // namespace jax_foscar::blackwell
