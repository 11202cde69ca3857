// A list of units of work cut into equal contiguous ranges, one a worker.
#pragma once

#include "page_format.h"

namespace jax_foscar {

// The first `extra` ranges have `base` + 1 units, the others `base`.
struct Cut {
  int base, extra;

  JF_HOST_DEVICE constexpr Cut(int units, int ranges) : base(units / ranges), extra(units % ranges) {}
  // First unit of a range.
  JF_HOST_DEVICE constexpr int begin(int range) const { return range * base + (range < extra ? range : extra); }
  JF_HOST_DEVICE constexpr int count(int range) const { return base + (range < extra); }
  // The range that holds a unit.
  JF_HOST_DEVICE constexpr int owner(int unit) const {
    const int long_units = extra * (base + 1);
    return unit < long_units ? unit / (base + 1) : extra + (unit - long_units) / base;
  }
};

}  // namespace jax_foscar
