"""The Blackwell kernel's own code on emulated CTAs (native/emulator) equals attention over the dequantized cache.

Nothing here needs a GPU; what the emulator does not have (docs/blackwell.md) this does not prove.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
from blackwell import Fault, Problem
from support import relative_l2

from jax_foscar import Quant

BOUND = 1e-3
DIRECTIONS = {  # keys, values; the group where it is not the head
    "token-token": (("token", None), ("token", None)),
    "token-channel": (("token", 32), ("channel", 64)),
    "channel-token": (("channel", 64), ("token", 32)),
    "channel-channel": (("channel", 32), ("channel", 32)),
}
LENGTHS = [0, 1, 63, 64, 127, 128, 129, 300, 384]


def tensors(name, batch, heads, ratio, tokens, dim, num_queries=1, seed=0):
    """A named input: queries, keys and values."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, num_queries, heads * ratio, dim)).astype(np.float32)
    keys = rng.standard_normal((batch, heads, tokens, dim)).astype(np.float32)
    values = rng.standard_normal((batch, heads, tokens, dim)).astype(np.float32)
    if name == "outlier":
        q[:, :, 0] *= 8
        keys[..., 3] *= 60
    elif name == "sink":
        keys[:, :, 0] = 0
        for row, head in np.ndindex(batch, heads):
            mean = q[row, :, head * ratio : (head + 1) * ratio].mean(axis=(0, 1))
            keys[row, head, 0] = mean * (12 * dim**0.5 / (mean @ mean))
        values[:, :, 0] *= 0.02
    elif name == "flat":
        q *= 1e-3
    return q, keys, values


def problem(name, directions, bits=(4, 4), dim=128, ratio=4, lengths=(300, 129), tokens=384, heads=1, **options):
    (key_per, key_group), (value_per, value_group) = DIRECTIONS[directions]
    queries = options.pop("num_queries", 1)
    q, keys, values = tensors(name, len(lengths), heads, ratio, tokens, dim, queries)
    key = Quant(bits[0], per=key_per, group=key_group)
    value = Quant(bits[1], per=value_per, group=value_group)
    return Problem(key, value, q, keys, values, list(lengths), **options)


def assert_right(case, **run):
    (out, lse, _), (expected, expected_lse) = case.run(**run), case.expected()
    assert (np.isneginf(lse) == np.isneginf(expected_lse)).all()
    seen = np.isfinite(expected_lse)
    error = np.abs(lse[seen] - expected_lse[seen]) / np.maximum(np.abs(expected_lse[seen]), 1)
    assert error.max(initial=0) <= BOUND
    assert (out[~seen] == 0).all()
    for actual, right in zip(out[seen], expected[seen], strict=True):  # each query row
        assert relative_l2(actual, right) <= BOUND


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("name", ["randn", "outlier", "sink"])
def test_formats(name, directions, dim):
    for *bits, ratio in itertools.product((2, 4), (2, 4), (4, 8)):
        assert_right(problem(name, directions, tuple(bits), dim, ratio))


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("directions", DIRECTIONS)
def test_flat(directions, bits):
    """Near-uniform attention over zero-mean values cancels most of a sum: a long row, all in one CTA."""
    case = problem("flat", directions, (bits, bits), 128, 4, lengths=[8192], tokens=8192)
    out, _, _ = case.run(blocks=1)
    assert relative_l2(out, case.expected()[0]) <= BOUND


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("directions", DIRECTIONS)
def test_real(directions, bits):
    """SmolLM2's own keys and values, and the queries of its last two tokens."""
    data = np.load(Path(__file__).parent / "data" / "smollm2_kv.npz")
    keys, values = (data[name].astype(np.float32).swapaxes(0, 1)[None] for name in ("k", "v"))
    q = data["q"][-2:].astype(np.float32)[None]
    key, value = (Quant(bits, per=per, group=group) for per, group in DIRECTIONS[directions])
    assert_right(Problem(key, value, q, keys, values, [256]))


@pytest.mark.parametrize("blocks", [2, 4, 14, 40])
@pytest.mark.parametrize("directions", DIRECTIONS)
def test_ragged(directions, blocks):
    """Empty rows, whole tiles and parts of them, however the tiles are cut among CTAs."""
    assert_right(problem("randn", directions, (2, 4), 64, 4, LENGTHS, heads=2), blocks=blocks)


@pytest.mark.parametrize(
    "options",
    [
        {"num_queries": 2},
        {"num_queries": 8, "ratio": 1},
        {"causal": False},
        {"ratio": 3},
        {"page_size": 128},
        {"ratio": 1, "num_queries": 5, "causal": False},
    ],
)
def test_calls(options):
    for directions in ("token-channel", "channel-token"):
        assert_right(problem("randn", directions, (4, 2), lengths=[2, 200, 384], **options))


@pytest.mark.parametrize("seed", range(4))
def test_order_does_not_matter(seed):
    """Warps, copies and products in another order give the same bits."""
    case = problem("randn", "channel-token", (2, 2), lengths=[384, 257])
    np.testing.assert_array_equal(case.run(seed=100 + seed)[0], case.run()[0])


def test_bad_values_reach_the_output():
    """NaN and infinity in a query or a parameter: NaN in that row alone, and not where nobody looks."""
    for directions in DIRECTIONS:
        for where in ("q", "key_params", "value_params", "page_table"):
            for bad in (np.nan, np.inf):
                if where == "key_params" and np.isinf(bad):
                    continue  # an infinite scale can make a logit -inf, which is none
                case = problem("randn", directions, (4, 2), lengths=[200, 200, 200])
                if where == "page_table":
                    case.arrays[where][1, 1] = -5 if np.isnan(bad) else 1 << 30
                elif where == "q":
                    case.arrays[where][1, 0, 2, 5] = bad
                else:
                    page = case.arrays["page_table"][1, 1]
                    case.arrays[where][page, 0, 0] = bad
                good, _, _ = problem("randn", directions, (4, 2), lengths=[200, 200, 200]).run()
                out, _, _ = case.run()
                spoiled = ~np.isfinite(out)
                assert spoiled[1, 0, 2].any(), (directions, where)
                np.testing.assert_array_equal(out[[0, 2]], good[[0, 2]])
                if where == "q":
                    assert np.isnan(out[1, 0, 2]).all()
                    np.testing.assert_array_equal(out[1, 0, [0, 1, 3]], good[1, 0, [0, 1, 3]])


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault != Fault.NONE])
def test_faults_are_noticed(fault):
    """Each way to break the kernel fails or gives a wrong result."""
    case = problem("randn", "token-token", (4, 4), lengths=[384])
    try:
        out, _, _ = case.run(blocks=1, fault=fault)
    except RuntimeError:  # the emulator noticed it itself
        return
    assert not relative_l2(np.nan_to_num(out, nan=1e3), case.expected()[0]) <= 10 * BOUND
