// The two descriptors of tcgen05.mma (PTX ISA, "Shared memory descriptor" and "Instruction descriptor").
#pragma once

#include <cstdint>

#include "../page_format.h"

namespace jax_foscar::blackwell {

// A matrix in shared memory without swizzle: core matrices of 8 x 16 bytes, 128 bytes each.
//
//   K-major   a core matrix is 8 rows, 16 bytes along k each; `leading` bytes to the next one along k, `stride` bytes
//   to
//             the next 8 rows
//   MN-major  a core matrix is 8 k, 16 bytes along n each; `leading` bytes to the next 8 k, `stride` bytes to the next
//             16 bytes along n
JF_HOST_DEVICE constexpr uint64_t shared_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  const auto encode = [](uint32_t bytes) { return static_cast<uint64_t>((bytes & 0x3ffff) >> 4); };
  return encode(address) | encode(leading) << 16 | encode(stride) << 32 | uint64_t{1} << 46;
}

// The numbers that kind::f8f6f4 knows its element types by.
enum class Element : uint32_t { kE4M3 = 0, kE2M1 = 5 };

inline constexpr int kMmaRows = 128;  // M
inline constexpr int kMmaDepth = 32;  // K

// D (f32) = A (128 x 32, K-major) x B (32 x columns, E4M3, MN-major).  `columns` is a multiple of 16.
JF_HOST_DEVICE constexpr uint32_t instruction_descriptor(Element a, int columns) {
  constexpr uint32_t kF32 = 1, kTransposed = 1;
  return kF32 << 4 | static_cast<uint32_t>(a) << 7 | static_cast<uint32_t>(Element::kE4M3) << 10 | kTransposed << 16 |
         static_cast<uint32_t>(columns / 8) << 17 | static_cast<uint32_t>(kMmaRows / 16) << 24;
}

// An address in tensor memory: 128 lanes of 512 columns of 32 bits.
JF_HOST_DEVICE constexpr uint32_t tensor_address(uint32_t base, int lane, int column) {
  return base + (static_cast<uint32_t>(lane) << 16) + static_cast<uint32_t>(column);
}

}  // namespace jax_foscar::blackwell
