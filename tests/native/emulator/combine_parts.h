// What combine.cu does, on the CPU.
#pragma once

#include <cmath>
#include <vector>

#include "cut.h"
#include "params.h"
#include "workspace.h"

namespace emulator {

using namespace jax_foscar;

// The merge of rows that several workers share, one query row after the other; `rows` are those of an item, which has
// all of a KV head's.  `store(i, x)` sets output number i.
template <class Store>
void combine_parts(const DecodeParams& params, const int* row_start, const float* pieces, int workers, int rows,
                   const Store& store) {
  const int ratio = params.num_heads / params.num_kv_heads, dim = params.value.dim;
  const int64_t piece_size = piece_floats(rows, dim);
  const Cut cut(row_start[params.batch], workers / params.num_kv_heads);
  for (int row = 0; row < params.batch; ++row) {
    const int before = row_start[row], count = row_start[row + 1] - before;
    for (int i = 0; i < params.num_queries * params.num_heads; ++i) {
      const int head = i % params.num_heads, in_item = i / params.num_heads * ratio + head % ratio;
      const int64_t index = int64_t{row} * params.num_queries * params.num_heads + i;
      if (count == 0) {
        for (int d = 0; d < dim; ++d) store(index * dim + d, 0.0f);
        params.lse[index] = -INFINITY;
        continue;
      }
      const int first = cut.owner(before), parts = cut.owner(before + count - 1) - first + 1;
      if (parts == 1) continue;
      float max = -INFINITY;
      const auto piece = [&](int p) {
        const int64_t worker = int64_t{first + p} * params.num_kv_heads + head / ratio;
        return pieces + (2 * worker + (p == 0)) * piece_size;
      };
      for (int p = 0; p < parts; ++p) max = std::fmax(max, piece(p)[rows * dim + in_item]);
      double sum = 0;
      std::vector<double> total(dim);
      for (int p = 0; p < parts; ++p) {
        const double weight = max == -INFINITY ? 1.0 : std::exp2(piece(p)[rows * dim + in_item] - max);
        sum += weight * piece(p)[rows * (dim + 1) + in_item];
        for (int d = 0; d < dim; ++d) total[d] += weight * piece(p)[in_item * dim + d];
      }
      for (int d = 0; d < dim; ++d) store(index * dim + d, sum == 0 ? 0.0f : static_cast<float>(total[d] / sum));
      params.lse[index] = sum == 0 ? -INFINITY : static_cast<float>(max * 0.69314718055994531 + std::log(sum));
    }
  }
}

}  // namespace emulator
