"""The shapes that benchmarks are run at, by name, and the lengths of their rows."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
    """One decode step: a query a row against a cache of ``length`` tokens a row (of the longest row, where ragged)."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    lengths: str = "even"

    def row_lengths(self) -> np.ndarray:
        """Tokens of each row, ``[batch]``.

        "even": all alike. "ragged": from length / 64 to length, log-uniform. "one-long": one row of ``length`` tokens,
        the others of length / 128.
        """
        if self.lengths == "even":
            return np.full(self.batch, self.length, np.int32)
        if self.lengths == "ragged":
            exponent = np.random.default_rng(0).uniform(-6, 0, self.batch)
            return np.maximum(self.length * 2.0**exponent, 1).astype(np.int32)
        lengths = np.full(self.batch, max(self.length // 128, 1), np.int32)
        lengths[self.batch // 2] = self.length
        return lengths


SHAPES = {
    "cpu": Shape(4, 8192, 32, 8, 128),
    "batch128": Shape(128, 32768, 32, 8, 128),
    "batch128-64heads": Shape(128, 32768, 64, 8, 128),
    "batch16": Shape(16, 32768, 32, 8, 128),
    "long": Shape(1, 131072, 32, 8, 128),
    "single": Shape(1, 32768, 32, 8, 128),
    "ragged": Shape(128, 65536, 32, 8, 128, "ragged"),
    "one-long": Shape(128, 131072, 32, 8, 128, "one-long"),
    "dim64": Shape(256, 32768, 9, 3, 64),
    "dim256": Shape(128, 32768, 4, 1, 256),
    "gqa1": Shape(64, 16384, 16, 16, 128),
    "gqa16": Shape(128, 32768, 64, 4, 128),
}
