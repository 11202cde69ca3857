"""The parts that the Blackwell kernel splits queries and weights into suffice; emulated anywhere, measured on a GPU.

benchmarks/blackwell_numerics.py has the inputs and the arithmetic; docs/blackwell-numerics.md other choices' errors.
"""

import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import blackwell_numerics as numerics

CHOSEN = (3, 3)
BOUND = 1e-3
FORMATS = (*numerics.FORMATS, "k4t,v4t", "k2t,v2t", "k2c32,v2t32", "k4t32,v4c32")


def prepare(name, text, tokens=None):
    given = numerics.named_input(name, tokens)
    keys, values = numerics.quantize(given, text)
    return given.q, keys, values, numerics.reference(given.q, keys, values)


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("name", numerics.INPUTS)
def test_emulated(name, text):
    q, keys, values, expected = prepare(name, text, tokens=2048)
    assert numerics.relative_l2(numerics.emulate(q, keys, values, CHOSEN), expected) <= BOUND


@pytest.mark.parametrize("parts", [(2, 3), (3, 2)])
def test_fewer_parts_do_not_suffice(parts):
    q, keys, values, expected = prepare("real", "k4c64,v4t64")
    assert numerics.relative_l2(numerics.emulate(q, keys, values, parts), expected) > BOUND


@pytest.mark.parametrize("name", ["randn", "flat"])
def test_tensor_cores_cut_nothing_off_a_tile(name):
    """Parts and codes are multiples of few powers of two: what a tile sums is exact, or rounded in its last bit."""
    q, keys, values, _ = prepare(name, "k4t64,v4t64", tokens=512)
    exact = numerics.emulate(q, keys, values, CHOSEN)
    as_summed = numerics.emulate(q, keys, values, CHOSEN, product=numerics.tensor_core_product)
    assert numerics.relative_l2(as_summed, exact) <= 1e-6


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    return numerics.build(tmp_path_factory.mktemp("numerics") / "blackwell_numerics.so")


def test_device_converts_as_the_host(library):
    """Every f32 pattern to E4M3, and the parts of all that are in range."""
    assert library.blackwell_conversion_mismatches() == 0


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("name", numerics.INPUTS)
def test_measured(library, name, text):
    q, keys, values, expected = prepare(name, text)
    errors = {n: numerics.relative_l2(numerics.measure(library, q, keys, values, (n, n)), expected) for n in (1, 2, 3)}
    print(name, text, ", ".join(f"{error:.1e} with {parts}" for parts, error in errors.items()), "part(s)")
    assert errors[3] <= BOUND


def test_queries_that_are_not_finite(library):
    """An infinity or a NaN makes its own row NaN, and no other."""
    q, keys, values, _ = prepare("randn", "k4c64,v4t64", tokens=256)
    expected = numerics.measure(library, q, keys, values, CHOSEN)
    for bad in (np.nan, np.inf):
        spoilt = q.copy()
        spoilt[1, 2, 5] = bad
        out = numerics.measure(library, spoilt, keys, values, CHOSEN)
        assert np.isnan(out[1, 2]).all()
        out[1, 2] = expected[1, 2]
        np.testing.assert_array_equal(out, expected)
