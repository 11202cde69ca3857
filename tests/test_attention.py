"""Every implementation agrees with float64 attention over the same codes; nothing else in memory reaches a result."""

import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from support import IMPLEMENTATIONS, KERNELS, Rows, check_attention, make_cache, on, queries, random_rows

from jax_foscar import KVFormat, decode_attention, merge_states

attend = jax.jit(functools.partial(decode_attention, return_residual=True), static_argnames=("scale", "implementation"))
ON_GPU = jax.default_backend() == "gpu"
FORMATS = ["k4t32,v4t", "k2c32,v4t64", "k4t64,v2c32,sink4,recent20", "k16,v4c64"]

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
formats = pytest.mark.parametrize("text", FORMATS)


def edge_lengths(fmt):
    """Around nothing, a group and a page, and one of several pages."""
    group, page = (fmt.token_group if fmt.token_group > 1 else 32), fmt.page_size
    return (0, 1, group - 1, group, group + 1, page - 1, page, page + 1, 200)


# --- Every format, head dim, group of heads, number of queries, dtype -------------------------------------------------

FACTORS = {
    "key": support.QUANTS,
    "value": support.QUANTS,
    "dim": support.HEAD_DIMS,
    "value_dim": support.HEAD_DIMS,
    "heads_per_kv": (1, 3, 4, 7, 16),
    "queries": (1, 3, 8),
    "dtype": support.DTYPES,
    "params": ("float16", "float32"),
    "page": (64, 128),
    "windows": ((0, 0), (4, 20)),
}


def allowed(case):
    """Whether the groups divide the head dims."""
    return all(
        q.per == "channel" or case[dim] % q.group_size(case[dim]) == 0
        for q, dim in ((case["key"], "dim"), (case["value"], "value_dim"))
    )


def case_id(case):
    return "-".join("x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in case.values())


PAIRS = support.pairwise(FACTORS, allowed)
SINGLES = support.pairwise(FACTORS, allowed, strength=1)


def check_case(case, implementation):
    """One case, with ragged lengths at all edges, against the reference."""
    sink, recent = case["windows"]
    fmt = KVFormat(case["key"], case["value"], page_size=case["page"], sink_tokens=sink, recent_tokens=recent,
                   param_dtype=case["params"])  # fmt: skip
    lengths = edge_lengths(fmt)
    rows = random_rows(lengths, dim=case["dim"], value_dim=case["value_dim"])
    q = (len(lengths), case["queries"], 2 * case["heads_per_kv"], case["dim"])
    with on(implementation):
        cache, q = make_cache(fmt, rows, capacity=256), queries(q, case["dtype"])
        check_attention(attend(q, cache, implementation=implementation), q, cache, implementation)


@pytest.mark.parametrize("case", PAIRS, ids=case_id)
@pytest.mark.parametrize("implementation", KERNELS)
def test_kernels_in_all_pairs_of_options(implementation, case):
    """Any two options stand together in some case: each K and V format meets each head dim and each other."""
    check_case(case, implementation)


@pytest.mark.parametrize("case", SINGLES, ids=case_id)
def test_xla_in_all_options(case):
    """Every option stands in some case (compiling plain jnp is slow; the kernels go through all pairs)."""
    check_case(case, "xla")


def test_the_design_covers_all_pairs():
    """The pairs that the issue asks for are really there."""
    for quant in support.QUANTS:
        for dim in support.HEAD_DIMS:
            for name, of in (("key", "dim"), ("value", "value_dim")):
                if quant.per == "channel" or dim % quant.group_size(dim) == 0:
                    assert any(c[name] == quant and c[of] == dim for c in PAIRS), (name, str(quant), dim)
        assert {c["value"] for c in PAIRS if c["key"] == quant} == set(support.QUANTS)
    for name, values in FACTORS.items():
        assert {repr(c[name]) for c in SINGLES} == set(map(repr, values))


# --- Inputs with names ------------------------------------------------------------------------------------------------

NAMED_FORMATS = ["k4t,v4t", "k2c64,v2t64", "k4c32,v4c64", "k2t32,v2c32"]


def named_input(name):
    """(q [B, N, D], rows) of DESIGN section 7, 2 rows of 2 KV heads with 4 query heads each."""
    rng = np.random.default_rng(7)
    lengths, dim = (1500, 777), 128
    k, v = (rng.standard_normal((2, 1, 2, 1500, dim)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((2, 8, dim)).astype(np.float32)
    if name == "outlier":
        q[:, 5] *= 8
        k[..., 17] *= 60
    elif name == "sink":
        q = np.repeat(q[:, ::4], 4, axis=1) + 0.2 * q  # the heads that share a KV head look alike
        direction = q[:, ::4] / np.square(q[:, ::4]).sum(-1, keepdims=True)
        k[:, 0, :, 0] = 12 * math.sqrt(dim) * direction
        v *= 0.02
    else:
        assert name == "randn"
    return q, Rows(k, v, lengths)


@implementations
@pytest.mark.parametrize("text", NAMED_FORMATS)
@pytest.mark.parametrize("name", ["randn", "outlier", "sink"])
def test_named_inputs(name, text, implementation):
    q, rows = named_input(name)
    with on(implementation):
        cache, q = make_cache(KVFormat.parse(text), rows, capacity=1536), jnp.asarray(q)
        check_attention(attend(q, cache, implementation=implementation), q, cache, implementation)


@implementations
@pytest.mark.parametrize("text", NAMED_FORMATS)
@pytest.mark.parametrize(
    "tokens",
    [8192, pytest.param(131072, marks=pytest.mark.skipif(not ON_GPU, reason="128K tokens: only where there is a GPU"))],
)
def test_flat(tokens, text, implementation):
    """Near-uniform attention over zero-mean V: positive codes add up, and the offset takes nearly all of it away."""
    rng = np.random.default_rng(3)
    k, v = (rng.standard_normal((1, 1, 1, tokens, 128)).astype(np.float32) for _ in range(2))
    v -= v.mean(axis=3, keepdims=True)
    with on(implementation):
        cache = make_cache(KVFormat.parse(text), Rows(k, v, (tokens,)), capacity=tokens)
        q = jnp.asarray(0.02 * rng.standard_normal((1, 4, 128)), jnp.float32)
        check_attention(attend(q, cache, implementation=implementation), q, cache, implementation)


@implementations
@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("text", ["k4t,v4t", "k2c32,v2t,sink4,recent20"])
def test_one_long_row_among_short_ones(text, num_queries, implementation):
    """A GPU shares a long row out to many workers and merges their parts in other ways than those of few."""
    lengths = (1, 64, 0, 300, 4090, *range(120, 132))
    with on(implementation):
        cache = make_cache(KVFormat.parse(text), random_rows(lengths, heads=1, dim=64), capacity=4096)
        q = queries((len(lengths), num_queries, 16, 64))
        check_attention(attend(q, cache, implementation=implementation), q, cache, implementation)


@implementations
@pytest.mark.parametrize("heads", [4, 8])
@pytest.mark.parametrize(
    ("text", "dim"),
    [(text, 128) for text in ("k4t,v4t", "k2t,v2t", "k4t64,v4t64", "k2t64,v2t64,recent20", "k4c64,v4t64", "k2c64,v2t64",
                              "k4t32,v2c32,sink4")]
    + [("k4t,v2t,sink4,recent20", 256), ("k2t32,v2c64", 64)],
)  # fmt: skip
def test_many_query_heads(text, dim, heads, implementation):
    """Eight and sixteen query rows a KV head: a GPU has kernels of their own for some formats, and teams of warps."""
    lengths = (0, 1, 63, 200, 130)
    with on(implementation):
        cache = make_cache(KVFormat.parse(text), random_rows(lengths, heads=1, dim=dim), capacity=256)
        q = queries((len(lengths), 2, heads, dim))
        check_attention(attend(q, cache, implementation=implementation), q, cache, implementation)


REAL = Path(__file__).parent / "data" / "smollm2_kv.npz"


@implementations
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("text", ["k4c64,v4t64", "k2c32,v2t32"])
def test_real_keys_and_values(text, dtype, implementation):
    """SmolLM2's own keys, values and queries: their middle carries attention, which random data does not show."""
    data = np.load(REAL)
    k, v = (data[name].astype(np.float32).swapaxes(0, 1)[None, None] for name in ("k", "v"))
    q = data["q"].astype(np.float32).reshape(-1, 9, 64)[-8:][None]  # the last 8 positions' queries
    with on(implementation):
        cache, q = make_cache(KVFormat.parse(text), Rows(k, v, (256,)), capacity=256), jnp.asarray(q, dtype)
        check_attention(attend(q, cache, implementation=implementation), q, cache, implementation)


# --- Nothing else reaches a result ------------------------------------------------------------------------------------


def example(text, *, lengths=None, queries_per_row=3, seed=0, **options):
    """A ragged cache of the format and queries for it."""
    fmt = KVFormat.parse(text)
    rows = random_rows(lengths or edge_lengths(fmt), seed=seed)
    cache = make_cache(fmt, rows, capacity=256, **options)
    return queries((len(rows.lengths), queries_per_row, 6, 64)), cache, rows


@implementations
@formats
def test_poison_changes_no_bit(text, implementation):
    """NaN in bytes, params and exact slots that hold no token, and absurd ids in unused table entries."""
    with on(implementation):
        q, clean, _ = example(text)
        _, poisoned, _ = example(text, poison=True)
        _, other_junk, _ = example(text, seed=0)
        expected = attend(q, clean, implementation=implementation)
        assert np.isfinite(np.asarray(expected[0])).all()
        support.assert_same_bits(attend(q, poisoned, implementation=implementation), expected)
        support.assert_same_bits(attend(q, other_junk, implementation=implementation), expected)


@implementations
@formats
def test_a_row_does_not_see_its_neighbours(text, implementation):
    """NaN throughout one row, its queries and its tokens, changes no bit of the others."""
    with on(implementation):
        q, cache, _ = example(text)
        expected = attend(q, cache, implementation=implementation)
        bad = 4

        def spoil(x):
            return x.at[bad].set(255 if x.dtype == jnp.uint8 else jnp.nan)

        spoilt = dataclasses.replace(
            cache,
            **{
                name: jax.tree.map(spoil, getattr(cache, name)) for name in ("key", "value", "exact_key", "exact_value")
            },
        )
        out, lse = attend(q.at[bad].set(jnp.nan), spoilt, implementation=implementation)
        assert np.isnan(np.asarray(out[bad])).all()
        assert np.isnan(np.asarray(lse[bad])).all()
        others = np.arange(len(q)) != bad
        support.assert_same_bits((out[others], lse[others]), tuple(x[others] for x in expected))


@implementations
@formats
def test_a_row_alone_equals_the_row_in_a_batch(text, implementation):
    with on(implementation):
        q, cache, rows = example(text)
        out, lse = attend(q, cache, implementation=implementation)
        for row in (4, 8):
            alone = Rows(rows.k[row : row + 1], rows.v[row : row + 1], rows.lengths[row : row + 1])
            single = make_cache(cache.format, alone, capacity=256, seed=row)
            actual = attend(q[row : row + 1], single, implementation=implementation)
            if support.bitwise(implementation):
                support.assert_same_bits(actual, (out[row : row + 1], lse[row : row + 1]))
            else:
                check_attention(actual, q[row : row + 1], single, implementation)


@implementations
def test_a_shared_pool_equals_pools_of_their_own(implementation):
    """Where pages lie does not matter, neither within a pool nor in which pool."""
    with on(implementation):
        for pools in (1, 3):
            q, own, _ = example("k4c32,v4t")
            _, shared, _ = example("k4c32,v4t", pools=pools)
            assert shared.key.codes.shape[0] == pools
            actual, expected = (attend(q, c, implementation=implementation) for c in (shared, own))
            if support.bitwise(implementation):
                support.assert_same_bits(actual, expected)
            check_attention(actual, q, shared, implementation)


@implementations
@formats
def test_the_same_call_gives_the_same_bits(text, implementation):
    with on(implementation):
        q, cache, _ = example(text)
        first = attend(q, cache, implementation=implementation)
        for _ in range(3):
            support.assert_same_bits(attend(q, cache, implementation=implementation), first)


# --- What is not right gives NaN where it is not right ----------------------------------------------------------------


@implementations
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("text", FORMATS[:2])
def test_a_query_that_is_not_finite(text, bad, implementation):
    """It gives NaN, output and log-sum-exp, even in a row without tokens; other heads and queries keep their bits."""
    with on(implementation):
        q, cache, _ = example(text)
        expected = attend(q, cache, implementation=implementation)
        hit = np.zeros(q.shape[:3], bool)
        hit[8, 1, 4] = hit[0, 0, 0] = hit[7, 2, 5] = True
        dirty = jnp.where(jnp.asarray(hit)[..., None] & (jnp.arange(64) == 33), bad, q)
        out, lse = (np.asarray(x) for x in attend(dirty, cache, implementation=implementation))
        assert np.isnan(out[hit]).all()
        assert np.isnan(lse[hit]).all()
        support.assert_same_bits((out[~hit], lse[~hit]), tuple(np.asarray(x)[~hit] for x in expected))


@implementations
@pytest.mark.parametrize("text", FORMATS[:3])
def test_rows_that_cannot_be_read(text, implementation):
    """A row past its capacity or with a bad page id in use is NaN, with a bad layer all are; no neighbour changes."""
    with on(implementation):
        q, cache, _ = example(text)
        expected = attend(q, cache, implementation=implementation)
        pages = cache.key.codes.shape[2]
        broken = dataclasses.replace(
            cache,
            length=cache.length.at[1].set(257).at[2].set(2**31 - 1),
            page_table=cache.page_table.at[7, 0].set(-1).at[8, 1].set(pages),
        )
        out, lse = (np.asarray(x) for x in attend(q, broken, implementation=implementation))
        bad = np.isin(np.arange(9), (1, 2, 7, 8))
        assert np.isnan(out[bad]).all()
        assert np.isnan(lse[bad]).all()
        support.assert_same_bits((out[~bad], lse[~bad]), tuple(np.asarray(x)[~bad] for x in expected))
        for layer in (-1, 1, 2**31 - 1):
            out, lse = attend(q, cache, layer=jnp.int32(layer), implementation=implementation)
            assert np.isnan(np.asarray(out)).all()
            assert np.isnan(np.asarray(lse)).all()


@implementations
@pytest.mark.parametrize("text", ["k2t,v2t", "k4t32,v4t32", "k4c32,v4c32"])
def test_negative_scales(text, implementation):
    """The quantizer makes none, a converter might: right, or NaN where the tensor-core kernel has no such weights."""
    with on(implementation):
        q, cache, _ = example(text)
        for name in ("key", "value"):
            pages = getattr(cache, name)
            negated = dataclasses.replace(pages, params=pages.params.at[..., 0].multiply(-1))
            turned = dataclasses.replace(cache, **{name: negated})
            out, lse = attend(q, turned, implementation=implementation)
            if name == "value" and "c" not in text and implementation == "cuda" and np.isnan(np.asarray(out)).any():
                seen = np.isfinite(np.asarray(lse))
                assert np.isnan(np.asarray(out)[seen]).all()
                np.testing.assert_array_equal(np.asarray(out)[~seen], 0)
            else:
                check_attention((out, lse), q, turned, implementation)


@implementations
@pytest.mark.parametrize("text", ["k4t32,v4t32", "k4c32,v4c32"])
def test_tokens_that_are_not_finite(text, implementation):
    """NaN parameters that a query sees make its row and KV head NaN (keys) or just their channels (values)."""
    with on(implementation):
        q, cache, _ = example(text)
        spoilt = [
            dataclasses.replace(cache, **{name: dataclasses.replace(pages, params=pages.params.at[at].set(jnp.nan))})
            for name, pages, at in (
                ("key", cache.key, (8, 0, cache.page_table[8, 0], 1, 1, 3 if "c" in text else 1)),
                ("value", cache.value, (8, 0, cache.page_table[8, 0], 1, 1, 3 if "c" in text else 1)),
            )
        ]
        for bad in spoilt:
            check_attention(attend(q, bad, implementation=implementation), q, bad, implementation)
        out = np.asarray(attend(q, spoilt[0], implementation=implementation)[0])
        assert np.isnan(out[8, :, 3:]).all()
        assert np.isfinite(out[8, :, :3]).all()
        out = np.isnan(np.asarray(attend(q, spoilt[1], implementation=implementation)[0]))
        assert out[8, :, 3:].sum() == 3 * 3 * (1 if "c" in text else 32)
        assert out.sum() == out[8, :, 3:].sum()


@implementations
def test_no_tokens(implementation):
    """A query before the first token gives 0 and -inf, not NaN."""
    with on(implementation):
        q, cache, _ = example(FORMATS[1])
        out, lse = (np.asarray(x) for x in attend(q, cache, implementation=implementation))
        assert (out[0] == 0).all()
        assert np.isneginf(lse[0]).all()
        # One token, three queries: the first two come before it, and the last one returns its value.
        assert (out[1, :2] == 0).all()
        assert np.isneginf(lse[1, :2]).all()
        assert np.isfinite(lse[1, 2]).all()
        assert (out[1, 2] != 0).all()


# --- Queries, layers, scales ------------------------------------------------------------------------------------------

write = jax.jit(lambda cache, k, v: cache.advance(k.shape[1]).write(k, v, layer=0))


@implementations
@pytest.mark.parametrize("text", ["k4t32,v4t", "k4c32,v2t,sink4,recent20"])
def test_many_queries_equal_single_steps(text, implementation):
    """Eight tokens at once, across the end of a group, give what eight steps of one give, and leave the same cache."""
    with on(implementation):
        _, cache, _ = example(text, lengths=(0, 1, 25, 30, 31, 50, 60, 120, 200))
        new = random_rows((8,) * 9, seed=5)
        k, v = (jnp.asarray(x[:, 0].swapaxes(1, 2)) for x in (new.k, new.v))
        q = queries((9, 8, 6, 64))
        at_once = write(cache, k, v)
        out, lse = attend(q, at_once, implementation=implementation)
        check_attention((out, lse), q, at_once, implementation)
        stepped, steps = cache, []
        for j in range(8):
            stepped = write(stepped, k[:, j : j + 1], v[:, j : j + 1])
            steps.append(attend(q[:, j : j + 1], stepped, implementation=implementation))
        support.assert_same_bits(stepped.dequantize(), at_once.dequantize())
        np.testing.assert_allclose(out, np.concatenate([o for o, _ in steps], 1), rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(lse, np.concatenate([s for _, s in steps], 1), rtol=1e-5, atol=2e-6)


@implementations
def test_more_queries_than_the_ring_holds(implementation):
    """Prefill through this function: queries further back than the ring read quantized tokens instead."""
    with on(implementation):
        q, cache, _ = example("k4c32,v4t,sink4", lengths=(100, 200, 37), queries_per_row=100)
        check_attention(attend(q, cache, implementation=implementation), q, cache, implementation)


@implementations
def test_rank_three_is_one_query(implementation):
    with on(implementation):
        q, cache, _ = example(FORMATS[2], queries_per_row=1)
        out, lse = attend(q, cache, implementation=implementation)
        support.assert_same_bits(attend(q[:, 0], cache, implementation=implementation), (out[:, 0], lse[:, 0]))
        without_residual = jax.jit(functools.partial(decode_attention, implementation=implementation))(q[:, 0], cache)
        np.testing.assert_allclose(without_residual, out[:, 0], rtol=1e-6, atol=1e-6)


@implementations
@pytest.mark.parametrize("text", ["k4c32,v4t", "k16,v16"])
def test_layers(text, implementation):
    """``layer``, an int or traced, picks that layer's tokens in pages and exact arrays."""
    with on(implementation):
        cache = make_cache(KVFormat.parse(text), random_rows((70, 200), layers=3), capacity=256)
        q = queries((2, 6, 64))
        for layer in range(3):
            actual = attend(q, cache, layer=layer, implementation=implementation)
            check_attention(actual, q, cache, implementation, layer=layer)
        static = jax.jit(
            functools.partial(decode_attention, layer=2, return_residual=True, implementation=implementation)
        )
        for x, y in zip(static(q, cache), actual, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


@implementations
def test_scale(implementation):
    """``scale`` replaces ``1 / sqrt(D)``, which is of the key's head dim."""
    with on(implementation):
        rows = random_rows((70, 200), dim=96, value_dim=64)
        cache, q = make_cache(KVFormat.parse("k4t,v4t"), rows, capacity=256), queries((2, 6, 96))
        for scale in (0.02, 1, np.float32(0.3)):
            actual = attend(q, cache, scale=scale, implementation=implementation)
            check_attention(actual, q, cache, implementation, scale=scale)
        default, explicit = (attend(q, cache, scale=s, implementation=implementation) for s in (None, 96**-0.5))
        support.assert_same_bits(default, explicit)


@implementations
@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e10, 1e30])
@pytest.mark.parametrize("text", ["k4t32,v4t,f32", "k2c32,v4c32,f32"])
def test_float32_params_of_any_size(text, size, implementation):
    """Keys of any size against queries of the inverse size, values of any size."""
    with on(implementation):
        fmt = KVFormat.parse(text)
        rows = random_rows((64, 96, 200))
        rows = Rows(rows.k * np.float32(size), rows.v * np.float32(size), rows.lengths)
        cache, q = make_cache(fmt, rows, capacity=256), queries((3, 1, 6, 64)) / np.float32(size)
        out, lse = attend(q, cache, implementation=implementation)
        assert np.isfinite(np.asarray(out)).all()
        check_attention((out, lse), q, cache, implementation)


@pytest.mark.parametrize("kernel", KERNELS)
def test_none_takes_the_platforms_kernel(kernel):
    with on(kernel):
        q, cache, _ = example(FORMATS[0])
        support.assert_same_bits(attend(q, cache), attend(q, cache, implementation=kernel))


# --- merge_states -----------------------------------------------------------------------------------------------------


@implementations
@pytest.mark.parametrize("dtype", support.DTYPES)
def test_merged_halves_equal_the_whole(dtype, implementation):
    """Two caches with the halves of the tokens (one empty in a row), merged, give attention over all of them."""
    with on(implementation):
        fmt, rows = KVFormat.parse("k4t32,v4t"), random_rows((200, 150, 64, 0))
        first = Rows(rows.k[..., :64, :], rows.v[..., :64, :], (64, 64, 64, 0))
        rest = Rows(rows.k[..., 64:, :], rows.v[..., 64:, :], (136, 86, 0, 0))
        whole, *halves = (make_cache(fmt, r, capacity=256) for r in (rows, first, rest))
        q = queries((4, 6, 64), dtype)
        out, lse = merge_states([attend(q, half, implementation=implementation) for half in halves])
        assert out.dtype == q.dtype
        (expected, expected_lse), eps = support.attention(q, whole), float(jnp.finfo(dtype).eps)
        floor = support.TOLERANCES[implementation].floor
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=4 * eps, atol=8 * eps + floor)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=2e-6 + floor)


def test_merging():
    """One state comes back; order does not matter; a part without tokens adds nothing, even if its output is NaN."""
    rng = np.random.default_rng(0)
    draw = lambda size, shape: jnp.asarray(rng.normal(0, size, shape), jnp.float32)  # noqa: E731
    states = [(draw(1, (2, 3, 8)), draw(30, (2, 3))) for _ in range(3)]
    out, lse = merge_states(states)
    weights = np.exp(np.stack([s for _, s in states]).astype(np.float64) - np.asarray(lse, np.float64))
    np.testing.assert_allclose(weights.sum(0), 1, rtol=1e-5)
    np.testing.assert_allclose(
        out, sum(w[..., None] * np.asarray(o) for w, (o, _) in zip(weights, states, strict=True)), rtol=1e-4, atol=1e-6
    )
    for actual, expected in zip(merge_states(states[::-1]), (out, lse), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    alone = merge_states(iter(states[:1]))
    np.testing.assert_allclose(alone[0], states[0][0], rtol=1e-6)
    np.testing.assert_allclose(alone[1], states[0][1], rtol=1e-6)
    nothing = (jnp.full((2, 3, 8), jnp.nan), jnp.full((2, 3), -jnp.inf))
    for actual, expected in zip(merge_states([*states, nothing]), (out, lse), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    out, lse = merge_states([nothing, nothing])
    assert (np.asarray(out) == 0).all()
    assert np.isneginf(np.asarray(lse)).all()
