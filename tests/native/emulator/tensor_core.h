// What the emulated tcgen05 instructions do, written from the PTX ISA ("Tensor Core 5th Generation Family
// Instructions") and not from the kernel: nothing here includes its headers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulator {

inline void check(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

// 128 lanes of 512 columns of 32 bits; an address is lane << 16 | column.  It starts as NaN.
class TensorMemory {
 public:
  static constexpr int kLanes = 128, kColumns = 512;
  uint32_t& at(uint32_t address, int lane, int column) {
    const int l = static_cast<int>(address >> 16) + lane, c = static_cast<int>(address & 0xffff) + column;
    check(l < kLanes && c < kColumns, "an address outside tensor memory");
    return cells_[l * kColumns + c];
  }

 private:
  std::vector<uint32_t> cells_ = std::vector<uint32_t>(kLanes * kColumns, 0xffffffffu);
};

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// --- Element types --------------------------------------------------------------------------------------------------

inline double e4m3(uint8_t x) {
  if ((x & 0x7f) == 0x7f) return NAN;
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  const double value = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return x & 0x80 ? -value : value;
}
inline double e2m1(uint8_t x) {
  static constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return x & 8 ? -kValues[x & 7] : kValues[x & 7];
}

// --- Descriptors ----------------------------------------------------------------------------------------------------

// The shared memory descriptor's fields, and where it puts 16-byte unit `unit` along the leading dimension of line
// `line`: of K-major matrices a line is a row and units run along k, of MN-major ones a line is a k and units run along
// the rows.
struct SharedMatrix {
  uint32_t start, leading, stride, swizzle;

  explicit SharedMatrix(uint64_t bits) {
    const auto decode = [bits](int at) { return static_cast<uint32_t>(bits >> at & 0x3fff) << 4; };
    start = decode(0), leading = decode(16), stride = decode(32), swizzle = static_cast<uint32_t>(bits >> 61);
    check((bits >> 46 & 7) == 1, "descriptor bits 46-48 are not 0b001");
    check((bits >> 49 & 15) == 0 && (bits >> 53 & 0xff) == 0, "descriptor bits 49-60 are not 0");
    check((bits >> 14 & 3) == 0 && (bits >> 30 & 3) == 0, "reserved descriptor bits are not 0");
    check(swizzle == 0 || swizzle == 2 || swizzle == 4 || swizzle == 6, "a swizzling mode that is not emulated");
  }

  uint32_t unit_address(bool k_major, int line, int unit) const {
    // Without swizzle a core matrix is 8 lines of one unit; with it, 8 lines of 2, 4 or 8.
    const uint32_t units = swizzle == 0 ? 1 : swizzle == 6 ? 2 : swizzle == 4 ? 4 : 8;
    uint32_t address = start + line % 8 * 16 * units + unit % units * 16;
    if (k_major) {
      address += line / 8 * stride;
      if (swizzle == 0) address += unit * leading;
    } else if (swizzle == 0) {
      address += line / 8 * leading + unit * stride;
    } else {
      address += line / 8 * stride + unit / units * leading;
    }
    return address ^ (address >> 3 & 16 * (units - 1));
  }
};

struct Instruction {
  uint32_t a_type, b_type;
  bool a_transposed, b_transposed;
  int n, m;

  explicit Instruction(uint32_t bits) {
    check((bits & 0xf) == 0, "sparsity or saturation");
    check((bits >> 4 & 3) == 1, "D is not f32");
    check((bits >> 6 & 1) == 0 && (bits >> 23 & 1) == 0 && (bits >> 29) == 0, "reserved instruction bits are not 0");
    check((bits >> 13 & 3) == 0, "a negated operand");
    a_type = bits >> 7 & 7, b_type = bits >> 10 & 7;
    a_transposed = bits >> 15 & 1, b_transposed = bits >> 16 & 1;
    n = static_cast<int>(bits >> 17 & 63) * 8, m = static_cast<int>(bits >> 24 & 31) * 16;
    check(m == 128, "M other than 128 is not emulated");
    check(n >= 16 && n <= 256 && n % 16 == 0, "N must be a multiple of 16 where M is 128");
    check(!a_transposed, "a transposed A is not emulated");
    check(a_type == 0 || a_type == 5, "A is neither E4M3 nor E2M1");
    check(b_type == 0, "B is not E4M3");
  }
};

// --- tcgen05.mma.cta_group::1.kind::f8f6f4 --------------------------------------------------------------------------

// Products are exact; their sum with the accumulator keeps 25 bits below the largest exponent and truncates, as the
// tensor cores do (arXiv 2511.10909).
inline float truncating_sum(const double* terms, int count) {
  double largest = 0, plain = 0;
  for (int i = 0; i < count; ++i) {
    largest = std::fmax(largest, std::fabs(terms[i]));
    plain += terms[i];
  }
  if (largest == 0 || !std::isfinite(plain)) return static_cast<float>(plain);
  int exponent;
  std::frexp(largest, &exponent);
  const double step = std::ldexp(1.0, exponent - 1 - 25), inverse = 1 / step;
  int64_t sum = 0;
  for (int i = 0; i < count; ++i) sum += static_cast<int64_t>(terms[i] * inverse);  // toward zero
  const double exact = static_cast<double>(sum) * step;
  float result = static_cast<float>(exact);
  if (std::fabs(result) > std::fabs(exact)) result = std::nextafterf(result, 0.0f);
  return result;
}

// `read` gives a byte of shared memory.  `a` is a tensor address or, if `a_shared`, a descriptor.
inline void multiply(TensorMemory& memory, const std::function<uint8_t(uint32_t)>& read, uint32_t d, uint64_t a,
                     bool a_shared, uint64_t b, uint32_t form, bool accumulate) {
  constexpr int kDepth = 32;
  const Instruction instruction(form);
  static double table[256];
  if (table[1] == 0) {
    for (int i = 0; i < 256; ++i) table[i] = e4m3(static_cast<uint8_t>(i));
  }
  std::vector<double> b_values(kDepth * instruction.n);
  const SharedMatrix b_matrix(b);
  for (int k = 0; k < kDepth; ++k) {
    for (int n = 0; n < instruction.n; ++n) {
      const uint32_t at = instruction.b_transposed ? b_matrix.unit_address(false, k, n / 16) + n % 16
                                                   : b_matrix.unit_address(true, n, k / 16) + k % 16;
      b_values[n * kDepth + k] = table[read(at)];
    }
  }
  check(a_shared || instruction.a_type == 0, "E2M1 in tensor memory is not emulated");
  const uint64_t a_bits = a_shared ? a : uint64_t{1} << 46;
  const SharedMatrix a_matrix(a_bits);
  for (int m = 0; m < instruction.m; ++m) {
    double row[kDepth], terms[kDepth + 1];
    for (int k = 0; k < kDepth; ++k) {
      if (!a_shared) {
        row[k] = table[memory.at(static_cast<uint32_t>(a), m, k / 4) >> 8 * (k % 4) & 0xff];
      } else if (instruction.a_type == 0) {
        row[k] = table[read(a_matrix.unit_address(true, m, k / 16) + k % 16)];
      } else {  // 16 elements in 8 bytes, then 8 bytes of padding
        row[k] = e2m1(read(a_matrix.unit_address(true, m, k / 16) + k % 16 / 2) >> 4 * (k % 2) & 15);
      }
    }
    for (int n = 0; n < instruction.n; ++n) {
      for (int k = 0; k < kDepth; ++k) terms[k] = row[k] * b_values[n * kDepth + k];
      uint32_t& cell = memory.at(d, m, n);
      terms[kDepth] = accumulate ? float_of(cell) : 0.0;
      cell = bits_of(truncating_sum(terms, kDepth + 1));
    }
  }
}

// --- tcgen05.ld.32x32b and tcgen05.st.16x256b, what one lane of a warp does ------------------------------------------

// A warp reaches the 32 lanes of its number modulo 4.
inline void check_quarter(uint32_t address, int warp, int alignment) {
  const int lane = static_cast<int>(address >> 16);
  check(lane / 32 == warp % 4 && lane % alignment == 0, "lanes of tensor memory that belong to another warp");
}

inline void load_32x32b(TensorMemory& memory, uint32_t address, int warp, int lane, int count, uint32_t* registers) {
  check_quarter(address, warp, 32);
  for (int i = 0; i < count; ++i) registers[i] = memory.at(address, lane, i);
}

// 256 bits of 16 lanes: thread 4 g + c has columns 2 c, 2 c + 1 of lane g, then of lane g + 8; repeated every 8
// columns.
inline void store_16x256b(TensorMemory& memory, uint32_t address, int warp, int lane, int count,
                          const uint32_t* registers) {
  check_quarter(address, warp, 16);
  for (int i = 0; i < count; ++i)
    memory.at(address, lane / 4 + i % 4 / 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2) = registers[i];
}

}  // namespace emulator
