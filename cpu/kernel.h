// What decode_attention.cc hands to a kernel, and the kernels there are.
//
// A kernel is compiled once for each instruction set.  Its files may use nothing but the plain structs below: an inline
// function shared with other files could be merged by the linker into a copy the machine cannot run.
#pragma once

#include <cstdint>

namespace jax_foscar::cpu {

inline constexpr int kBlockRows = 4;  // query rows that share one pass over the codes
inline constexpr int kSpanTokens = 64;

// Keys or values.
struct Operand {
  int bits, dim, padded_dim;
  int blocks;  // whole 16-byte blocks of a token
  int group;   // channels (per token) or tokens (per channel) that share one scale and offset
  int groups;  // channel groups of a token, 1 per channel
  bool per_channel;
  bool half_params;  // f16 parameters, otherwise f32
};

struct Shape {
  Operand key, value;
  float soft_cap;  // logits become soft_cap * tanh(logit / soft_cap); 0: as they are
};

// Which of a row's tokens: the three sets have visible ranges of their own.
enum Region { kSink, kPaged, kRecent, kNumRegions };

// Up to 64 consecutive tokens: a tile of a page, or rows of the exact arrays.
struct Span {
  Region region;
  int first;                   // position of the first token
  int count;                   // tokens there are; 64 in a page
  const uint8_t* key_codes;    // the tile; bf16 [count, dim] where exact or at 16 bits
  const uint8_t* value_codes;  // likewise
  const void* key_params;      // (scale, offset) of this tile's first token (per token) or token group (per channel)
  const void* value_params;    // likewise
  const uint8_t* next_key;     // the tile that comes next, to prefetch; null if none
  const uint8_t* next_value;
};

// Up to four query rows of one KV head on their way over the spans.  All vectors of rows are [.., 4], rows innermost.
struct Block {
  int rows;                            // 1 .. 4; unused rows see no token
  int first[kNumRegions][kBlockRows];  // row i sees tokens first <= t < last of each region
  int last[kNumRegions][kBlockRows];
  const uint8_t* drafts[kBlockRows];  // of these, row i sees token first_draft + j only if drafts[i][j]; null: all
  int first_draft;
  float* query;           // [4, key.padded_dim], times the logit scale, padding and unused rows 0
  float max[kBlockRows];  // running maximum of the logits
  float sum[kBlockRows];  // sum of exp(logit - max)
  float* scratch;         // the kernel's own, 64-byte aligned
};

struct Kernel {
  const char* name;
  int64_t (*scratch_floats)(const Shape& shape);
  void (*begin)(const Shape& shape, Block* block);
  void (*attend)(const Shape& shape, const Span& span, Block* block);
  void (*finish)(const Shape& shape, const Block& block, float* out);  // out [4, value.dim], not yet divided by sum
};

extern const Kernel kBaselineKernel;
#if defined(__x86_64__)
extern const Kernel kAvx2Kernel;
extern const Kernel kAvx512Kernel;
#endif

}  // namespace jax_foscar::cpu
