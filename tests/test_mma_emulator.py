"""The tensor-core kernel of sm_80 and newer on emulated warps (native/emulator/warps.h): attention over the cache.

Nothing here needs a GPU: the kernel's own code runs, its threads as fibers in a random order, cp.async as late as it
may. Kernels of one kind are emulated, and CTAs one after the other; what needs mbarriers is not.
"""

import ctypes
import functools
import re
import shutil
import subprocess
from enum import IntEnum

import numpy as np
import pytest
import support
from emulators import UNBOUNDED, Arrays, build, sizes_of_call
from support import make_cache, queries, random_rows, relative_l2

from jax_foscar import KVFormat

BOUND = 3e-4
HALF = 2**-11  # the relative error of rounding an output to float16, at most
KV_HEADS = 2
LENGTHS = (0, 1, 63, 64, 200, 400)
Sizes = sizes_of_call("ctas", "teams", "seed", "fault", "half_queries")


class Fault(IntEnum):
    """What the emulator can break (native/emulator/warps.h)."""

    NONE = 0
    EARLY_WAIT = 1


@functools.cache
def library():
    if shutil.which("nvcc") is None:
        pytest.skip("needs the headers of the CUDA toolkit, whose nvcc is not on PATH")
    steps = subprocess.run(["nvcc", "--dryrun", "-c", "-x", "cu", "/dev/null"], capture_output=True, text=True).stderr
    include = re.search(r'INCLUDES="-I([^"]+)"', steps)[1]
    loaded = build("decode_mma.cc", "-O1", f"-I{include}", instead={"ptx.cuh": "warp_ptx.cuh"})
    loaded.emulate_decode_mma.restype = ctypes.c_bool
    return loaded


def attend(q, cache, *, local_window_size=None, ctas=1, teams=KV_HEADS, seed=0, fault=Fault.NONE):
    """``(out, lse)``, out of the queries' type; ``teams`` is the number of workers a CTA."""
    fmt, dim = cache.format, cache.head_dim
    batch, num_queries, num_heads, _ = q.shape
    pools, layers, pages, kv_heads = cache.key.codes.shape[:4]
    arrays = {
        "q": q, "page_table": cache.page_table, "length": cache.length, "layer": np.zeros(1, np.int32),
        "out": np.full(q.shape, 7, q.dtype), "lse": np.full(q.shape[:3], 7, np.float32),
        "key_exact": cache.exact_key, "value_exact": cache.exact_value,
    }  # fmt: skip
    sizes = {
        "batch": batch, "num_queries": num_queries, "num_heads": num_heads, "num_kv_heads": kv_heads, "pools": pools,
        "layers": layers, "pages": pages, "page_size": fmt.page_size, "table_width": cache.page_table.shape[1],
        "dim": dim, "sink": fmt.sink_tokens, "recent": fmt.recent_tokens, "token_group": support.token_group(fmt),
        "ring": support.ring(fmt), "causal": True, "ctas": ctas, "teams": teams, "seed": seed, "fault": fault,
        "half_queries": q.dtype == np.float16,
        "window_left": UNBOUNDED if local_window_size is None else local_window_size[0],
    }  # fmt: skip
    for name, quant, operand in (("key", fmt.key, cache.key), ("value", fmt.value, cache.value)):
        arrays |= {f"{name}_codes": operand.codes, f"{name}_params": operand.params}
        sizes |= {f"{name}_bits": quant.bits, f"{name}_per_channel": quant.per == "channel"}
        sizes[f"{name}_group"] = quant.group or dim
    kept = {name: None if x is None else np.ascontiguousarray(x) for name, x in arrays.items()}
    message = ctypes.create_string_buffer(200)
    ran = library().emulate_decode_mma(
        ctypes.byref(Sizes(**sizes)),
        ctypes.byref(Arrays(**{name: None if x is None else x.ctypes.data for name, x in kept.items()})),
        ctypes.c_float(dim**-0.5), message, ctypes.c_int64(len(message)),
    )  # fmt: skip
    if not ran:
        raise RuntimeError(message.value.decode())
    return kept["out"], kept["lse"]


def example(text, *, num_queries=1, ratio=4, dim=128, lengths=LENGTHS, capacity=448, key_scale=1, **options):
    """Queries, and a cache of tokens whose pages and ring slots stand in a random order.

    Keys are ``key_scale`` times as large, queries as small.
    """
    rows = random_rows(lengths, heads=KV_HEADS, dim=dim)
    rows.k *= np.float32(key_scale)
    cache = make_cache(KVFormat.parse(text), rows, capacity=capacity, **options)
    return np.asarray(queries((len(lengths), num_queries, KV_HEADS * ratio, dim))) / np.float32(key_scale), cache


def errors(actual, q, cache, **options):
    """The relative L2 errors of the query rows that see a token; the others must be 0 and -inf."""
    (out, lse), (expected, expected_lse) = actual, support.attention(q, cache, **options)
    seen = np.isfinite(expected_lse)
    assert (out[~seen] == 0).all()
    assert np.isneginf(lse[~seen]).all()
    np.testing.assert_allclose(lse[seen], expected_lse[seen], rtol=1e-4, atol=1e-4)
    return [relative_l2(x, right) for x, right in zip(out[seen], expected[seen], strict=True)]


FORMATS = ["k4t,v4t", "k2t,v2t", "k4t,v2t", "k2t64,v2t64", "k4c64,v4t64", "k2c64,v2c64"]
WINDOWS = ["", ",sink4,recent20", ",sink32,recent70", ",sink64,recent256", ",sink5"]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("text", FORMATS)
def test_formats(text, windows):
    """One query and four heads, and two of two, with rows whole and cut among workers."""
    for options in {"num_queries": 1, "ratio": 4}, {"num_queries": 2, "ratio": 2}:
        q, cache = example(text + windows, **options)
        for grid in {}, {"ctas": 2, "teams": 5}:
            assert max(errors(attend(q, cache, **grid), q, cache)) <= BOUND


@pytest.mark.parametrize("windows", ["", ",sink4,recent20", ",sink32,recent70"])
@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        ("k2t64,v2t64", 8), ("k4c64,v4t64", 8), ("k2c64,v2t64", 8), ("k4t,v4t", 16), ("k2t,v2t", 16), ("k4t,v4t", 11),
        ("k4c64,v4t64", 16),
    ],
)  # fmt: skip
def test_many_query_rows(text, ratio, windows):
    """Eight rows a warp, and teams of two or four warps."""
    q, cache = example(text + windows, ratio=ratio)
    for grid in {}, {"ctas": 2, "teams": 3}:
        assert max(errors(attend(q, cache, **grid), q, cache)) <= BOUND


@pytest.mark.parametrize("text", ["k2t,v2t", "k2t,v2t,sink32,recent70", "k4c64,v4t64,sink32,recent70"])
def test_local_window(text):
    q, cache = example(text, num_queries=2, ratio=2)
    window = {"local_window_size": (50, 0)}
    assert max(errors(attend(q, cache, **window, teams=6), q, cache, **window)) <= BOUND


@pytest.mark.parametrize("text", ["k4t,v4t", "k4t,v4t,page192,sink70,recent9", "k2c64,v2c64,page128"])
def test_more_tiles_than_page_ids_are_read_at_once(text):
    """And pages of one tile or more, from the first tile and from another one on."""
    q, cache = example(text, lengths=(2500, 4300), capacity=4608)
    for grid in {}, {"ctas": 2, "teams": 5}:
        assert max(errors(attend(q, cache, **grid), q, cache)) <= BOUND


@pytest.mark.parametrize("key_scale", [2**-12, 2**-5, 2**6, 2**12])
@pytest.mark.parametrize("text", ["k2c64,v2c64", "k2c64,v2t64,sink4,recent20", "k4c64,v4t64"])
def test_scales_per_channel(text, key_scale):
    """Scales per channel near both ends of float16 and beyond what the 2-bit kernel takes without a factor.

    Of float16 queries, that is: those in float32 have low parts, and always take the factor.
    """
    q, cache = example(text, key_scale=key_scale, lengths=(0, 200, 400))
    for grid in {}, {"ctas": 2, "teams": 5}:
        assert max(errors(attend(q, cache, **grid), q, cache)) <= BOUND
        halves = q.astype(np.float16)
        out, lse = attend(halves, cache, **grid)
        assert max(errors((out.astype(np.float32), lse), halves.astype(np.float32), cache)) <= BOUND + HALF


def test_head_dim_64():
    q, cache = example("k2t,v2t,sink32,recent70", dim=64)
    assert max(errors(attend(q, cache), q, cache)) <= BOUND


@pytest.mark.parametrize("text", ["k4t,v4t", "k2t,v2t,sink32,recent70", "k2c64,v2c64"])
def test_nothing_else_reaches_a_result(text):
    """Neither poison where no token is, nor the order in which threads run and copies arrive."""
    (q, clean), (_, poisoned) = example(text), example(text, poison=True)
    for seed in range(3):
        for actual, right in zip(attend(q, poisoned, seed=seed), attend(q, clean), strict=True):
            np.testing.assert_array_equal(actual, right)


@pytest.mark.parametrize(("text", "ratio"), [("k4t,v4t,sink4,recent20", 4), ("k2t,v2t", 16)])
def test_a_bad_page_spoils_its_row(text, ratio):
    q, cache = example(text, ratio=ratio)
    right, _ = attend(q, cache)
    table = np.array(cache.page_table)
    table[4, 1] = 1 << 30
    out, lse = attend(q, cache.__class__(**{**vars(cache), "page_table": table}))
    assert np.isnan(out[4]).all()
    assert np.isnan(lse[4]).all()
    np.testing.assert_array_equal(np.delete(out, 4, 0), np.delete(right, 4, 0))


@pytest.mark.parametrize(
    ("text", "ratio"), [("k4t,v4t", 4), ("k2t,v2t,sink32,recent70", 4), ("k2c64,v2c64", 4), ("k2t,v2t", 16)]
)
def test_a_missing_wait_is_noticed(text, ratio):
    q, cache = example(text, ratio=ratio)
    with pytest.raises(AssertionError):
        assert max(errors(attend(q, cache, fault=Fault.EARLY_WAIT), q, cache)) <= BOUND
