// cuda/blackwell/operands.h as a shared library, one array function each, for tests/test_blackwell_operands.py.
#include "operands.h"

namespace blackwell = jax_foscar::blackwell;

extern "C" {

void e4m3_field4(const uint32_t* words, int64_t count, int field, uint32_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = blackwell::e4m3_field4(words[i], field);
}

void e4m3_field2(const uint32_t* words, int64_t count, int field, uint32_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = blackwell::e4m3_field2(words[i], field);
}

void e2m1_fields(const uint32_t* words, int64_t count, int pair, uint32_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = blackwell::e2m1_fields(words[i], pair);
}

float e4m3_code4() { return blackwell::e4m3_code4(); }
float e4m3_code2(int field) { return blackwell::e4m3_code2(field); }
float e2m1_code2() { return blackwell::e2m1_code2(); }

void e4m3_value(const uint8_t* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = blackwell::e4m3_value(x[i]);
}

void e2m1_value(const uint8_t* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = blackwell::e2m1_value(x[i]);
}

void e4m3_of_float(const float* x, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = blackwell::e4m3_of_float(x[i]);
}

// out [count, 3], joined [3, count]
void split(const float* x, int64_t count, uint8_t* out, float* joined) {
  for (int64_t i = 0; i < count; ++i) {
    const blackwell::Parts parts = blackwell::split(x[i]);
    for (int part = 0; part < 3; ++part) {
      out[3 * i + part] = parts.part[part];
      joined[part * count + i] = blackwell::join(parts, part + 1);
    }
  }
}

// out [count / 2, 3]
void split_pair(const float* x, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i + 1 < count; i += 2) {
    const blackwell::PartPairs pairs = blackwell::split_pair(x[i], x[i + 1]);
    for (int part = 0; part < 3; ++part) out[3 * (i / 2) + part] = pairs.part[part];
  }
}

// out [count, 2]
void split_scale(const uint32_t* largest, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    const blackwell::SplitScale scale = blackwell::split_scale(largest[i]);
    out[2 * i] = scale.up;
    out[2 * i + 1] = scale.down;
  }
}
}
