// The bytes inside one page of the cache, stated once as index formulas.
//
// A page holds `page_size` tokens of one KV head, as page_size / 64 tiles of 64 tokens, one after the other.  Inside a
// tile the two operands of attention have layouts of their own, chosen so that the 16 bytes a tensor-core lane loads
// are already the packed form of its mma.sync fragment (docs/cache-format.md draws both):
//
//   keys    one byte = one token x (8 / bits) channels.  A block is 16 bytes of one token; four blocks interleave by
//           4-byte words, so lane 4 * (t % 8) + c owns bytes 4c .. 4c + 3 of four blocks in one 16-byte load.
//   values  one byte = one token x (8 / bits) channels.  A word is the tokens {2c, 8 + 2c, 2c + 1, 9 + 2c} of one
//   channel
//           row, so a mask of the word (or of the word >> 8) is a pair of neighbouring tokens, as an f16 operand needs.
//
// A token owns its bytes: appending one never touches a neighbour's.  2-bit head dims that are not a multiple of 64 end
// in a tail of 8 bytes a token.  At 16 bits a tile is plain row-major bf16.  jax_foscar/layout.py states the same
// formulas in Python, and a test holds the two together.
#pragma once

#if defined(__CUDACC__)
#define JF_HOST_DEVICE __host__ __device__
#define JF_NOINLINE __noinline__
#else
#define JF_HOST_DEVICE
#define JF_NOINLINE
#endif

namespace jax_foscar {

inline constexpr int kTileTokens = 64;

// Head dims are padded to a multiple of 32 channels (80 -> 96); padding codes are 0 and never read.
JF_HOST_DEVICE constexpr int padded_dim(int dim) { return (dim + 31) / 32 * 32; }

// Bytes of one token of one KV head.
JF_HOST_DEVICE constexpr int token_bytes(int bits, int dim) {
  return bits == 16 ? 2 * dim : padded_dim(dim) * bits / 8;
}

// Whole blocks (keys) or row blocks (values) across a head: both span 128 / bits channels.
JF_HOST_DEVICE constexpr int num_blocks(int bits, int dim) { return padded_dim(dim) * bits / 128; }

// Where a code lives: the byte inside the page, and the position of its lowest bit inside that byte.
struct CodeAddress {
  int byte;
  int shift;
};

JF_HOST_DEVICE constexpr CodeAddress key_address(int bits, int dim, int token, int channel) {
  const int tile_base = token / kTileTokens * kTileTokens * token_bytes(bits, dim);
  const int t = token % kTileTokens;
  if (bits == 16) return {tile_base + t * 2 * dim + 2 * channel, 0};

  const int blocks = num_blocks(bits, dim);
  const int block_channels = 128 / bits;
  const int blk = channel / block_channels;
  const int rest = channel % block_channels;
  if (blk == blocks) {  // the 2-bit tail: byte j, field f <-> channel 8 f + j
    const int field = rest / 8, j = rest % 8, lane = 4 * (t % 8) + j / 2;
    return {tile_base + blocks * 16 * kTileTokens + lane * 16 + t / 8 * 2 + j % 2, 2 * field};
  }
  // 2 bits: byte j, field f <-> channel 32 (f & 1) + 16 (f >> 1) + j.   4 bits: channel 16 f + j.
  const int field = bits == 2 ? rest / 32 + 2 * (rest % 32 / 16) : rest / 16;
  const int j = rest % 16, lane = 4 * (t % 8) + j / 4, n = t / 8 * blocks + blk;
  return {tile_base + (n / 4 * 32 + lane) * 16 + n % 4 * 4 + j % 4, bits * field};
}

JF_HOST_DEVICE constexpr CodeAddress value_address(int bits, int dim, int token, int channel) {
  const int tile_base = token / kTileTokens * kTileTokens * token_bytes(bits, dim);
  const int t = token % kTileTokens;
  if (bits == 16) return {tile_base + t * 2 * dim + 2 * channel, 0};

  const int blocks = num_blocks(bits, dim);
  const int block_channels = 128 / bits;
  const int rb = channel / block_channels;
  const int rest = channel % block_channels;
  const int pair = t % 2 * 2 + t % 16 / 8;  // the token's byte inside its word
  if (rb == blocks) {                       // the 2-bit tail: rows 0..7, row r, field f <-> channel 8 f + r
    const int field = rest / 8, r = rest % 8, lane = 4 * r + t % 8 / 2;
    return {tile_base + blocks * 16 * kTileTokens + (t / 32 * 32 + lane) * 8 + t % 32 / 16 * 4 + pair, 2 * field};
  }
  // Row r, field f <-> channel 16 f + r.
  const int field = rest / 16, r = rest % 16, lane = 4 * (r % 8) + t % 8 / 2;
  return {tile_base + ((t / 32 * blocks + rb) * 32 + lane) * 16 + (r / 8 + 2 * (t % 32 / 16)) * 4 + pair, bits * field};
}

// The inverse, a 4-byte word at a time: byte i, field f of a word of keys is the code of token `token +
// key_byte_token(i)` and channel `channel + key_byte_channel(i) + key_field_channel(f)`, of a word of values that of
// `token + value_byte_token(i)` and `channel + value_field_channel(f)`.
struct CodeWord {
  int token, channel;  // of byte 0, field 0
  bool tail;
};

// Word `index` (0 .. 16 * token_bytes - 1) of a tile, at 2 or 4 bits.
JF_HOST_DEVICE constexpr CodeWord key_word(int bits, int dim, int index) {
  const int blocks = num_blocks(bits, dim), in_tail = index - blocks * 4 * kTileTokens;
  if (in_tail >= 0) {
    const int lane = in_tail / 4;
    return {in_tail % 4 * 16 + lane / 4, blocks * (128 / bits) + lane % 4 * 2, true};
  }
  const int lane = index / 4 % 32, n = index / 128 * 4 + index % 4;
  return {n / blocks * 8 + lane / 4, n % blocks * (128 / bits) + lane % 4 * 4, false};
}

JF_HOST_DEVICE constexpr CodeWord value_word(int bits, int dim, int index) {
  const int blocks = num_blocks(bits, dim), in_tail = index - blocks * 4 * kTileTokens;
  if (in_tail >= 0) {
    const int lane = in_tail / 2 % 32;
    return {in_tail / 64 * 32 + in_tail % 2 * 16 + lane % 4 * 2, blocks * (128 / bits) + lane / 4, true};
  }
  const int lane = index / 4 % 32, n = index / 128, half = index % 4 / 2;
  return {n / blocks * 32 + half * 16 + lane % 4 * 2, n % blocks * (128 / bits) + index % 2 * 8 + lane / 4, false};
}

JF_HOST_DEVICE constexpr int key_byte_token(bool tail, int i) { return tail ? i / 2 * 8 : 0; }
JF_HOST_DEVICE constexpr int key_byte_channel(bool tail, int i) { return tail ? i % 2 : i; }
JF_HOST_DEVICE constexpr int key_field_channel(int bits, bool tail, int f) {
  return tail ? 8 * f : bits == 4 ? 16 * f : 32 * (f & 1) + 16 * (f >> 1);
}
JF_HOST_DEVICE constexpr int value_byte_token(int i) { return i % 2 * 8 + i / 2; }
JF_HOST_DEVICE constexpr int value_field_channel(bool tail, int f) { return tail ? 8 * f : 16 * f; }

}  // namespace jax_foscar
