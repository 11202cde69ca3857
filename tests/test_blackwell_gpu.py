"""The tcgen05 kernel on the GPU it is for.  Skipped anywhere else: `make verify-sm100` runs it on a B200."""

import jax
import numpy as np
import pytest
from support import check_attention, make_cache, queries, random_rows

from jax_foscar import KVFormat, decode_attention, native


def there() -> bool:
    cuda = native.module("cuda")
    if cuda is None or jax.default_backend() != "gpu" or not cuda.has_tcgen05 or not cuda.uses_tcgen05():
        return False
    return jax.devices()[0].compute_capability.startswith("10.")


pytestmark = pytest.mark.skipif(
    not there(), reason="needs a GPU of compute capability 10.x and JAX_FOSCAR_SM100=tcgen05"
)
IMPLEMENTATION = "cuda"
FORMATS = [
    f"k{key_bits}{key},v{value_bits}{value}"
    for key in ("t", "t32", "c32", "c64")
    for value in ("t", "t64", "c32", "c64")
    for key_bits, value_bits in ((2, 2), (4, 4), (2, 4), (4, 2))
]
LENGTHS = (1, 64, 127, 128, 129, 500, 1023, 2000)


def attend(q, cache):
    run = jax.jit(lambda q, cache: decode_attention(q, cache, return_residual=True, implementation=IMPLEMENTATION))
    return run(q, cache)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("text", FORMATS, ids=lambda text: text.replace(",", "-"))
def test_formats(text, dim):
    """Ragged rows, with and without NaN where no token is, for 4 and 8 query rows and several queries a row."""
    fmt = KVFormat.parse(text)
    rows = random_rows(LENGTHS, heads=2, dim=dim)
    cache = make_cache(fmt, rows, capacity=2048, poison=True)
    clean = make_cache(fmt, rows, capacity=2048)
    for num_queries, heads in ((1, 8), (1, 16), (2, 8), (4, 4), (1, 6)):
        q = queries((len(LENGTHS), num_queries, heads, dim))
        out, lse = attend(q, cache)
        check_attention((out, lse), q, cache, IMPLEMENTATION)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(attend(q, clean)[0]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(dtype):
    cache = make_cache(KVFormat.parse("k4c64,v4t64"), random_rows(LENGTHS, dim=128), capacity=2048)
    q = queries((len(LENGTHS), 1, 8, 128), dtype)
    check_attention(attend(q, cache), q, cache, IMPLEMENTATION)


def test_many_rows_and_one_long_row():
    """Work that is cut in many ways, the same bits each time."""
    for lengths, heads in (((300,) * 300, 8), ((20000,), 2)):
        rows = random_rows(lengths, heads=heads, dim=128)
        cache = make_cache(KVFormat.parse("k4t,v4t"), rows, capacity=(max(lengths) + 63) // 64 * 64)
        q = queries((len(lengths), 1, 4 * heads, 128))
        out, lse = attend(q, cache)
        check_attention((out, lse), q, cache, IMPLEMENTATION)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(attend(q, cache)[0]))
