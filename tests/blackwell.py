"""The emulator of the Blackwell kernel (native/emulator) for tests: compiled once, called over ctypes."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
from enum import IntEnum

import numpy as np
from emulators import UNBOUNDED, Arrays, build, sizes_of_call
from support import dequantize, pack, quantize

from jax_foscar import Quant


class Fault(IntEnum):
    """What the emulator can break (native/emulator/machine.h)."""

    NONE = 0
    SWIZZLE_BIT = 1
    SWAPPED_FRAGMENT = 2
    MISSING_FLUSH = 3
    MISSING_WAIT = 4
    MISSING_FENCE = 5
    MISSING_STORE_WAIT = 6
    MISSING_TENSOR_FENCE = 7


Sizes = sizes_of_call("blocks", "stages", "seed", "fault")


class Act(IntEnum):
    """What a warp does to a barrier or a buffer."""

    WAIT = 0
    ARRIVE = 1
    EXPECT = 2
    COPY = 3
    COMMIT = 4
    READ = 5
    WRITE = 6
    MULTIPLY_READ = 7
    MULTIPLY_WRITE = 8


@functools.cache
def library() -> ctypes.CDLL:
    loaded = build("emulate.cc")
    loaded.emulate.restype = ctypes.c_int64
    loaded.barrier.restype = ctypes.c_char_p
    return loaded


@dataclasses.dataclass
class Problem:
    """One call: queries ``[B, T, N, D]``, and keys and values ``[B, K, tokens, D]`` in pages of a shuffled pool."""

    key: Quant
    value: Quant
    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    lengths: list[int]
    page_size: int = 64
    causal: bool = True
    arrays: dict[str, np.ndarray] = dataclasses.field(init=False)

    def __post_init__(self):
        rng = np.random.default_rng(len(self.lengths))
        batch, heads, tokens, dim = self.keys.shape
        width = tokens // self.page_size
        pages = batch * width + 3
        table = rng.permutation(pages)[: batch * width].reshape(batch, width).astype(np.int32)
        self.arrays = {"q": self.q, "page_table": table, "length": np.array(self.lengths, np.int32)}
        self.arrays["layer"] = np.zeros(1, np.int32)
        self.expected_kv = []
        for name, quant, x in ("key", self.key, self.keys), ("value", self.value, self.values):
            codes, params = quantize(x, quant)
            self.expected_kv.append(dequantize(codes, params, quant))
            codes = codes.reshape(batch, heads, width, self.page_size, dim)
            params = params.reshape(batch, heads, width, -1)
            packed = pack(codes, name, quant.bits)
            pool = np.full((pages, heads, *packed.shape[3:]), 0xFF, np.uint8)
            pool_params = np.full((pages, heads, params.shape[-1]), np.nan, np.float16)
            pool[table] = packed.transpose(0, 2, 1, 3, 4)
            pool_params[table] = params.transpose(0, 2, 1, 3)
            # What lies past a row's tokens: any codes, NaN parameters.
            per_token = pool_params.reshape(pages, heads, -1, params.shape[-1] // (self.page_size // self.group(quant)))
            for row, length in enumerate(self.lengths):
                for token in range(length, tokens):
                    page = table[row, token // self.page_size]
                    if quant.per == "token" or token % self.group(quant) == 0:
                        per_token[page, :, token % self.page_size // self.group(quant)] = np.nan
            self.arrays[f"{name}_codes"], self.arrays[f"{name}_params"] = pool, pool_params

    @staticmethod
    def group(quant: Quant) -> int:
        """Tokens that share parameters."""
        return quant.group if quant.per == "channel" else 1

    def run(
        self,
        blocks: int | None = None,
        seed: int = 0,
        fault: Fault = Fault.NONE,
        events: int = 0,
        stages: int = 6,
    ):
        """Output, log-sum-exp and the first CTA's events ``[n, 4]``."""
        batch, num_queries, num_heads, dim = self.q.shape
        heads = self.keys.shape[1]
        arrays = {**self.arrays, "out": np.full(self.q.shape, 7, np.float32)}
        arrays["lse"] = np.full(self.q.shape[:3], 7, np.float32)
        sizes = {
            "batch": batch, "num_queries": num_queries, "num_heads": num_heads, "num_kv_heads": heads, "pools": 1,
            "layers": 1, "pages": len(arrays["key_codes"]), "page_size": self.page_size, "dim": dim,
            "table_width": arrays["page_table"].shape[1], "causal": self.causal, "token_group": 1,
            "window_left": UNBOUNDED,
            "key_bits": self.key.bits, "key_per_channel": self.key.per == "channel", "key_group": self.key.group or dim,
            "value_bits": self.value.bits, "value_per_channel": self.value.per == "channel",
            "value_group": self.value.group or dim, "blocks": blocks or 3 * heads, "stages": stages, "seed": seed,
            "fault": fault,
        }  # fmt: skip
        # Copies: bulk copies want multiples of 16 bytes, which malloc gives.
        kept = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
        trace = np.zeros((events, 4), np.int32)
        message = ctypes.create_string_buffer(200)
        count = library().emulate(
            ctypes.byref(Sizes(**sizes)),
            ctypes.byref(Arrays(**{name: x.ctypes.data for name, x in kept.items()})),
            ctypes.c_float(dim**-0.5), ctypes.c_void_p(trace.ctypes.data), ctypes.c_int64(events), message,
            ctypes.c_int64(len(message)),
        )  # fmt: skip
        if count < 0:
            raise RuntimeError(message.value.decode())
        return arrays["out"], arrays["lse"], trace[:count]

    def expected(self):
        """Output and log-sum-exp in float64, of the dequantized cache."""
        batch, num_queries, num_heads, dim = self.q.shape
        keys, values = self.expected_kv
        ratio = num_heads // keys.shape[1]
        out, lse = np.zeros(self.q.shape), np.full(self.q.shape[:3], -np.inf)
        for row, query, head in np.ndindex(batch, num_queries, num_heads):
            length = self.lengths[row]
            end = max(length - num_queries + query + 1, 0) if self.causal else length
            if end == 0:
                continue
            logits = keys[row, head // ratio, :end] @ self.q[row, query, head].astype(np.float64) * dim**-0.5
            top = logits.max()
            weights = np.exp(logits - top)
            out[row, query, head] = weights @ values[row, head // ratio, :end] / weights.sum()
            lse[row, query, head] = top + np.log(weights.sum())
        return out, lse


def barriers(keys_per_channel: bool) -> dict[int, tuple[str, int]]:
    """Number -> name and arrivals a phase, of every barrier's every slot (cuda/blackwell/pipeline.h)."""
    found = {}
    slots, arrivals, index = (ctypes.c_int() for _ in range(3))
    pointers = [ctypes.byref(x) for x in (slots, arrivals, index)]
    for number in itertools.count():
        name = library().barrier(number, ctypes.c_bool(keys_per_channel), *pointers)
        if name is None:
            return found
        for slot in range(slots.value):
            found[index.value + slot] = (name.decode(), arrivals.value)
