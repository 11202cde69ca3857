// What an operand form costs in time: one decode loop, its K . q and P . V fed either by u8 integers (the decode
// kernels' form) or by bf16 mantissa injection (the published Hopper form).
//
//     nvcc -O3 -std=c++17 --expt-relaxed-constexpr -arch=sm_90a -Icuda benchmarks/operand_speed.cu -o operand_speed
//     ./operand_speed [tokens]
//
// Head dim 128, 4 query heads a KV head, one f16 (scale, offset) pair a token for keys and one for values, the cache's
// own page layout.  A warp is alone: it streams one KV head's tiles of 64 tokens through a private ring and keeps its
// softmax and outputs in registers.  There are as many heads as warps, so that nothing is left to schedule or to
// combine, and both forms share everything but the operands.  Outputs are checked against f64 first.  instructions.py
// counts these loops.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "keys.cuh"
#include "values.cuh"

namespace jax_foscar::cuda {
namespace {

constexpr int kDim = 128, kHeads = 4, kRowTiles = kDim / 16, kWarps = 12, kQueryOperands = 8;
constexpr int kChecked = 3, kCheckedTiles = 16;  // KV heads whose outputs are checked, and their length

template <int kBits>
struct Tile {  // key codes, value codes, key pairs, value pairs
  static constexpr int kCodes = kTileTokens * kDim * kBits / 8, kPairs = 4 * kTileTokens;
  static constexpr int kBytes = 2 * (kCodes + kPairs);
  static constexpr int kStages = kBits == 4 ? 2 : 4;
  static constexpr int kShared = kWarps * kStages * (kBytes + 8);
};

// One KV head's queries, prepared on the host.
struct HeadQueries {
  uint2 operands[kQueryOperands][32];  // B operands, by lane
  float step[kHeads];                  // logit (base 2) = key scale * step * product + key offset * sum
  float sum[kHeads];                   // of the rounded queries, in the logits' unit
};

// --- The forms
// --------------------------------------------------------------------------------------------------------

// u8 codes; queries in three s8 digits (operands 0-3: high and middle, 4-7: low), weights in two u8 digits.
template <int kBits_>
struct Integer {
  static constexpr int kBits = kBits_;
  static constexpr float kBias = 0.0f;
  float sums[kRowTiles][2] = {};

  static __device__ __forceinline__ void score(const uint8_t* codes, const uint2 (&q)[kQueryOperands], int lane,
                                               float (&products)[4][2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      KeyWords<kBits, kDim> words;
      words.load(codes, half, lane);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int upper[4] = {}, low[4] = {};
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          uint32_t a[4];
          words.operand(i, step, a);
          ptx::mma_u8_s8(upper, a, q[step]);
          ptx::mma_u8_s8(low, a, q[4 + step]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r)
          products[2 * half + i][r] = static_cast<float>((upper[2 * r] * 256 + upper[2 * r + 1]) * 256 + low[2 * r]);
      }
    }
  }

  __device__ __forceinline__ void rescale(float alpha) {
#pragma unroll
    for (int u = 0; u < kRowTiles; ++u) sums[u][0] *= alpha, sums[u][1] *= alpha;
  }

  __device__ __forceinline__ void add(const uint8_t* codes, const float (&weights)[4][2], int lane) {
    using Words = ValueWords<kBits, kDim>;
    float max = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) max = fmaxf(max, weights[i / 2][i % 2]);
    max = max_over_tokens(max);
    const float inverse = max > 0.0f ? __fdividef(65535.0f, max) : 0.0f;
    uint32_t b[4], seen = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = pack_weights(weights[i][0], weights[i][1], inverse, seen);
    Words words;
#pragma unroll
    for (int u = 0; u < kRowTiles; ++u) {
      if (u % Words::kFields == 0) words.load(codes, u, lane);
      int product[4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4];
        words.operand(u, half, a);
        ptx::mma_u8_u8(product, a, make_uint2(b[2 * half], b[2 * half + 1]));
      }
      const float back = max * (1.0f / 65535.0f / (1 << (kBits * (u % Words::kFields))));
#pragma unroll
      for (int r = 0; r < 2; ++r)
        sums[u][r] = fmaf(static_cast<float>(product[2 * r] * 256 + product[2 * r + 1]), back, sums[u][r]);
    }
  }

  __device__ __forceinline__ float get(int u, int r) const { return sums[u][r]; }
  __device__ __forceinline__ float weight_sum() const { return 0.0f; }
};

// bf16 128 + q; queries and weights in bf16, a query head in every other column, so that a lane owns one as above.
template <int kBits_>
struct Injected {
  static constexpr int kBits = kBits_;
  static constexpr float kBias = 128.0f;
  float sums[kRowTiles][4] = {};
  float rounded = 0.0f;  // sum of the rounded weights, which the bias multiplies

  // Codes number `field` of a word's two halves.
  static __device__ __forceinline__ uint32_t pair(uint32_t word, int field) {
    constexpr uint32_t kMask = ((1u << kBits) - 1u) * 0x10001u;
    uint32_t pair;
    asm("lop3.b32 %0,%1,%2,%3,0xea;" : "=r"(pair) : "r"(word >> (kBits * field)), "r"(kMask), "r"(0x43004300u));
    return pair;
  }

  static __device__ __forceinline__ void score(const uint8_t* codes, const uint2 (&q)[kQueryOperands], int lane,
                                               float (&products)[4][2]) {
    constexpr int kBlocks = num_blocks(kBits, kDim), kSteps = 8 / kBits;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4 * kBlocks];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const uint4 load = reinterpret_cast<const uint4*>(codes)[(half * kBlocks + i) * 32 + lane];
        words[4 * i] = load.x, words[4 * i + 1] = load.y, words[4 * i + 2] = load.z, words[4 * i + 3] = load.w;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float product[4] = {};
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const uint32_t low = words[2 * i * kBlocks + block], high = words[(2 * i + 1) * kBlocks + block];
#pragma unroll
          for (int s = 0; s < kSteps; ++s) {
            ptx::mma_bf16(product, {pair(low, 2 * s), pair(high, 2 * s), pair(low, 2 * s + 1), pair(high, 2 * s + 1)},
                          q[block * kSteps + s]);
          }
        }
        products[2 * half + i][0] = product[0], products[2 * half + i][1] = product[2];
      }
    }
  }

  __device__ __forceinline__ void rescale(float alpha) {
    rounded *= alpha;
#pragma unroll
    for (int u = 0; u < kRowTiles; ++u) sums[u][0] *= alpha, sums[u][2] *= alpha;
  }

  __device__ __forceinline__ void add(const uint8_t* codes, const float (&weights)[4][2], int lane) {
    constexpr int kFields = 8 / kBits, kBlocks = num_blocks(kBits, kDim);
    uint32_t b[4][2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const __nv_bfloat16 weight = __float2bfloat16_rn(weights[i / 2][i % 2]);
      rounded += __bfloat162float(weight);
      b[i / 2][i % 2] = ptx::transpose_b16(__bfloat16_as_ushort(weight));
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 words = reinterpret_cast<const uint4*>(codes)[(half * kBlocks + block) * 32 + lane];
#pragma unroll
        for (int f = 0; f < kFields; ++f) {
          float (&sum)[4] = sums[block * kFields + f];
          ptx::mma_bf16(sum,
                        {pair(words.x, f), pair(words.y, f), pair(words.x, kFields + f), pair(words.y, kFields + f)},
                        make_uint2(b[2 * half][0], b[2 * half][1]));
          ptx::mma_bf16(sum,
                        {pair(words.z, f), pair(words.w, f), pair(words.z, kFields + f), pair(words.w, kFields + f)},
                        make_uint2(b[2 * half + 1][0], b[2 * half + 1][1]));
        }
      }
    }
  }

  __device__ __forceinline__ float get(int u, int r) const { return sums[u][2 * r]; }
  __device__ __forceinline__ float weight_sum() const { return rounded; }
};

// --- The loop
// ---------------------------------------------------------------------------------------------------------

// cache [heads, tiles, Tile::kBytes] of packed codes and pairs, out [heads, kHeads, kDim]; one warp a KV head.
template <class Form>
__device__ __forceinline__ void attend(const uint8_t* cache, const HeadQueries* queries, int tiles, float* out) {
  using Layout = Tile<Form::kBits>;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int64_t head = blockIdx.x * kWarps + warp;
  const uint8_t* const source = cache + head * tiles * Layout::kBytes;
  uint8_t* const ring = shared + warp * Layout::kStages * Layout::kBytes;
  const uint32_t barriers =
      ptx::shared_address(shared + kWarps * Layout::kStages * Layout::kBytes) + warp * Layout::kStages * 8;
  const auto copy = [&](int tile, int stage) {
    if (lane != 0 || tile >= tiles) return;
    ptx::mbarrier_expect(barriers + 8 * stage, Layout::kBytes);
    ptx::bulk_copy(ptx::shared_address(ring) + stage * Layout::kBytes, source + int64_t{tile} * Layout::kBytes,
                   Layout::kBytes, barriers + 8 * stage);
  };
  if (lane == 0) {
    for (int i = 0; i < Layout::kStages; ++i) ptx::mbarrier_init(barriers + 8 * i);
    ptx::mbarrier_init_fence();
  }
  __syncwarp();
  for (int i = 0; i < Layout::kStages - 1; ++i) copy(i, i);

  uint2 q[kQueryOperands];
#pragma unroll
  for (int i = 0; i < kQueryOperands; ++i) q[i] = queries[head].operands[i][lane];
  const float step = queries[head].step[c], query_sum = queries[head].sum[c];
  Form form;
  float max = -INFINITY, sum = 0.0f, offset = 0.0f;
  int stage = 0;
  uint32_t phase = 0;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    __syncwarp();
    copy(tile + Layout::kStages - 1, stage == 0 ? Layout::kStages - 1 : stage - 1);
    ptx::mbarrier_wait(barriers + 8 * stage, phase);
    const uint8_t* const keys = ring + stage * Layout::kBytes;
    const uint8_t* const values = keys + Layout::kCodes;
    const uint8_t* const key_pairs = values + Layout::kCodes;
    const uint8_t* const value_pairs = key_pairs + Layout::kPairs;

    float p[4][2], most = -INFINITY;
    Form::score(keys, q, lane, p);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 affine = load_pair<4>(key_pairs, 8 * i + g);
      float& logit = p[i / 2][i % 2];
      // Without a bias the compiler would keep a multiplication by 0.
      const float add = Form::kBias == 0.0f ? affine.y : fmaf(-Form::kBias, affine.x, affine.y);
      logit = fmaf(affine.x * step, logit, add * query_sum);
      most = fmaxf(most, logit);
    }
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 4));
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 8));
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 16));
    if (__any_sync(kAllLanes, most > max)) {
      const float larger = fmaxf(max, most), alpha = ptx::exp2(max - larger);
      max = larger, sum *= alpha, offset *= alpha;
      form.rescale(alpha);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 affine = load_pair<4>(value_pairs, 8 * i + g);
      float& weight = p[i / 2][i % 2];
      weight = ptx::exp2(weight - max);
      sum += weight;
      offset = fmaf(weight, affine.y, offset);
      weight *= affine.x;
    }
    form.add(values, p, lane);
    if (++stage == Layout::kStages) stage = 0, phase ^= 1;
  }

  const float inverse = 1.0f / sum_over_tokens(sum);
  const float common = sum_over_tokens(offset) - Form::kBias * sum_over_tokens(form.weight_sum());
#pragma unroll
  for (int u = 0; u < kRowTiles; ++u) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      out[(head * kHeads + c) * kDim + 16 * u + 8 * r + g] = (form.get(u, r) + common) * inverse;
  }
}

__device__ __forceinline__ uint32_t hash(uint64_t x) {
  x = (x ^ x >> 31) * 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 29) * 0xbf58476d1ce4e5b9u;
  return static_cast<uint32_t>(x >> 32);
}

// Random codes, and pairs that make them numbers of zero mean and a spread of about 1.
template <int kBits>
__global__ void fill(uint32_t* cache, int64_t words) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += int64_t{gridDim.x} * blockDim.x) {
    const uint32_t random = hash(i);
    const float scale = (kBits == 4 ? 0.2f : 0.9f) * (0.5f + random / 4294967296.0f);
    const __half2 pair = __floats2half2_rn(scale, -scale * ((1 << kBits) - 1) * 0.5f);
    const bool is_pair = i * 4 % Tile<kBits>::kBytes >= 2 * Tile<kBits>::kCodes;
    cache[i] = is_pair ? *reinterpret_cast<const uint32_t*>(&pair) : random;
  }
}

__global__ void read(const uint4* data, int64_t count, uint32_t* out) {
  uint32_t sum = 0;
#pragma unroll 8
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const uint4 load = data[i];
    sum ^= load.x ^ load.y ^ load.z ^ load.w;
  }
  if (sum == 12345) *out = sum;
}

}  // namespace
}  // namespace jax_foscar::cuda

using namespace jax_foscar::cuda;
using jax_foscar::key_address;
using jax_foscar::kTileTokens;
using jax_foscar::value_address;

// Plain names, which instructions.py looks up.
#define ATTEND(name, ...)                                                             \
  extern "C" __global__ void __launch_bounds__(32 * kWarps, 1)                        \
      name(const uint8_t* cache, const HeadQueries* queries, int tiles, float* out) { \
    attend<__VA_ARGS__>(cache, queries, tiles, out);                                  \
  }

ATTEND(attend_int4_u8, Integer<4>)
ATTEND(attend_int4_bf16, Injected<4>)
ATTEND(attend_int2_u8, Integer<2>)
ATTEND(attend_int2_bf16, Injected<2>)

namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <typename T>
T* allocate(int64_t count) {
  T* pointer;
  check(cudaMalloc(&pointer, count * sizeof(T)));
  return pointer;
}

template <typename Call>
float median_us(const Call& call) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 18; ++i) {
    check(cudaEventRecord(begin));
    call();
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float ms;
    check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) times.push_back(1000.0f * ms);
  }
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// A head's queries [kHeads, kDim], in the logits' unit (base 2), as B operands.
template <int kBits>
HeadQueries integer_queries(const std::vector<float>& q) {
  HeadQueries result = {};
  for (int h = 0; h < kHeads; ++h) {
    float max = 0.0f;
    for (int channel = 0; channel < kDim; ++channel) max = std::max(max, std::abs(q[h * kDim + channel]));
    const float step = max / kQueryMax;
    int64_t sum = 0;
    for (int channel = 0; channel < kDim; ++channel) {
      const int s = channel / 32, half = channel % 32 / 16, c = channel % 16 / 4, j = channel % 4;
      const int power = KeyChannels<kBits, kDim>::power(s, j / 2);
      int rest = static_cast<int>(std::lround(q[h * kDim + channel] / step / power));
      sum += int64_t{rest} * power;
      int digits[3];
      for (int& digit : digits) digit = (rest + 128 & 255) - 128, rest = (rest - digit) / 256;
      const auto put = [&](int operand, int column, int digit) {
        uint2& b = result.operands[operand][4 * column + c];
        (half == 0 ? b.x : b.y) |= static_cast<uint32_t>(digit & 255) << (8 * j);
      };
      put(s, 2 * h, digits[2]), put(s, 2 * h + 1, digits[1]), put(4 + s, 2 * h, digits[0]);
    }
    result.step[h] = step, result.sum[h] = static_cast<float>(step * static_cast<double>(sum));
  }
  return result;
}

template <int kBits>
HeadQueries injected_queries(const std::vector<float>& q) {
  HeadQueries result = {};
  for (int h = 0; h < kHeads; ++h) {
    double sum = 0.0;
    for (int channel = 0; channel < kDim; ++channel) {
      // Of token 0, lane c holds the channel's byte in word `block`; its half and field say which k it is.
      const auto [byte, shift] = key_address(kBits, kDim, 0, channel);
      const int c = byte / 16 % 32, block = byte / 512 * 4 + byte % 16 / 4, field = (byte % 2 * 8 + shift) / kBits;
      const __nv_bfloat16 x = __float2bfloat16_rn(q[h * kDim + channel]);
      sum += __bfloat162float(x);
      uint2& b = result.operands[block * (8 / kBits) + field / 2][4 * 2 * h + c];
      (field % 2 == 0 ? b.x : b.y) |= static_cast<uint32_t>(__bfloat16_as_ushort(x)) << (byte % 4 / 2 * 16);
    }
    result.step[h] = 1.0f, result.sum[h] = static_cast<float>(sum);
  }
  return result;
}

// Attention over the dequantized cache of one KV head.
template <int kBits>
std::vector<double> reference(const std::vector<uint8_t>& cache, int tiles, const std::vector<float>& q) {
  using Layout = Tile<kBits>;
  const auto number = [&](const uint8_t* tile, bool value, int t, int channel) {
    const auto [byte, shift] = value ? value_address(kBits, kDim, t, channel) : key_address(kBits, kDim, t, channel);
    const __half2 pair = reinterpret_cast<const __half2*>(tile + 2 * Layout::kCodes + value * Layout::kPairs)[t];
    const int code = tile[value * Layout::kCodes + byte] >> shift & ((1 << kBits) - 1);
    return __half2float(__low2half(pair)) * double{1.0 * code} + __half2float(__high2half(pair));
  };
  std::vector<double> out(kHeads * kDim), logits(int64_t{tiles} * kTileTokens);
  for (int h = 0; h < kHeads; ++h) {
    for (size_t t = 0; t < logits.size(); ++t) {
      double logit = 0.0;
      for (int channel = 0; channel < kDim; ++channel) {
        logit += q[h * kDim + channel] *
                 number(&cache[t / kTileTokens * Layout::kBytes], false, static_cast<int>(t % kTileTokens), channel);
      }
      logits[t] = logit;
    }
    const double max = *std::max_element(logits.begin(), logits.end());
    double sum = 0.0;
    for (size_t t = 0; t < logits.size(); ++t) {
      const double p = std::exp2(logits[t] - max);
      sum += p;
      for (int channel = 0; channel < kDim; ++channel) {
        out[h * kDim + channel] +=
            p * number(&cache[t / kTileTokens * Layout::kBytes], true, static_cast<int>(t % kTileTokens), channel);
      }
    }
    for (int channel = 0; channel < kDim; ++channel) out[h * kDim + channel] /= sum;
  }
  return out;
}

template <int kBits, typename Kernel>
void measure(const char* name, Kernel kernel, HeadQueries (*prepare)(const std::vector<float>&), double limit, int sms,
             int tiles) {
  using Layout = Tile<kBits>;
  const int heads = sms * kWarps;
  const int64_t bytes = int64_t{heads} * tiles * Layout::kBytes;
  uint8_t* const cache = allocate<uint8_t>(bytes);
  HeadQueries* const queries = allocate<HeadQueries>(heads);
  float* const out = allocate<float>(int64_t{heads} * kHeads * kDim);
  fill<kBits><<<8 * sms, 256>>>(reinterpret_cast<uint32_t*>(cache), bytes / 4);

  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> q(heads, std::vector<float>(kHeads * kDim));
  std::vector<HeadQueries> prepared;
  for (auto& head : q) {
    for (float& x : head) x = normal(random) * 1.4426950408889634f / std::sqrt(float{kDim});
    prepared.push_back(prepare(head));
  }
  check(cudaMemcpy(queries, prepared.data(), heads * sizeof(HeadQueries), cudaMemcpyHostToDevice));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout::kShared));

  // Short: truncation in the tensor cores' f32 sums grows with the length, and with a bias of 128 it soon is all there
  // is.
  const int checked_tiles = std::min(tiles, kCheckedTiles);
  const int64_t head_bytes = int64_t{checked_tiles} * Layout::kBytes;
  kernel<<<sms, 32 * kWarps, Layout::kShared>>>(cache, queries, checked_tiles, out);
  check(cudaDeviceSynchronize());
  double error = 0.0, norm = 0.0;
  for (int i = 0; i < kChecked; ++i) {
    const int head = i * (heads - 1) / (kChecked - 1);
    std::vector<uint8_t> codes(head_bytes);
    std::vector<float> got(kHeads * kDim);
    check(cudaMemcpy(codes.data(), cache + head * head_bytes, head_bytes, cudaMemcpyDeviceToHost));
    check(cudaMemcpy(got.data(), out + int64_t{head} * kHeads * kDim, got.size() * 4, cudaMemcpyDeviceToHost));
    const std::vector<double> expected = reference<kBits>(codes, checked_tiles, q[head]);
    for (size_t j = 0; j < got.size(); ++j) {
      error += (got[j] - expected[j]) * (got[j] - expected[j]), norm += expected[j] * expected[j];
    }
  }
  error = std::sqrt(error / norm);

  const auto launch = [&] { kernel<<<sms, 32 * kWarps, Layout::kShared>>>(cache, queries, tiles, out); };
  const float us = median_us(launch);
  std::printf("INT%d %-24s %9.1f us %8.0f GB/s   relative error %.1e\n", kBits, name, us, bytes / (1e3 * us), error);
  if (!(error < limit)) {
    std::fprintf(stderr, "The error must be below %.0e.\n", limit);
    std::exit(1);
  }
  check(cudaFree(cache));
  check(cudaFree(queries));
  check(cudaFree(out));
}

}  // namespace

int main(int argc, char** argv) {
  const int tiles = (argc > 1 ? std::atoi(argv[1]) : 16384) / kTileTokens;
  if (tiles < 1) {
    std::fprintf(stderr, "usage: operand_speed [tokens, at least %d]\n", kTileTokens);
    return 1;
  }
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0));
  const int sms = device.multiProcessorCount;
  std::printf("%s, %d KV heads x 4 query heads, %d tokens, head dim %d\n", device.name, sms * kWarps,
              tiles * kTileTokens, kDim);
  const int64_t bytes = int64_t{4} << 30;
  uint4* const data = allocate<uint4>(bytes / 16);
  check(cudaMemset(data, 0, bytes));
  const float us = median_us([&] { read<<<16 * sms, 512>>>(data, bytes / 16, reinterpret_cast<uint32_t*>(data)); });
  std::printf("%-29s %9.1f us %8.0f GB/s\n", "plain read of 4 GiB", us, bytes / (1e3 * us));
  check(cudaFree(data));
  measure<4>("u8 integer", attend_int4_u8, integer_queries<4>, 1e-3, sms, tiles);
  measure<4>("bf16 0x4300 injection", attend_int4_bf16, injected_queries<4>, 3e-2, sms, tiles);
  measure<2>("u8 integer", attend_int2_u8, integer_queries<2>, 1e-3, sms, tiles);
  measure<2>("bf16 0x4300 injection", attend_int2_bf16, injected_queries<2>, 3e-2, sms, tiles);
}
