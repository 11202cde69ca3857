"""The cache holds what its history says, however the tokens came; against a numpy cache that keeps every token."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from jax_foscar import KVCache, KVFormat, Pages, Quant, decode_attention

CAPACITY, HEADS, DIM = 256, 2, 64
FORMATS = [
    "k4t32,v2t",
    "k16,v4t64,f32",
    "k4c32,v4t",
    "k2c64,v4c32",
    "k4t,v16,sink4,recent20",
    "k4c32,v2t,sink40,recent20,f32",
    "k2t,v2c64,page128,sink4,recent130",
]
formats = pytest.mark.parametrize("text", FORMATS)


@functools.partial(jax.jit, static_argnames=("layer", "implementation"), donate_argnames="cache")
def step(cache, counts, k, v, layer=0, implementation=None):
    return cache.advance(counts).write(k, v, layer=layer, implementation=implementation)


dequantize = jax.jit(KVCache.dequantize)


def create(text, batch=4, layers=1, **options):
    options = {"max_length": CAPACITY, "num_kv_heads": HEADS, "head_dim": DIM} | options
    return KVCache.create(KVFormat.parse(text), batch=batch, num_layers=layers, **options)


class History:
    """Every token of every row, in numpy; ``take`` hands out the next ones, padded with NaN."""

    def __init__(self, batch=4, seed=0):
        rows = support.random_rows((2 * CAPACITY,) * batch, heads=HEADS, dim=DIM, seed=seed)
        self.k, self.v = (np.moveaxis(x[:, 0], 1, 2) for x in (rows.k, rows.v))  # [B, n, K, D]
        self.lengths = np.zeros(batch, int)

    def take(self, counts, width):
        counts = np.broadcast_to(counts, self.lengths.shape)
        given = []
        for x in (self.k, self.v):
            padded = np.full((len(counts), width, *x.shape[2:]), np.nan, np.float32)
            for b, (n, count) in enumerate(zip(self.lengths, counts, strict=True)):
                padded[b, :count] = x[b, n : n + count]
            given.append(jnp.asarray(padded))
        self.lengths = self.lengths + counts
        return jnp.asarray(counts, jnp.int32), *given

    def check(self, cache):
        """The cache holds these tokens."""
        fmt = cache.format
        np.testing.assert_array_equal(cache.length, self.lengths)
        for actual, x, quant in zip(dequantize(cache), (self.k, self.v), (fmt.key, fmt.value), strict=True):
            support.assert_cached(actual, *support.as_cached(x[:, :CAPACITY], self.lengths, quant, fmt))


# --- Writing ----------------------------------------------------------------------------------------------------------


@formats
def test_histories(text):
    """Bulk, chunks, single tokens, ragged counts and rows that stand still leave what a numpy cache holds."""
    history, cache = History(), create(text)
    history.check(cache)
    for counts, width in [
        ([70, 0, 31, 33], 70),
        (5, 5),
        ([0, 5, 3, 1], 5),
        ([5, 5, 0, 2], 5),
        *[(1, 1)] * 30,
        ([0, 1, 0, 1], 1),
        ([64, 63, 70, 1], 70),
        ([2, 4, 5, 5], 5),
    ]:
        cache = step(cache, *history.take(counts, width))
        np.testing.assert_array_equal(cache.num_new, np.broadcast_to(counts, 4))
        if width > 1 or history.lengths[0] % 16 == 0:
            history.check(cache)
    assert not np.asarray(cache.overflowed).any()


@formats
def test_chunks_do_not_matter(text):
    """The same tokens, at once or one by one or in ragged pieces, leave the same bits wherever a token is."""
    pieces = [[(70, 70)], [(1, 1)] * 70, [(5, 5)] * 14, [([0, 3, 5, 1], 5), ([5, 2, 0, 4], 5), ([65, 65, 65, 65], 70)]]
    results = []
    for piece in pieces:
        history, cache = History(), create(text)
        for counts, width in piece:
            cache = step(cache, *history.take(counts, width))
        assert (history.lengths == 70).all()
        results.append(cache)
    for other in results[1:]:
        support.assert_same_bits(dequantize(other), dequantize(results[0]))
        support.assert_same_bits((other.page_table, other.overflowed), (results[0].page_table, results[0].overflowed))


@pytest.mark.parametrize("implementation", ["xla", *support.KERNELS])
@formats
def test_written_bytes_are_those_of_the_numpy_cache(text, implementation):
    """Codes, parameters and exact tokens stand where ``support.make_cache`` puts them, to the bit; only what holds no
    token may differ."""
    device = support.device_of(implementation) if implementation != "xla" else jax.devices("cpu")[0]
    with jax.default_device(device):
        history, cache = History(), create(text)
        for counts, width in [([200, 64, 33, 0], 200), ([1, 0, 40, 130], 200)]:
            cache = step(cache, *history.take(counts, width), implementation=implementation)
    fmt = cache.format
    rows = support.Rows(*(np.moveaxis(x, 1, 2)[:, None] for x in (history.k, history.v)), tuple(history.lengths))
    expected = support.make_cache(fmt, rows, capacity=CAPACITY)
    table = np.asarray(expected.page_table)
    for name, quant in (("key", fmt.key), ("value", fmt.value)):
        ours, theirs = (jax.tree.map(np.asarray, getattr(c, name)) for c in (cache, expected))
        exact = [np.asarray(getattr(c, f"exact_{name}")).view("u2") for c in (cache, expected) if support.ring(fmt)]
        for b, n in enumerate(history.lengths):
            held = support.quantized_length(n, fmt)
            for m in range(-(-held // fmt.page_size)):
                t = m * fmt.page_size + np.arange(fmt.page_size)
                there = (t >= fmt.sink_tokens) & (t < held)
                pages = ours.codes[b, 0, m], theirs.codes[b, 0, table[b, m]]
                mine, other = (support.unpack(x, name, quant.bits, DIM)[:, there] for x in pages)
                np.testing.assert_array_equal(mine, other)
                if quant.bits != 16:
                    there = there.reshape(-1, quant.group if quant.per == "channel" else 1).any(axis=1)
                    mine, other = ours.params[b, 0, m][:, there], theirs.params[b, 0, table[b, m]][:, there]
                    support.assert_same_bits(mine, other)
            if exact:
                t = np.arange(n)
                at = support.slot(t[(t < fmt.sink_tokens) | (t >= n - support.ring(fmt))], fmt)
                np.testing.assert_array_equal(*(x[b][..., at, :] for x in exact))


def test_ties_of_one_layer_do_not_touch_another():
    """A write touches only its layer."""
    history, cache = History(), create("k4c32,v4t,sink4", layers=3)
    before = jax.tree.map(np.asarray, cache)
    cache = step(cache, *history.take(70, 70), layer=1)
    history.check(jax.tree.map(lambda x: x[:, 1:2] if x.ndim > 2 else x, cache))
    for name in ("key", "value", "exact_key", "exact_value"):
        for x, y in zip(jax.tree.leaves(getattr(cache, name)), jax.tree.leaves(getattr(before, name)), strict=True):
            np.testing.assert_array_equal(np.delete(np.asarray(x), 1, axis=1), np.delete(y, 1, axis=1))


@pytest.mark.parametrize("dtype", support.DTYPES)
def test_token_dtypes(dtype):
    """Half-precision tokens leave what the same tokens in float32 do."""
    history, caches = History(), []
    counts, k, v = history.take(70, 70)
    k, v = k.astype(dtype), v.astype(dtype)
    for kind in (dtype, "float32"):
        caches.append(step(create("k4c32,v4t"), counts, k.astype(kind), v.astype(kind)).dequantize())
    support.assert_same_bits(*caches)


def test_append_is_advance_and_write():
    history = History()
    counts, k, v = history.take(5, 5)
    support.assert_same_bits(
        jax.jit(KVCache.append)(create("k4c32,v4t"), k, v), step(create("k4c32,v4t"), counts, k, v)
    )


def test_positions():
    """The absolute positions of the step's tokens; those past a row's count belong to its padding."""
    cache = create("k4t,v4t").advance(np.array([3, 0, 7, 1])).advance(np.array([2, 2, 0, 1]))
    np.testing.assert_array_equal(cache.positions(2), [[3, 4], [0, 1], [7, 8], [1, 2]])
    np.testing.assert_array_equal(cache.length, [5, 2, 7, 2])
    np.testing.assert_array_equal(cache.num_new, [2, 2, 0, 1])
    np.testing.assert_array_equal(cache.advance(np.array([-5, 1, 1, 1])).length, [5, 3, 8, 3])
    assert cache.positions(2).dtype == jnp.int32


# --- Overflow and page tables -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["k4t32,v2t", "k4c32,v2t,sink40,recent20,f32"])
def test_past_the_capacity(text):
    """Tokens past the capacity are dropped and flag their row, for good; the other rows are as if alone."""
    history, cache = History(), create(text)
    cache = step(cache, *history.take([200, 200, 10, 200], 200))
    cache = step(cache, *history.take([56, 50, 7, 0], 70))
    assert not np.asarray(cache.overflowed).any(), "a full row has not overflowed"
    cache.check()
    full = jax.tree.map(np.asarray, cache)
    cache = step(cache, *history.take([1, 1, 1, 0], 1))
    np.testing.assert_array_equal(cache.overflowed, [True, False, False, False])
    np.testing.assert_array_equal(cache.key.codes[0], full.key.codes[0])
    with pytest.raises(OverflowError, match=r"^rows \[0\] of the cache lost tokens: they outgrew 256 .*larger max_"):
        cache.check()
    cache = step(cache, *history.take([0, 70, 70, 0], 70))
    np.testing.assert_array_equal(cache.overflowed, [True, True, False, False])
    alone = create(text)
    other = History()
    for counts, width in [([0, 0, 10, 200], 200), ([0, 0, 7, 0], 70), ([0, 0, 1, 0], 1), ([0, 0, 70, 0], 70)]:
        alone = step(alone, *other.take(counts, width))
    for x, y in zip(dequantize(cache), dequantize(alone), strict=True):
        support.assert_same_bits(x[2:], y[2:])
    out = np.asarray(decode_attention(support.queries((4, 6, DIM)), cache, implementation="xla"))
    assert np.isnan(out[:2]).all()
    assert np.isfinite(out[2:]).all()


@pytest.mark.parametrize("pools", [1, 2, 4])
def test_page_tables(pools):
    """Pages of a shared pool in any order hold what pages of a row's own do."""
    text, history = "k4c32,v4t", History()
    own, per_pool = create(text), 4 // pools * 4
    table = np.concatenate([np.random.default_rng(p).permutation(per_pool).reshape(-1, 4) for p in range(pools)])

    def pooled(x):
        return jnp.zeros((pools, x.shape[1], per_pool, *x.shape[3:]), x.dtype)

    cache = dataclasses.replace(
        create(text),
        key=jax.tree.map(pooled, own.key),
        value=jax.tree.map(pooled, own.value),
        page_table=jnp.asarray(table, jnp.int32),
    )
    for counts, width in [([70, 0, 31, 33], 70), (5, 5), ([64, 63, 70, 1], 70)]:
        given = history.take(counts, width)
        cache, own = step(cache, *given), step(own, *given)
    support.assert_same_bits(dequantize(cache), dequantize(own))
    history.check(cache)


def test_bad_page_ids():
    """A write to a page id out of range is dropped and flags its row; absurd ids in unused entries do no harm."""
    history, cache = History(), create("k4t32,v2t")
    table = np.array([[0, 1, -1, 2**31 - 1], [0, -1, 2, 3], [0, 4, 2, 3], [3, 2, -(2**31), 0]], np.int32)
    cache = dataclasses.replace(cache, page_table=jnp.asarray(table))
    cache = step(cache, *history.take([70, 64, 70, 70], 70))
    np.testing.assert_array_equal(cache.overflowed, [False, False, True, False])
    cache = step(cache, *history.take([0, 1, 0, 1], 1))
    np.testing.assert_array_equal(cache.overflowed, [False, True, True, False])
    expected = History()
    clean = dataclasses.replace(
        create("k4t32,v2t"), page_table=jnp.asarray([[0, 1, 2, 3]] * 3 + [[3, 2, 1, 0]], jnp.int32)
    )
    clean = step(clean, *expected.take([70, 64, 64, 71], 200))
    for x, y in zip(dequantize(cache), dequantize(clean), strict=True):
        support.assert_same_bits(x[:, :64], y[:, :64])
        support.assert_same_bits(x[::3], y[::3])


def test_a_count_past_the_tokens_handed_over_is_refused():
    """Nothing is written for such a row, which is flagged."""
    history, cache = History(), create("k4t32,v2t")
    _, k, v = history.take(5, 5)
    cache = step(cache, jnp.asarray([5, 6, 0, 5], jnp.int32), k, v)
    np.testing.assert_array_equal(cache.overflowed, [False, True, False, False])
    assert not np.asarray(cache.key.codes[1]).any()


# --- The object -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "bits"),
    [
        (Quant(4, "token", 32), 5.0),
        (Quant(4, "token", 64), 4.5),
        (Quant(4, "token", 128), 4.25),
        (Quant(4), 4.25),
        (Quant(2, "token", 32), 3.0),
        (Quant(2, "token", 64), 2.5),
        (Quant(2, "token", 128), 2.25),
        (Quant(4, "channel", 64), 4.5),
        (Quant(2, "channel", 32), 3.0),
        (Quant(16), 16.0),
    ],
    ids=str,
)
def test_effective_bits(key, bits):
    cache = jax.eval_shape(lambda: create(str(KVFormat(key, key)), head_dim=128))
    assert cache.effective_bits == bits


def test_effective_bits_count_params_and_padding():
    of = lambda text, dim: jax.eval_shape(lambda: create(text, head_dim=dim)).effective_bits  # noqa: E731
    assert of("k4t32,v4t32,f32", 128) == 6.0
    assert of("k4t,v2t", 128) == 3.25
    assert of("k4t,v4t", 80) == pytest.approx(4 * 96 / 80 + 32 / 80)


def test_nbytes_of_arrays_and_of_shapes():
    cache = create("k4c64,v4t64", layers=3)
    assert cache.nbytes == sum(x.nbytes for x in jax.tree.leaves(cache))
    shapes = jax.eval_shape(lambda: create("k4c64,v4t64", layers=3))
    assert shapes.nbytes == cache.nbytes
    pages = 4 * 3 * CAPACITY * HEADS * DIM * 2 * 4.5 / 8
    ring = 4 * 3 * HEADS * 128 * DIM * 2 * 2
    assert cache.nbytes == pages + ring + 4 * (4 * 4 + 4 + 4 + 1)


def test_shapes_are_those_of_the_design():
    cache = create("k2c64,v4t32,page128,sink4", layers=3, head_dim=96, value_head_dim=64, max_length=300)
    assert cache.key.codes.shape == (4, 3, 3, HEADS, 128, 24)
    assert cache.key.params.shape == (4, 3, 3, HEADS, 2, 96, 2)
    assert cache.value.codes.shape == (4, 3, 3, HEADS, 128, 32)
    assert cache.value.params.shape == (4, 3, 3, HEADS, 128, 2, 2)
    assert cache.exact_key.shape == (4, 3, HEADS, 4 + 128, 96)
    assert cache.exact_value.shape == (4, 3, HEADS, 4 + 128, 64)
    assert cache.page_table.shape == (4, 3)
    assert cache.capacity == 384
    assert (cache.batch, cache.num_layers, cache.num_kv_heads) == (4, 3, HEADS)
    bare = create("k16,v4t")
    assert bare.key.params is bare.exact_key is bare.exact_value is None
    assert bare.key.codes.shape == (4, 1, 4, HEADS, 64, 2 * DIM)


def test_each_array_has_a_buffer_of_its_own():
    """One that stood twice could not be donated."""
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(create("k4c64,v4c64"))]
    assert len(set(pointers)) == len(pointers)


def test_repr_fetches_nothing():
    cache = create("k4c64,v4t64", layers=3)
    text = "KVCache('k4c64,v4t64@1', batch=4, pools=4, layers=3, pages=4, kv_heads=2, head_dim=64, value_head_dim=64)"
    assert repr(cache) == text
    assert repr(jax.eval_shape(lambda: cache)) == text
    assert "k4c64" in repr(jax.tree.map(lambda _: None, cache))
    jax.jit(lambda c: (repr(c), c.length)[1])(cache)


def test_pytree():
    """Flattening goes both ways, with anything inside; the format is static; two caches are never compared by value."""
    cache = create("k4c64,v4t64")
    leaves, tree = jax.tree.flatten(cache)
    back = jax.tree.unflatten(tree, leaves)
    assert isinstance(back, KVCache)
    assert isinstance(back.key, Pages)
    assert back.format == cache.format
    assert all(x is y for x, y in zip(jax.tree.leaves(back), leaves, strict=True))
    assert tree == jax.tree.structure(create("k4c64,v4t64"))
    assert tree != jax.tree.structure(create("k4c32,v4t64"))
    assert jax.tree.structure(jax.tree.map(str, cache)) == tree
    jax.tree.unflatten(tree, [object()] * len(leaves))
    assert cache == cache
    assert cache != back
    assert len({cache, back}) == 2
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(cache)}
    assert {".key.codes", ".value.params", ".page_table", ".overflowed", ".exact_key"} <= names
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.length = cache.num_new


def test_pickle():
    cache = step(create("k4c32,v4t"), *History().take(70, 70))
    back = pickle.loads(pickle.dumps(cache))
    support.assert_same_bits(back, cache)
    assert (back.format, back.head_dim, back.value_head_dim) == (cache.format, cache.head_dim, cache.value_head_dim)
