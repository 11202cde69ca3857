// Attention with the operand values of the Blackwell kernel, on the f16 tensor cores of an earlier GPU: a shared
// library for benchmarks/blackwell_numerics.py, which says what it shows.
//
// Packed pages become E4M3 or E2M1 operands by cuda/blackwell/operands.h, and these become f16, which holds every value
// of either format.  So the products are Blackwell's, and the f32 sums are as coarse as its own; FP8 tensor cores
// before it keep only 13 bits of a sum, and would not do.
#include <cuda_fp16.h>

#include "blackwell/operands.h"
#include "params.h"

namespace jax_foscar::blackwell {
namespace {

constexpr int kPage = kTileTokens, kTokens = 128, kMaxDim = 128, kMaxRows = 24, kMaxColumns = kMaxRows * kMaxParts;
constexpr int kThreads = 256, kWarps = kThreads / 32;

struct Side {
  OperandFormat format;
  const uint8_t* codes;   // [P, K, 64, token_bytes]
  const uint16_t* pairs;  // f16 (scale, offset) of [P, K, ...], as in the cache
  int parts;              // of the other operand: queries beside keys, weights beside values
};

struct Problem {
  Side key, value;
  int heads, rows, tokens;
  const float* q;  // [K, rows, dim], times scale and log2(e)
  float* out;      // [K, rows, dim]
};

struct Shared {
  __half codes[kTokens][kMaxDim + 8];        // one operand, [token][channel] of keys, [channel][token] of values
  __half queries[kMaxColumns][kMaxDim + 8];  // the other: column part * rows + row
  __half weights[kMaxColumns][kTokens + 8];
  float products[kMaxColumns][kTokens];
  float scores[kMaxRows][kTokens];  // then weights
  float out[kMaxRows][kMaxDim];
  float top[kMaxRows], total[kMaxRows];    // running maximum and sum
  float keep[kMaxRows], share[kMaxRows];   // what the past and this tile are multiplied with
  float down[kMaxRows], offset[kMaxRows];  // of a split row; of its share of the codes' offsets
};

// Scale (0) or offset (1) of one code of the head.
__device__ float param(const Side& side, const Problem& p, int head, int token, int channel, int which) {
  const int64_t page = int64_t{token / kPage} * p.heads + head;
  const int64_t pair = page * side.format.page_pairs(kPage) + side.format.pair_index(token % kPage, channel);
  return f16_to_float(side.pairs[2 * pair + which]);
}

template <class Value>
__device__ Value warp_max(Value x) {
  for (int step = 16; step > 0; step /= 2) x = max(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

__device__ float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// --- Operands -------------------------------------------------------------------------------------------------------

// Calls `take` with each packed word of a head's tokens from `first` on, its number in the page, and the page's first
// token counted from there.
template <class Take>
__device__ void for_each_word(const Side& side, const Problem& p, int head, int first, const Take& take) {
  const int words = 16 * token_bytes(side.format.bits, side.format.dim);
  for (int i = threadIdx.x; i < kTokens / kPage * words; i += kThreads) {
    const int64_t page = int64_t{first / kPage + i / words} * p.heads + head;
    take(reinterpret_cast<const uint32_t*>(side.codes)[page * words + i % words], i % words, i / words * kPage);
  }
}

__device__ void load_keys(Shared& s, const Problem& p, int head, int first) {
  const OperandFormat& f = p.key.format;
  for_each_word(p.key, p, head, first, [&](uint32_t word, int number, int page_token) {
    const CodeWord at = key_word(f.bits, f.dim, number);
    for (int operand = 0; operand < 2; ++operand) {
      const uint32_t values = f.bits == 4 ? e4m3_field4(word, operand) : e2m1_fields(word, operand);
      for (int byte = 0; byte < 4; ++byte) {
        const uint32_t value = values >> 8 * byte & 0xff;
        __half* row = s.codes[page_token + at.token] + at.channel + byte;
        if (f.bits == 4) {
          row[key_field_channel(4, false, operand)] = __float2half(e4m3_value(static_cast<uint8_t>(value)));
        } else {
          row[key_field_channel(2, false, operand)] = __float2half(e2m1_value(value & 15));
          row[key_field_channel(2, false, operand + 2)] = __float2half(e2m1_value(value >> 4));
        }
      }
    }
  });
}

__device__ void load_values(Shared& s, const Problem& p, int head, int first) {
  const OperandFormat& f = p.value.format;
  for_each_word(p.value, p, head, first, [&](uint32_t word, int number, int page_token) {
    const CodeWord at = value_word(f.bits, f.dim, number);
    for (int field = 0; field < 8 / f.bits; ++field) {
      const uint32_t values = f.bits == 4 ? e4m3_field4(word, field) : e4m3_field2(word, field);
      __half* row = s.codes[at.channel + value_field_channel(false, field)] + page_token + at.token;
      for (int byte = 0; byte < 4; ++byte) {
        row[value_byte_token(byte)] = __float2half(e4m3_value(static_cast<uint8_t>(values >> 8 * byte)));
      }
    }
  });
}

// What the codes of a channel are multiplied with.
__device__ float key_unit(const OperandFormat& f) { return f.bits == 4 ? e4m3_code4() : e2m1_code2(); }
__device__ float value_unit(const OperandFormat& f, int channel) {
  return f.bits == 4 ? e4m3_code4() : e4m3_code2(channel % 64 / 16);
}

// Splits x(row, 0 .. length - 1) into columns, a row a warp.
template <class X>
__device__ void split_rows(Shared& s, __half (&columns)[kMaxColumns][kMaxDim + 8], int rows, int length, int parts,
                           X x) {
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < rows; row += kWarps) {
    uint32_t largest = 0;
    for (int i = lane; i < length; i += 32) largest = max(largest, bits_of_float(x(row, i)) & 0x7fffffff);
    const SplitScale scale = split_scale(warp_max(largest));
    if (lane == 0) s.down[row] = scale.down;
    for (int i = 2 * lane; i < length; i += 64) {
      const PartPairs pairs = split_pair(x(row, i) * scale.up, x(row, i + 1) * scale.up);
      for (int part = 0; part < parts; ++part) {
        const FloatPair value = e4m3_pair_value(pairs.part[part]);
        columns[part * rows + row][i] = __float2half(value.low);
        columns[part * rows + row][i + 1] = __float2half(value.high);
      }
    }
  }
}

// --- Products -------------------------------------------------------------------------------------------------------

__device__ uint32_t two(const __half* x) { return *reinterpret_cast<const uint32_t*>(x); }

// Adds 16 rows of codes times 8 columns over contraction indices [begin, end): sums[0 .. 3] are rows lane / 4 and + 8,
// columns 2 * (lane % 4) and + 1 each.
__device__ void multiply(const Shared& s, const __half (&columns)[kMaxColumns][kMaxDim + 8], int row, int column,
                         int begin, int end, float (&sums)[4]) {
  const int lane = threadIdx.x % 32, r = row + lane / 4, n = column + lane / 4;
  for (int k = begin + lane % 4 * 2; k < end; k += 16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(two(&s.codes[r][k])), "r"(two(&s.codes[r + 8][k])), "r"(two(&s.codes[r][k + 8])),
          "r"(two(&s.codes[r + 8][k + 8])), "r"(two(&columns[n][k])), "r"(two(&columns[n][k + 8])));
  }
}

// products[column][row] of rows [first, first + rows): the sum over `groups` stretches of `length` contraction indices
// of factor(group, row) times the stretch's own accumulator.
template <class Factor>
__device__ void multiply_groups(Shared& s, const __half (&columns)[kMaxColumns][kMaxDim + 8], int num_columns,
                                int first, int rows, int groups, int length, Factor factor) {
  const int lane = threadIdx.x % 32, column_tiles = (num_columns + 7) / 8;
  for (int unit = threadIdx.x / 32; unit < rows / 16 * column_tiles; unit += kWarps) {
    const int row = first + unit / column_tiles * 16, column = unit % column_tiles * 8;
    float total[4] = {};
    for (int group = 0; group < groups; ++group) {
      float sums[4] = {};
      multiply(s, columns, row, column, group * length, (group + 1) * length, sums);
      for (int i = 0; i < 4; ++i) total[i] += factor(group, row + lane / 4 + i / 2 * 8) * sums[i];
    }
    for (int i = 0; i < 4; ++i) s.products[column + lane % 4 * 2 + i % 2][row + lane / 4 + i / 2 * 8] = total[i];
  }
}

// The parts of one row's products, joined.
__device__ float joined(const Shared& s, int rows, int parts, int row, int at) {
  float sum = 0;
  for (int part = parts; part-- > 0;) sum += s.products[part * rows + row][at] * part_weight(part);
  return sum;
}

// The sum of a split row's columns over [begin, end): what the tensor core sees.
__device__ float column_sum(const Shared& s, int rows, int parts, int row, int begin, int end) {
  float sum = 0;
  for (int i = begin; i < end; ++i) {
    for (int part = parts; part-- > 0;) sum += __half2float(s.queries[part * rows + row][i]) * part_weight(part);
  }
  return sum * s.down[row];
}

// --- One tile -------------------------------------------------------------------------------------------------------

__device__ void score_tile(Shared& s, const Problem& p, int head, int first) {
  const OperandFormat& f = p.key.format;
  const float* q = p.q + int64_t{head} * p.rows * f.dim;
  const int tokens = f.per_channel ? f.group : kTokens, groups = f.per_channel ? 1 : f.dim / f.group;
  for (int base = 0; base < kTokens; base += tokens) {  // tokens that see the same columns
    const auto key = [&](int token, int channel, int which) {
      return param(p.key, p, head, first + token, channel, which);
    };
    split_rows(s, s.queries, p.rows, f.dim, p.key.parts,
               [&](int row, int i) { return q[row * f.dim + i] * (f.per_channel ? key(base, i, 0) : 1.0f); });
    __syncthreads();
    multiply_groups(s, s.queries, p.rows * p.key.parts, base, tokens, groups, f.dim / groups,
                    [&](int group, int token) { return f.per_channel ? 1.0f : key(token, group * f.group, 0); });
    if (f.per_channel) {
      for (int row = threadIdx.x; row < p.rows; row += kThreads) {
        s.offset[row] = 0;
        for (int i = 0; i < f.dim; ++i) s.offset[row] += q[row * f.dim + i] * key(base, i, 1);
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.rows * tokens; i += kThreads) {
      const int row = i / tokens, token = base + i % tokens;
      float score = joined(s, p.rows, p.key.parts, row, token) * (s.down[row] / key_unit(f));
      if (f.per_channel) score += s.offset[row];
      for (int group = 0; !f.per_channel && group < groups; ++group) {
        score += column_sum(s, p.rows, p.key.parts, row, group * f.group, (group + 1) * f.group) *
                 key(token, group * f.group, 1);
      }
      s.scores[row][token] = score;
    }
    __syncthreads();
  }
}

// Scores become weights, relative to the tile's own maximum.
__device__ void weigh_tile(Shared& s, const Problem& p) {
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < p.rows; row += kWarps) {
    float top = -INFINITY, total = 0;
    for (int i = lane; i < kTokens; i += 32) top = fmaxf(top, s.scores[row][i]);
    top = warp_max(top);
    for (int i = lane; i < kTokens; i += 32) total += s.scores[row][i] = exp2f(s.scores[row][i] - top);
    total = warp_sum(total);
    if (lane == 0) {
      const float renewed = fmaxf(s.top[row], top);
      s.keep[row] = exp2f(s.top[row] - renewed);
      s.share[row] = exp2f(top - renewed);
      s.top[row] = renewed;
      s.total[row] = s.total[row] * s.keep[row] + total * s.share[row];
    }
  }
}

__device__ void sum_tile(Shared& s, const Problem& p, int head, int first) {
  const OperandFormat& f = p.value.format;
  const int channels = f.per_channel ? f.dim : f.group, groups = f.per_channel ? kTokens / f.group : 1;
  const auto value = [&](int token, int channel, int which) {
    return param(p.value, p, head, first + token, channel, which);
  };
  for (int base = 0; base < f.dim; base += channels) {  // channels that see the same columns
    split_rows(s, s.weights, p.rows, kTokens, p.value.parts,
               [&](int row, int i) { return s.scores[row][i] * (f.per_channel ? 1.0f : value(i, base, 0)); });
    __syncthreads();
    multiply_groups(s, s.weights, p.rows * p.value.parts, base, channels, groups, kTokens / groups,
                    [&](int group, int channel) { return f.per_channel ? value(group * f.group, channel, 0) : 1.0f; });
    __syncthreads();
    for (int i = threadIdx.x; i < p.rows * channels; i += kThreads) {
      const int row = i / channels, channel = base + i % channels;
      float sum = joined(s, p.rows, p.value.parts, row, channel) * (s.down[row] / value_unit(f, channel));
      for (int token = 0; token < kTokens; ++token) sum += s.scores[row][token] * value(token, channel, 1);
      s.out[row][channel] = s.out[row][channel] * s.keep[row] + sum * s.share[row];
    }
    __syncthreads();
  }
}

// One CTA a KV head.
__global__ void __launch_bounds__(kThreads) attention_kernel(const Problem p) {
  extern __shared__ uint4 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int head = blockIdx.x, dim = p.value.format.dim;
  for (int i = threadIdx.x; i < kMaxRows * kMaxDim; i += kThreads) s.out[i / kMaxDim][i % kMaxDim] = 0;
  for (int row = threadIdx.x; row < kMaxRows; row += kThreads) s.top[row] = -INFINITY, s.total[row] = 0;
  __syncthreads();
  for (int first = 0; first < p.tokens; first += kTokens) {
    load_keys(s, p, head, first);
    __syncthreads();
    score_tile(s, p, head, first);
    weigh_tile(s, p);
    load_values(s, p, head, first);
    __syncthreads();
    sum_tile(s, p, head, first);
  }
  for (int i = threadIdx.x; i < p.rows * dim; i += kThreads) {
    p.out[int64_t{head} * p.rows * dim + i] = s.out[i / dim][i % dim] / s.total[i / dim];
  }
}

// Counts the f32 patterns of which the device's conversions and the host's do not give the same bits.
__global__ void conversion_kernel(unsigned long long* mismatches) {
  unsigned long long wrong = 0;
  const uint64_t threads = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < uint64_t{1} << 32; i += threads) {
    float rest[2] = {float_of_bits(static_cast<uint32_t>(i)), float_of_bits(static_cast<uint32_t>(i * 0x9e3779b1u))};
    wrong += e4m3_pair(rest[0], rest[1]) != (e4m3_of_float(rest[0]) | e4m3_of_float(rest[1]) << 8);
    for (float& x : rest) x = fabsf(x) <= kE4M3Max ? x : 1.0f;
    const PartPairs pairs = split_pair(rest[0], rest[1]);
    for (int part = 0; part < kMaxParts; ++part) {
      for (int j = 0; j < 2; ++j) {
        const uint8_t expected = e4m3_of_float(rest[j]);
        wrong += static_cast<uint8_t>(pairs.part[part] >> 8 * j) != expected;
        rest[j] = (rest[j] - e4m3_value(expected)) * 16;
      }
    }
  }
  if (wrong != 0) atomicAdd(mismatches, wrong);
}

// An array on the device, with a copy of the host's.
template <class Value>
class DeviceArray {
 public:
  DeviceArray(const Value* host, int64_t count) {
    cudaMalloc(&pointer_, count * sizeof(Value));
    if (host != nullptr) cudaMemcpy(pointer_, host, count * sizeof(Value), cudaMemcpyHostToDevice);
  }
  DeviceArray(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(pointer_); }
  Value* get() const { return pointer_; }

 private:
  Value* pointer_ = nullptr;
};

}  // namespace

// Mirrored in blackwell_numerics.py.
struct Sizes {
  int heads, rows, tokens, dim;
  struct {
    int bits, per_channel, group, parts;
  } key, value;
};

// The number of differing f32 patterns, or minus a CUDA error.
extern "C" int64_t blackwell_conversion_mismatches() {
  const unsigned long long zero = 0;
  unsigned long long wrong = 0;
  const DeviceArray mismatches(&zero, 1);
  conversion_kernel<<<2048, 256>>>(mismatches.get());
  cudaMemcpy(&wrong, mismatches.get(), sizeof(wrong), cudaMemcpyDeviceToHost);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? static_cast<int64_t>(wrong) : -int64_t{error};
}

// All arrays on the host, shaped as in Side and Problem.  Returns a CUDA error, 0 if there is none.
extern "C" int blackwell_attention(const Sizes* sizes, const float* q, const uint8_t* key_codes,
                                   const uint16_t* key_pairs, const uint8_t* value_codes, const uint16_t* value_pairs,
                                   float* out) {
  const Sizes& n = *sizes;
  const OperandFormat key = {n.key.bits, n.dim, n.key.group, n.key.per_channel != 0};
  const OperandFormat value = {n.value.bits, n.dim, n.value.group, n.value.per_channel != 0};
  if (n.tokens % kTokens != 0 || n.rows > kMaxRows || n.dim > kMaxDim || n.dim % 64 != 0) return cudaErrorInvalidValue;
  const int64_t pages = int64_t{n.tokens} / kPage * n.heads, results = int64_t{n.heads} * n.rows * n.dim;
  const DeviceArray device_q(q, results);
  const DeviceArray<float> device_out(nullptr, results);
  const DeviceArray device_key_codes(key_codes, pages * key.page_bytes(kPage));
  const DeviceArray device_value_codes(value_codes, pages * value.page_bytes(kPage));
  const DeviceArray device_key_pairs(key_pairs, pages * key.page_pairs(kPage) * 2);
  const DeviceArray device_value_pairs(value_pairs, pages * value.page_pairs(kPage) * 2);
  const Problem problem = {{key, device_key_codes.get(), device_key_pairs.get(), n.key.parts},
                           {value, device_value_codes.get(), device_value_pairs.get(), n.value.parts},
                           n.heads,
                           n.rows,
                           n.tokens,
                           device_q.get(),
                           device_out.get()};
  cudaFuncSetAttribute(attention_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  attention_kernel<<<n.heads, kThreads, sizeof(Shared)>>>(problem);
  cudaMemcpy(out, device_out.get(), results * sizeof(float), cudaMemcpyDeviceToHost);
  return cudaGetLastError();
}

}  // namespace jax_foscar::blackwell
