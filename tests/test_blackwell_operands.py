"""cuda/blackwell/operands.h, compiled for the host, against ml_dtypes: every byte pattern, every field, every binade.

That the device's conversions are the same to the bit is in test_blackwell_numerics.py, on a GPU.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import float4_e2m1fn, float8_e4m3fn

ROOT = Path(__file__).resolve().parent.parent
E4M3 = np.arange(256, dtype=np.uint8).view(float8_e4m3fn).astype(np.float32)
E2M1 = np.arange(16, dtype=np.uint8).view(float4_e2m1fn).astype(np.float32)
FLOAT_BITS = np.arange(1 << 16, dtype=np.uint32) << 16  # every sign, exponent, and the first 7 bits of the mantissa


class Operands:
    """The header's functions over numpy arrays."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        for name in ("e4m3_code4", "e4m3_code2", "e2m1_code2"):
            getattr(self.library, name).restype = ctypes.c_float

    def __call__(self, name, x, *arguments, shape=None, dtype):
        x = np.ascontiguousarray(x)
        outs = [np.empty(x.shape if s is None else s, d) for s, d in zip(_list(shape), _list(dtype), strict=True)]
        pointers = [ctypes.c_void_p(out.ctypes.data) for out in outs]
        getattr(self.library, name)(ctypes.c_void_p(x.ctypes.data), ctypes.c_int64(x.size), *arguments, *pointers)
        return outs[0] if len(outs) == 1 else outs


def _list(x):
    return x if isinstance(x, list) else [x]


@pytest.fixture(scope="module")
def operands(tmp_path_factory):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on PATH")
    library = tmp_path_factory.mktemp("operands") / "operands.so"
    source = ROOT / "tests" / "native" / "blackwell_operands.cc"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{ROOT / 'cuda' / 'blackwell'}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    return Operands(library)


@pytest.fixture(scope="module")
def words():
    """Each byte with each right and left neighbour, in every position, in words that are else all zeros or all ones."""
    pattern = np.arange(1 << 16, dtype=np.uint32)
    return np.concatenate(
        [pattern << shift | rest & ~(0xFFFF << shift) for shift in (0, 8, 16) for rest in (0, 2**32 - 1)]
    ).astype(np.uint32)


def codes(words, bits, field):
    return words.view(np.uint8) >> bits * field & (1 << bits) - 1


@pytest.mark.parametrize("field", range(2))
def test_four_bit_codes_are_e4m3(operands, words, field):
    masked = operands("e4m3_field4", words, field, dtype=np.uint32)
    value = masked.view(float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(value, codes(words, 4, field) * np.float32(operands.library.e4m3_code4()))


@pytest.mark.parametrize("field", range(4))
def test_two_bit_codes_are_e4m3(operands, words, field):
    masked = operands("e4m3_field2", words, field, dtype=np.uint32)
    value = masked.view(float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(value, codes(words, 2, field) * np.float32(operands.library.e4m3_code2(field)))


@pytest.mark.parametrize("pair", range(2))
def test_two_bit_codes_are_e2m1(operands, words, pair):
    masked = operands("e2m1_fields", words, pair, dtype=np.uint32).view(np.uint8)
    for nibble, field in ((masked & 15, pair), (masked >> 4, pair + 2)):
        value = nibble.view(float4_e2m1fn).astype(np.float32)
        np.testing.assert_array_equal(value, codes(words, 2, field) * np.float32(operands.library.e2m1_code2()))


def test_values_of_all_bytes(operands):
    np.testing.assert_array_equal(operands("e4m3_value", np.arange(256, dtype=np.uint8), dtype=np.float32), E4M3)
    np.testing.assert_array_equal(operands("e2m1_value", np.arange(16, dtype=np.uint8), dtype=np.float32), E2M1)


def nearest_e4m3(x):
    """ml_dtypes', which does not saturate, with the rule of cvt.rn.satfinite."""
    nearest = np.clip(np.nan_to_num(x), -448, 448).astype(float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), nearest)


def test_rounding_to_e4m3(operands):
    """At every value, at every tie and one step of f32 beside each, and over all exponents."""
    values = np.unique(E4M3[np.isfinite(E4M3)])
    edges = np.concatenate(
        [values, (values[1:] + values[:-1]) / 2, np.float32([464, -464, np.inf, -np.inf, 0.0, -0.0])]
    )
    x = np.concatenate(
        [
            edges,
            np.nextafter(edges, np.float32(np.inf)),
            np.nextafter(edges, np.float32(-np.inf)),
            FLOAT_BITS.view(np.float32),
        ]
    )
    np.testing.assert_array_equal(operands("e4m3_of_float", x, dtype=np.uint8), nearest_e4m3(x))


def binades(per_binade=1 << 14):
    """(exponent, values of both signs in [2^exponent, 2^(exponent + 1))) up to the range's end, ends included."""
    rng = np.random.default_rng(0)
    for exponent in range(-30, 9):
        mantissa = np.concatenate(
            [rng.integers(0, 1 << 23, per_binade), np.arange(0, 1 << 23, 1 << 12), [0, (1 << 23) - 1]]
        )
        x = np.ldexp(1 + mantissa / (1 << 23), exponent).astype(np.float32)
        x = x[x <= 448]
        yield exponent, np.concatenate([x, -x])


def test_parts(operands):
    """Each part is ml_dtypes' rounding of 16 times what the one before left, and the rest is as small as promised."""
    for exponent, x in binades():
        parts, joined = operands("split", x, shape=[(x.size, 3), (3, x.size)], dtype=[np.uint8, np.float32])
        pairs = operands("split_pair", x, shape=(x.size // 2, 3), dtype=np.uint16)
        np.testing.assert_array_equal(pairs.view(np.uint8).reshape(-1, 3, 2).swapaxes(1, 2).reshape(-1, 3), parts)
        rest, total = x.astype(np.float64), np.zeros(x.size)
        for part in range(3):
            np.testing.assert_array_equal(parts[:, part], nearest_e4m3(rest.astype(np.float32)))
            value = E4M3[parts[:, part]].astype(np.float64)
            assert np.isfinite(value).all()
            total += value / 16**part
            np.testing.assert_array_equal(joined[part], total)  # exact
            assert np.abs(x - total).max() <= max(2.0 ** (exponent - 4 - 5 * part), 2.0 ** (-10 - 4 * part))
            rest = 16 * (rest - value)


def test_what_is_not_a_number(operands):
    parts, joined = operands("split", np.float32([np.nan]), shape=[(1, 3), (3, 1)], dtype=[np.uint8, np.float32])
    assert (parts == 0x7F).all()
    assert np.isnan(joined).all()


def test_scale_of_a_split(operands):
    """Inverse powers of two that bring the largest value to 128 or above, and NaN for what is not finite."""
    largest = np.abs(FLOAT_BITS.view(np.float32))
    up, down = operands("split_scale", largest.view(np.uint32), shape=(largest.size, 2), dtype=np.float32).T
    finite = np.isfinite(largest)
    assert np.isnan(up[~finite]).all()
    largest, up, down = largest[finite], up[finite], down[finite]
    np.testing.assert_array_equal(up.astype(np.float64) * down, 1)
    np.testing.assert_array_equal(np.frexp(up)[0], 0.5)
    assert (np.abs(np.log2(up)) <= 126).all()  # neither power is subnormal
    scaled = largest.astype(np.float64) * up
    assert (scaled < 256).all()
    assert (scaled[largest >= 2.0**-119] >= 128).all()
