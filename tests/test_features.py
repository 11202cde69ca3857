"""Windows, soft cap, sinks, ragged queries, draft trees: against float64 in all pairs, at their edges, transformed."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from jax.sharding import PartitionSpec
from support import IMPLEMENTATIONS, KERNELS, check_attention, make_cache, on, queries, random_rows

import jax_foscar
from jax_foscar import KVFormat, decode_attention, merge_states

STATIC = ("scale", "is_causal", "local_window_size", "logits_soft_cap", "implementation")
attend = jax.jit(functools.partial(decode_attention, return_residual=True), static_argnames=STATIC)
FORMATS = ["k4t32,v4t", "k2c32,v4t64", "k4t64,v2c32,sink4,recent20", "k16,v4c64", "k4c32,v16,sink70,recent8"]
LENGTHS = (0, 1, 5, 31, 64, 65, 127, 190, 200)

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
kernels = pytest.mark.parametrize("kernel", KERNELS)


@functools.cache
def example(text, num_queries=3, heads=8, dtype="float32", lengths=LENGTHS):
    """``(q [B, T, heads, 64], cache)`` with ragged lengths and NaN wherever no token is."""
    cache = make_cache(KVFormat.parse(text), random_rows(lengths), capacity=256, poison=True)
    return queries((len(lengths), num_queries, heads, 64), dtype), cache


def random_tree(rng, size):
    """``[size, size]``: draft j sees itself and the path to it, through parents that come before it."""
    mask = np.eye(size, dtype=bool)
    for j in range(1, size):
        if (parent := rng.integers(-1, j)) >= 0:
            mask[j] |= mask[parent]
    return mask


def poison_unseen(q, cache, options):
    """NaN in padding queries, and absurd ids for the pages before every query's window."""
    count = np.full(q.shape[0], q.shape[1])
    if (given := options.get("query_lengths")) is not None:
        count = np.clip(given, 0, q.shape[1])
        q = jnp.where((jnp.arange(q.shape[1]) < count[:, None])[..., None, None], q, jnp.nan)
    if (window := options.get("local_window_size")) is not None:
        first = np.where(count == 0, np.asarray(cache.length), np.asarray(cache.length) - count - window[0])
        outside = (np.arange(cache.page_table.shape[1]) + 1) * cache.format.page_size <= first[:, None]
        absurd = jnp.where(jnp.arange(outside.shape[1]) % 2 == 0, -(2**31), 2**31 - 1)
        cache = dataclasses.replace(cache, page_table=jnp.where(outside, absurd, cache.page_table).astype(jnp.int32))
    return q, cache


# --- Every pair of features, each where nothing unseen may be read ----------------------------------------------------

FACTORS = {
    "format": FORMATS,
    "queries": (1, 3, 8, 70),
    "heads": (2, 8),
    "dtype": ("float32", "bfloat16"),
    "causal": (True, False),
    "window": (None, (0, 0), (7, 0), (70, 2), (3, 150), (150, 0)),
    "cap": (None, 0.7, 30.0),
    "sinks": (None, "float32", "bfloat16"),
    "ragged": (False, True),
    "tree": (None, "each", "shared"),
}


def allowed(case):
    return case["causal"] or case["tree"] is None


def case_id(case):
    return "-".join(str(value).replace(" ", "") for value in case.values())


def check_case(case, implementation):
    rng = np.random.default_rng(len(case_id(case)))
    num_queries, options = case["queries"], {"is_causal": case["causal"], "logits_soft_cap": case["cap"]}
    options["local_window_size"] = case["window"]
    with on(implementation):
        q, cache = example(case["format"], num_queries, case["heads"], case["dtype"])
        if case["sinks"]:
            options["sinks"] = jnp.asarray(rng.normal(0, 2, case["heads"]), case["sinks"])
        if case["ragged"]:
            options["query_lengths"] = rng.permutation(np.linspace(-1, num_queries + 1, len(q)).astype(np.int32))
        if case["tree"]:
            trees = [random_tree(rng, num_queries) for _ in range(len(q))]
            options["tree_mask"] = np.stack(trees) if case["tree"] == "each" else trees[0]
        q, cache = poison_unseen(q, cache, options)
        check_attention(attend(q, cache, implementation=implementation, **options), q, cache, implementation, **options)


@pytest.mark.parametrize("case", support.pairwise(FACTORS, allowed), ids=case_id)
@kernels
def test_kernels_in_all_pairs(kernel, case):
    """Any two features stand together in some case, at ragged lengths, with more queries than tokens among them."""
    check_case(case, kernel)


@pytest.mark.parametrize("case", support.pairwise(FACTORS, allowed, strength=1), ids=case_id)
def test_xla_in_all_features(case):
    check_case(case, "xla")


# --- Windows ----------------------------------------------------------------------------------------------------------


@implementations
def test_a_window_of_w_tokens(implementation):
    """``(W - 1, 0)`` is attention over the newest W tokens alone (Hugging Face's sliding_window=W)."""
    with on(implementation):
        rows = random_rows((200, 77))
        q, cache = queries((2, 4, 64)), make_cache(KVFormat.parse("k4t32,v4t"), rows, capacity=256)
        newest = np.asarray(rows.lengths)[:, None] - 10 + np.arange(10)
        cut = lambda x: np.take_along_axis(x, newest[:, None, None, :, None], 3)  # noqa: E731
        short = make_cache(cache.format, support.Rows(cut(rows.k), cut(rows.v), (10, 10)), capacity=64)
        actual = attend(q, cache, local_window_size=(9, 0), implementation=implementation)
        # The tensor-core kernel rounds weights by the maximum of their tile, and the tiles are others.
        tolerance = 1e-3 if implementation == "cuda" else 1e-5
        for x, y in zip(actual, attend(q, short, implementation=implementation), strict=True):
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@implementations
def test_windows_in_other_words(implementation):
    """An int is both sides; ``right`` does not count where the rule is causal; one too large to count is no limit."""
    with on(implementation):
        q, cache = example(FORMATS[2])
        call = functools.partial(attend, q, cache, implementation=implementation)
        support.assert_same_bits(
            call(local_window_size=20, is_causal=False), call(local_window_size=(20, 20), is_causal=False)
        )
        support.assert_same_bits(call(local_window_size=20), call(local_window_size=(20, 0)))
        support.assert_same_bits(call(local_window_size=2**40), call())


@implementations
@pytest.mark.parametrize("text", [FORMATS[1], FORMATS[4]])
def test_bad_pages_matter_only_inside_a_window(text, implementation):
    with on(implementation):
        q, cache = example(text)
        call = functools.partial(attend, q, implementation=implementation)
        window = (60, 0)
        clean = call(cache, local_window_size=window)
        bad = dataclasses.replace(cache, page_table=cache.page_table.at[8, 0].set(-1).at[7, 2].set(2**31 - 1))
        out, lse = call(bad, local_window_size=window)
        assert np.isnan(np.asarray(out[7])).all()
        assert np.isnan(np.asarray(lse[7])).all()
        others = np.arange(len(q)) != 7
        support.assert_same_bits((out[others], lse[others]), tuple(x[others] for x in clean))
        if "sink70" not in text:  # its first page holds nothing but sinks
            assert np.isnan(np.asarray(call(bad)[0][8])).all()


@implementations
def test_a_window_hides_sink_tokens(implementation):
    """The format's sinks are exact tokens, no more: NaN in them does not matter outside the window."""
    with on(implementation):
        q, cache = example(FORMATS[2], lengths=(200, 100))
        spoilt = dataclasses.replace(
            cache, exact_key=cache.exact_key.at[..., :4, :].set(jnp.nan), exact_value=cache.exact_value * jnp.nan
        )
        spoilt = dataclasses.replace(spoilt, exact_value=cache.exact_value.at[..., :4, :].set(jnp.nan))
        call = functools.partial(attend, q, implementation=implementation)
        assert np.isnan(np.asarray(call(spoilt)[0])).all()
        window = {"local_window_size": (90, 0)}
        support.assert_same_bits(call(spoilt, **window), call(cache, **window))


# --- Sinks ------------------------------------------------------------------------------------------------------------


@implementations
def test_sinks_are_one_more_part(implementation):
    """Merging with a part of output 0 and the sink as its log-sum-exp gives the same; -inf is no sink, to the bit."""
    with on(implementation):
        q, cache = example(FORMATS[2])
        sinks = jnp.linspace(-3, 8, 8)
        plain = attend(q, cache, implementation=implementation)
        actual = attend(q, cache, sinks=sinks, implementation=implementation)
        part = (jnp.zeros_like(plain[0]), jnp.broadcast_to(sinks, plain[1].shape))
        for x, y in zip(actual, merge_states([plain, part]), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        support.assert_same_bits(attend(q, cache, sinks=jnp.full(8, -jnp.inf), implementation=implementation), plain)


@implementations
def test_a_row_of_sinks_alone(implementation):
    """Where no token is seen the output is 0 and the log-sum-exp the sink; a padding query has none."""
    with on(implementation):
        q, cache = example(FORMATS[0])
        sinks = jnp.linspace(-3, 8, 8)
        lengths = np.full(len(q), 3).astype(np.int32)
        lengths[0] = 2
        out, lse = attend(q, cache, sinks=sinks, query_lengths=lengths, implementation=implementation)
        assert (np.asarray(out[0]) == 0).all()
        np.testing.assert_allclose(lse[0, :2], np.broadcast_to(sinks, (2, 8)), rtol=1e-6)
        assert np.isneginf(np.asarray(lse[0, 2])).all()


@implementations
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_sink_that_is_not_finite(bad, implementation):
    """It makes its head NaN and no other, in rows without tokens, too."""
    with on(implementation):
        q, cache = example(FORMATS[0])
        sinks = jnp.linspace(-3, 8, 8)
        clean = attend(q, cache, sinks=sinks, implementation=implementation)
        out, lse = attend(q, cache, sinks=sinks.at[5].set(bad), implementation=implementation)
        assert np.isnan(np.asarray(out[:, :, 5])).all()
        assert np.isnan(np.asarray(lse[:, :, 5])).all()
        others = np.arange(8) != 5
        support.assert_same_bits((out[:, :, others], lse[..., others]), (clean[0][:, :, others], clean[1][..., others]))


# --- Soft cap, causality ----------------------------------------------------------------------------------------------


@implementations
def test_a_soft_cap_bounds_the_logits(implementation):
    """Keys of 1e30 give logits of at most the cap; a cap far above the logits changes nothing that shows."""
    with on(implementation):
        fmt, rows = KVFormat.parse("k4t32,v4t,f32"), random_rows((64, 96, 200))
        big = make_cache(fmt, support.Rows(rows.k * np.float32(1e30), rows.v, rows.lengths), capacity=256)
        q = queries((3, 1, 6, 64))
        out, lse = attend(q, big, logits_soft_cap=5.0, implementation=implementation)
        check_attention((out, lse), q, big, implementation, logits_soft_cap=5.0)
        assert (np.asarray(lse)[:, 0] <= 5 + np.log(rows.lengths)[:, None] + 1e-5).all()
        cache = make_cache(fmt, rows, capacity=256)
        capped = attend(q, cache, logits_soft_cap=1e4, implementation=implementation)
        for x, y in zip(capped, attend(q, cache, implementation=implementation), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)


@implementations
def test_all_queries_see_all_tokens(implementation):
    """Without the causal rule equal queries get equal results, those of the last; one query a row is causal anyway."""
    with on(implementation):
        q, cache = example(FORMATS[2])
        same = jnp.broadcast_to(q[:, :1], q.shape)
        out, lse = attend(same, cache, is_causal=False, implementation=implementation)
        last = attend(same, cache, implementation=implementation)
        for x, y in zip((out, lse), last, strict=True):
            np.testing.assert_allclose(x, jnp.broadcast_to(y[:, -1:], x.shape), rtol=1e-6, atol=1e-6)
        one = functools.partial(decode_attention, cache=cache)
        programs = [jax.make_jaxpr(functools.partial(one, is_causal=causal))(q[:, 0]) for causal in (True, False)]
        assert str(programs[0]) == str(programs[1])


# --- Ragged queries ---------------------------------------------------------------------------------------------------


@implementations
def test_fewer_queries_equal_a_shorter_call(implementation):
    """Every number of real queries from 0 to T gives what a call with that many gives; the rest is 0 and -inf."""
    with on(implementation):
        q, cache = example(FORMATS[2], num_queries=5, lengths=(190,) * 6)
        counts = np.arange(6, dtype=np.int32)
        dirty = jnp.where((jnp.arange(5) < counts[:, None])[..., None, None], q, jnp.nan)
        out, lse = attend(dirty, cache, query_lengths=counts, implementation=implementation)
        for row, count in enumerate(counts):
            assert (np.asarray(out[row, count:]) == 0).all()
            assert np.isneginf(np.asarray(lse[row, count:])).all()
            if count and (implementation != "xla" or count == 3):  # compiling plain jnp is slow
                short = attend(q[:, :count], cache, implementation=implementation)
                for x, y in zip((out, lse), short, strict=True):
                    np.testing.assert_allclose(x[row, :count], y[row], rtol=1e-5, atol=2e-6)


@implementations
def test_padding_of_a_row_that_cannot_be_read(implementation):
    """It is 0 and -inf as ever; only real queries turn NaN."""
    with on(implementation):
        q, cache = example(FORMATS[0])
        broken = dataclasses.replace(cache, length=cache.length + 1000)
        out, lse = (np.asarray(x) for x in attend(
            q, broken, query_lengths=jnp.ones(len(q), int), sinks=jnp.ones(8), implementation=implementation
        ))  # fmt: skip
        assert np.isnan(out[:, 0]).all()
        assert np.isnan(lse[:, 0]).all()
        assert (out[:, 1:] == 0).all()
        assert np.isneginf(lse[:, 1:]).all()


# --- Draft trees ------------------------------------------------------------------------------------------------------


def few_in_xla(*cases):
    """Cases with each kernel; plain jnp, which is slow to compile, takes the last one."""
    runs = [(*case, name) for name in KERNELS for case in cases]
    return pytest.mark.parametrize(("text", "window", "implementation"), [*runs, (*cases[-1], "xla")])


@few_in_xla(*itertools.product(FORMATS[:4], [None, (70, 0), (2, 0)]))
def test_a_chain_is_the_causal_rule(text, window, implementation):
    """To the bit, for a mask of each row or one for all; what the mask says of padding does not matter."""
    with on(implementation):
        q, cache = example(text, num_queries=8)
        counts = np.asarray((8, 8, 3, 0, 5, 8, 7, 8, 4), np.int32)
        chain = np.tril(np.ones((9, 8, 8), bool))
        junk = chain ^ (np.arange(8) >= counts[:, None])[:, None] ^ (np.arange(8) >= counts[:, None])[..., None]
        options = {"local_window_size": window, "implementation": implementation}
        expected = attend(q, cache, **options)
        for mask in (chain, chain[0]):
            same(attend(q, cache, tree_mask=mask, **options), expected, implementation)
        expected = attend(q, cache, query_lengths=counts, **options)
        same(attend(q, cache, query_lengths=counts, tree_mask=junk, **options), expected, implementation)


def same(actual, expected, implementation):
    if support.bitwise(implementation) and implementation != "xla":
        support.assert_same_bits(actual, expected)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)


write = jax.jit(lambda cache, k, v: cache.append(k, v))
PARENTS = (-1, 0, 0, 1, 1, 2, 5, 4)


@few_in_xla(*itertools.product(["k4t32,v4t", "k4c32,v2t,sink4,recent20"], [None, (40, 0), (2, 0)]))
def test_paths_through_a_tree_equal_single_steps(text, window, implementation):
    """All drafts at once give each draft what decoding the path to it, token by token, would have given."""
    with on(implementation):
        lengths, size = (3, 77, 130), len(PARENTS)
        context = make_cache(KVFormat.parse(text), random_rows(lengths), capacity=256)
        new = random_rows((size,) * 3, seed=5)
        k, v = (jnp.asarray(x[:, 0].swapaxes(1, 2)) for x in (new.k, new.v))
        q, sinks = queries((3, size, 6, 64)), jnp.linspace(-1, 2, 6)
        options = {"local_window_size": window, "sinks": sinks, "implementation": implementation}
        paths = [[j] for j in range(size)]
        for j in range(size):
            while PARENTS[paths[j][0]] >= 0:
                paths[j].insert(0, PARENTS[paths[j][0]])
        mask = np.array([[i in path for i in range(size)] for path in paths])
        out, lse = attend(q, write(context, k, v), tree_mask=mask, **options)
        for j in (0, 3, 6, 7):
            stepped = context
            for i in paths[j]:
                stepped = write(stepped, k[:, i : i + 1], v[:, i : i + 1])
            expected = attend(q[:, j : j + 1], stepped, **options)
            np.testing.assert_allclose(out[:, j : j + 1], expected[0], rtol=1e-5, atol=2e-6)
            np.testing.assert_allclose(lse[:, j : j + 1], expected[1], rtol=1e-5, atol=2e-6)


@implementations
@pytest.mark.parametrize("text", ["k16,v16", "k16,v16,recent8"])
def test_a_hidden_draft_may_be_anything(text, implementation):
    """NaN as a draft's key and value reaches those that see it, and no other, from pages and from exact slots."""
    with on(implementation):
        rows = random_rows((100, 70))
        for x in (rows.k, rows.v):
            x[0, ..., 98, :] = x[1, ..., 68, :] = np.nan  # the second of three drafts
        cache, q = make_cache(KVFormat.parse(text), rows, capacity=128), queries((2, 3, 4, 64))
        mask = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
        out = np.isnan(np.asarray(attend(q, cache, tree_mask=mask, implementation=implementation)[0]))
        assert out[:, 1].all()
        assert not out[:, 2].any()
        assert not out[:, 0].any()


# --- Transformations --------------------------------------------------------------------------------------------------

NAMES = ("q", "length", "sinks", "query_lengths", "tree_mask")
OPTIONS = {"local_window_size": (50, 0), "logits_soft_cap": 10.0}
SIZE = 3


@functools.cache
def operand_sets():
    """A cache of 4 rows in 2 pools, and ``SIZE`` values of every operand that vmap maps."""
    cache = make_cache(KVFormat.parse("k4c32,v2t32"), random_rows((128,) * 4), capacity=128, pools=2)
    rng = np.random.default_rng(0)
    return cache, {
        "q": queries((SIZE, 4, 4, 4, 64)),
        "length": jnp.asarray(rng.integers(0, 129, (SIZE, 4)), jnp.int32),
        "sinks": jnp.asarray(rng.normal(0, 2, (SIZE, 4)), jnp.float32),
        "query_lengths": jnp.asarray(rng.integers(0, 5, (SIZE, 4)), jnp.int32),
        "tree_mask": jnp.asarray(np.stack([[random_tree(rng, 4) for _ in range(4)] for _ in range(SIZE)])),
    }


def raw_call(kernel, cache, operands):
    cache = dataclasses.replace(cache, length=operands["length"])
    rest = {name: operands[name] for name in NAMES[2:] if name in operands}
    return decode_attention(operands["q"], cache, return_residual=True, implementation=kernel, **OPTIONS, **rest)


def close(actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)


@kernels
def test_vmap_over_every_subset_of_the_operands(kernel):
    """All 31 choices of in_axes, against a loop; a mask for all rows among them."""
    with on(kernel):
        cache, sets = operand_sets()
        one_call = jax.jit(functools.partial(raw_call, kernel))
        for bits in range(1, 2 ** len(NAMES)):
            mapped = {name for bit, name in enumerate(NAMES) if bits >> bit & 1}
            given = dict(sets) if bits % 2 else {**sets, "tree_mask": sets["tree_mask"][:, 0]}
            pick = lambda name, i: given[name][i if name in mapped else 0]  # noqa: B023, E731
            operands = {name: given[name] if name in mapped else given[name][0] for name in NAMES}
            axes = {name: 0 if name in mapped else None for name in NAMES}
            actual = jax.vmap(functools.partial(raw_call, kernel, cache), in_axes=(axes,))(operands)
            for i in range(SIZE):
                one = {name: pick(name, i) for name in NAMES}
                close(jax.tree.map(lambda x: x[i], actual), one_call(cache, one))  # noqa: B023


@pytest.mark.parametrize("mapped", [("q",), ("sinks",), ("q", "sinks")])
def test_vmap_of_queries_and_sinks_reads_the_cache_once(mapped):
    """The axis joins the heads, and the sinks follow."""
    cache, sets = operand_sets()
    operands = {name: sets[name] if name in mapped else sets[name][0] for name in NAMES}
    axes = {name: 0 if name in mapped else None for name in NAMES}
    jaxpr = jax.make_jaxpr(jax.vmap(functools.partial(raw_call, None), in_axes=(None, axes)))(cache, operands)
    (call,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "jax_foscar_decode_attention"]
    assert call.invars[0].aval.shape == (4, 4, SIZE * 4, 64)


@kernels
def test_nested_vmap(kernel):
    """Each operand under one vmap and its neighbour under another."""
    with on(kernel):
        cache, sets = operand_sets()
        one_call = jax.jit(functools.partial(raw_call, kernel))
        for outer, inner in zip(NAMES, (*NAMES[1:], NAMES[0]), strict=True):
            operands = {name: x[0] for name, x in sets.items()}
            operands[inner] = sets[inner]
            operands[outer] = sets[outer][:2]
            f = functools.partial(raw_call, kernel, cache)
            for name in (inner, outer):
                f = jax.vmap(f, in_axes=({n: 0 if n == name else None for n in NAMES},))
            actual = f(operands)
            for i, j in itertools.product(range(2), range(SIZE)):
                one = {name: x[0] for name, x in sets.items()} | {outer: sets[outer][i], inner: sets[inner][j]}
                close(jax.tree.map(lambda x: x[i, j], actual), one_call(cache, one))  # noqa: B023


@implementations
def test_nothing_dynamic_recompiles(implementation):
    with on(implementation):
        cache, sets = operand_sets()
        f = jax.jit(functools.partial(raw_call, implementation))
        for i in range(SIZE):
            f(cache, {name: x[i] for name, x in sets.items()})
        assert f._cache_size() == 1


@pytest.mark.parametrize("implementation", ["xla", *(name for name in KERNELS if name == "cpu")])
def test_shard_map(implementation):
    """Over rows and heads: sinks go with the heads, query lengths and masks with the rows; no collective."""
    with on("cpu"):
        cache, sets = operand_sets()
        operands = {name: x[1] for name, x in sets.items()}
        mesh = jax.make_mesh((2, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices("cpu"))
        rows, heads = PartitionSpec("data"), PartitionSpec("data", None, "model")
        specs = dict.fromkeys(NAMES, rows) | {"q": heads, "sinks": PartitionSpec("model")}
        f = functools.partial(raw_call, implementation)
        sharded = jax.jit(
            jax.shard_map(
                f,
                mesh=mesh,
                in_specs=(cache.specs(batch="data", heads="model"), specs),
                out_specs=(heads, heads),
            )
        )
        close(jax.device_get(sharded(cache, operands)), jax.device_get(jax.jit(f)(cache, operands)))
        assert "all-gather" not in sharded.lower(cache, operands).compile().as_text().split("ENTRY")[0]


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name == "cpu"])
def test_export(kernel):
    """For all platforms at once, any number of rows; serialized, it runs."""
    with on(kernel):
        cache = make_cache(KVFormat.parse("k4c32,v2t32"), random_rows((100, 3, 128, 64)), capacity=128)
        args = {name: x[2] for name, x in operand_sets()[1].items()}
        (batch,) = jax.export.symbolic_shape("b")
        shape = lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)  # noqa: E731
        shapes = {name: jax.typeof(x) if name == "sinks" else shape(x) for name, x in args.items()}
        f = jax.jit(functools.partial(raw_call, None))
        exported = jax.export.export(f, platforms=["cpu", "cuda", "tpu"], disabled_checks=jax_foscar.export_checks())
        reloaded = jax.export.deserialize(exported(jax.tree.map(shape, cache), shapes).serialize())
        close(reloaded.call(cache, args), f(cache, args))
