"""Rows are admitted, forked, rolled back and retired: each leaves what it says, and the other rows as they were."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from jax.sharding import AxisType
from test_cache import CAPACITY, DIM, HEADS, History, create, dequantize, step

from jax_foscar import KVCache, KVFormat, PageAllocator, decode_attention

copy_row = jax.jit(KVCache.copy_row, donate_argnums=0)
reset_row = jax.jit(KVCache.reset_row, donate_argnums=0)
rollback = jax.jit(KVCache.rollback, donate_argnums=0)
attend = jax.jit(decode_attention, static_argnames=("implementation", "return_residual"))

WIDTH = CAPACITY // 64
ALL = slice(None)
formats = pytest.mark.parametrize(
    "text", ["k4t32,v2t", "k4c32,v2t,sink40,recent20,f32", "k2t,v2c64,page128,sink4,recent130"]
)


def create_paged(text, num_pages=16, num_pools=1, batch=4, layers=1, **options):
    options = {"max_length": CAPACITY, "num_kv_heads": HEADS, "head_dim": DIM} | options
    return KVCache.create_paged(
        KVFormat.parse(text), num_pages=num_pages, num_pools=num_pools, batch=batch, num_layers=layers, **options
    )


def row_of(ids, fill=-1, width=WIDTH):
    """A row of the page table; what is unused may hold anything."""
    return np.array([*ids, *[fill] * (width - len(ids))], np.int32)


def rows_of(cache, rows):
    """What some rows hold, on the host."""
    return jax.tree.map(lambda x: np.asarray(x)[rows], (dequantize(cache), cache.length, cache.overflowed))


def poisoned(cache):
    """Pages and exact tokens that nobody wrote are NaN."""
    nan = lambda x: jnp.full_like(x, 255 if x.dtype == jnp.uint8 else jnp.nan)  # noqa: E731
    large = {name: jax.tree.map(nan, getattr(cache, name)) for name in ("key", "value", "exact_key", "exact_value")}
    return dataclasses.replace(cache, **large)


# --- Paged caches -----------------------------------------------------------------------------------------------------


def test_a_paged_cache_owns_nothing():
    cache = create_paged("k2c64,v4t32,page128,sink4", num_pages=5, num_pools=2, layers=3, value_head_dim=128)
    own = create("k2c64,v4t32,page128,sink4", layers=3, value_head_dim=128)
    assert cache.key.codes.shape == (2, 3, 5, *own.key.codes.shape[3:])
    assert cache.value.params.shape == (2, 3, 5, *own.value.params.shape[3:])
    assert (cache.exact_key.shape, cache.exact_value.shape) == (own.exact_key.shape, own.exact_value.shape)
    assert (cache.capacity, cache.batch) == (CAPACITY, 4)
    assert cache.page_table.shape == (4, 2)
    assert (np.asarray(cache.page_table) == -1).all()
    assert repr(cache).startswith("KVCache('k2c64,v4t32,page128,sink4@1', batch=4, pools=2, layers=3, pages=5,")
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]
    assert len(set(pointers)) == len(pointers)


def test_a_row_without_pages_loses_its_tokens():
    """A token that needs a page is dropped and flagged; check names what helps."""
    cache = step(create_paged("k4t32,v2t"), *History().take([0, 1, 0, 0], 1))
    np.testing.assert_array_equal(cache.overflowed, [False, True, False, False])
    with pytest.raises(
        OverflowError, match=r"^rows \[1\] .*had no page id in \[0, 16\) .*\(give a row its pages before"
    ):
        cache.check()
    reset_row(cache, 1, row_of([3])).check()


@pytest.mark.parametrize("implementation", support.IMPLEMENTATIONS)
@pytest.mark.parametrize("text", ["k4t32,v2t", "k2c32,v4c64,sink40,recent20"])
def test_poison_elsewhere(text, implementation):
    """NaN in pages that nobody owns, in those of another row and in another row's exact tokens, and huge ids in unused
    entries, reach no row: each is as in a cache of its own."""
    pages = PageAllocator(16)
    counts = np.array([150, 64, 33, 1])
    with support.on(implementation):
        history, cache = History(), poisoned(create_paged(text))
        for row, count in enumerate(counts):
            junk = (2**31 - 1, -(2**31))[row % 2]
            cache = reset_row(cache, row, row_of(pages.allocate(-(-int(count) // 64)), junk))
        given = history.take(counts, 150)
        cache = step(cache, given[0], *(x.at[1].set(jnp.nan) for x in given[1:]))
        cache.check()
        own = step(create(text), *given)
        q = support.queries((4, 6, DIM))
        options = {"implementation": implementation, "return_residual": True}
        actual, expected = (attend(q, c, **options) for c in (cache, own))
        assert np.isnan(np.asarray(actual[0])[1]).all()
        others = np.array([0, 2, 3])
        if support.bitwise(implementation):
            support.assert_same_bits(*(jax.tree.map(lambda x: x[others], r) for r in (actual, expected)))
        else:
            np.testing.assert_allclose(actual[0][others], expected[0][others], atol=1e-3)
        support.assert_same_bits(rows_of(cache, others), rows_of(own, others))


# --- Rolling back -----------------------------------------------------------------------------------------------------


@formats
def test_rejected_tokens_leave_no_trace(text):
    """Drafts that are rolled back, also such as completed a group or wrapped the ring, are as if never written."""
    for before in ([70, 61, 33, 0], [200, 127, 20, 3]):
        history = History()
        cache, clean = (step(create(text), *History().take(before, 200)) for _ in range(2))
        history.take(before, 200)
        for counts, width, rejected in [(8, 8, [8, 5, 0, 3]), (8, 8, [8, 8, 8, 0]), ([30, 0, 8, 1], 200, 0)]:
            counts, right = np.broadcast_to(counts, 4), np.broadcast_to(counts, 4) - rejected
            drafts, given = History(seed=1).take(counts, width), history.take(right, width)
            is_right = (np.arange(width) < right[:, None])[..., None, None]
            cache = step(
                cache, counts, *(jnp.where(is_right, x, y) for x, y in zip(given[1:], drafts[1:], strict=True))
            )
            cache = rollback(cache, np.broadcast_to(rejected, 4))
            clean = step(clean, *given)
            np.testing.assert_array_equal(cache.num_new, right)
            support.assert_same_bits(rows_of(cache, ALL), rows_of(clean, ALL))
        history.check(cache)
        assert not np.asarray(cache.overflowed).any()


@formats
def test_a_part_of_a_step_is_rolled_back_twice(text):
    """num_new falls with the length, so that positions stand and no more than the step can be undone."""
    history = History()
    cache = step(create(text), *history.take([70, 64, 30, 0], 200))
    cache = step(cache, *history.take(8, 200))
    start = np.asarray(cache.positions(1))
    cache = rollback(rollback(cache, np.array([3, 0, 8, -5])), np.array([5, 1, 0, 0]))
    np.testing.assert_array_equal(cache.num_new, [0, 7, 0, 8])
    np.testing.assert_array_equal(cache.positions(1), start)
    assert not np.asarray(cache.overflowed).any()
    history.lengths = history.lengths - [8, 1, 8, 0]
    history.check(cache)


@formats
def test_what_cannot_be_undone_loses_the_row(text):
    """More than the last step or, with exact tokens, a step longer than max_new: NaN and flagged, for that row only."""
    cache = step(create(text), *History().take([9, 8, 9, 3], 200))
    cache = rollback(cache, np.array([1, 8, 0, 4]))
    exact = cache.format.keeps_exact
    np.testing.assert_array_equal(cache.overflowed, [exact, False, False, True])
    np.testing.assert_array_equal(cache.length[1:3], [0, 9])
    out = np.asarray(attend(support.queries((4, 6, DIM)), cache))
    np.testing.assert_array_equal(np.isnan(out).all((1, 2)), [exact, False, False, True])
    with pytest.raises(OverflowError, match=r"^rows .*3\] of the cache lost tokens: .*rolled back"):
        cache.check()


# --- Copying ----------------------------------------------------------------------------------------------------------


@formats
def test_a_copied_row(text):
    """In a cache of one pool a row, every page that holds tokens is copied, in each layer."""
    history = History()
    given = history.take([200, 10, 33, 70], 200)
    cache, expected = (step(create(text, layers=2), *given, layer=1) for _ in range(2))
    cache = copy_row(cache, jnp.int32(0), jnp.int32(2))
    np.testing.assert_array_equal(cache.num_new, [0, 10, 0, 70])
    np.testing.assert_array_equal(cache.page_table, expected.page_table)
    read = jax.jit(functools.partial(KVCache.dequantize, layer=1))
    for x, y in zip(read(cache), read(expected), strict=True):
        support.assert_same_bits(x, y[np.array([0, 1, 0, 3])])


@formats
def test_a_fork_shares_full_pages(text):
    """The fork reads the shared pages, owns the others, and neither row sees what the other writes after it."""
    for n in (1, 63, 128, 200):
        history, pages = History(), PageAllocator(16)
        cache = poisoned(create_paged(text))
        fmt, width = cache.format, cache.page_table.shape[1]
        first = pages.allocate(width)
        cache = reset_row(cache, 1, np.array(first))
        cache = step(cache, *history.take([0, n, 0, 0], 200))
        shared = fmt.full_pages(n)
        assert shared == support.quantized_length(n, fmt) // fmt.page_size
        own = pages.allocate(width - shared)
        before = np.asarray(cache.key.codes)
        cache = copy_row(cache, 1, 3, np.array(pages.fork(first[:shared]) + own))
        changed = np.flatnonzero((np.asarray(cache.key.codes) != before).any((0, 1, 3, 4, 5)))
        assert set(changed.tolist()) <= set(own[:1]), "at most the partly filled page is copied"
        for x in (history.k, history.v):
            x[3, :n] = x[1, :n]
        history.lengths[3] = n
        for counts, step_width in [([0, 5, 0, 8], 8), ([0, 40, 0, 1], 200), ([0, 1, 0, 8], 8)]:
            cache = step(cache, *history.take(counts, step_width))
            history.check(cache)
        cache.check()


def test_pools_are_never_mixed():
    """Rows of two pools may name the same ids; a fork from one pool into the other copies every page."""
    history = History()
    cache = poisoned(create_paged("k4c32,v2t", num_pages=8, num_pools=2))
    for row, ids in enumerate(([0, 1, 2, 3], [7, 6, 5, 4], [0, 1, 2, 3], [7, 6, 5, 4])):
        cache = reset_row(cache, row, np.array(ids, np.int32))
    cache = step(cache, *history.take([150, 100, 0, 64], 200))
    cache = copy_row(cache, 0, 2, np.array([0, 1, 2, 3], np.int32))
    for x in (history.k, history.v):
        x[2, :150] = x[0, :150]
    history.lengths[2] = 150
    history.check(cache)
    history.check(step(cache, *history.take(8, 200)))


@pytest.mark.parametrize("ids", [[0, 1, -1, 9], [0, 1, 16, 9], [0, -(2**31), 2, 9]])
def test_a_copy_to_a_bad_page_loses_the_row(ids):
    """Nothing is written there; the source goes on."""
    history = History()
    cache = reset_row(create_paged("k4t32,v2t"), 0, np.array([4, 5, 6, 7], np.int32))
    cache = step(cache, *history.take([150, 0, 0, 0], 200))
    before = np.asarray(cache.key.codes)
    cache = copy_row(cache, 0, 1, np.array(ids, np.int32))
    np.testing.assert_array_equal(cache.overflowed, [False, True, False, False])
    after = np.asarray(cache.key.codes)
    touched = np.flatnonzero((after != before).any((0, 1, 3, 4, 5)))
    assert set(touched) <= set(ids)
    assert np.isnan(np.asarray(attend(support.queries((4, 6, DIM)), cache))[1]).all()
    history.check(dataclasses.replace(cache, length=cache.length.at[1].set(0)))


# --- Admitting and retiring -------------------------------------------------------------------------------------------


def test_reset_row():
    history = History()
    cache = step(create_paged("k4t32,v2t"), *history.take([3, 1, 0, 2], 3))
    assert np.asarray(cache.overflowed).tolist() == [True, True, False, True]
    cache = reset_row(cache, jnp.int32(1), row_of([5, 7]), jnp.int32(64))
    np.testing.assert_array_equal(cache.page_table, [[-1] * 4, [5, 7, -1, -1], [-1] * 4, [-1] * 4])
    np.testing.assert_array_equal(cache.length, [3, 64, 0, 2])
    np.testing.assert_array_equal(cache.num_new, [3, 0, 0, 2])
    np.testing.assert_array_equal(cache.overflowed, [True, False, False, True])
    kept = cache.reset_row(1)
    np.testing.assert_array_equal(kept.page_table, cache.page_table)
    assert kept.length[1] == 0
    assert (np.asarray(cache.reset_row(1, []).page_table) == -1).all()
    np.testing.assert_array_equal(cache.reset_row(1, [3]).page_table[1], [3, -1, -1, -1])


@pytest.mark.parametrize("text", ["k4t32,v2t", "k2c64,v4c32"])
def test_a_prefix_by_its_pages(text):
    """Full pages of one row are another's prefix, where the format keeps none of their tokens exact."""
    history, pages = History(), PageAllocator(16)
    cache = poisoned(create_paged(text))
    first = pages.allocate(WIDTH)
    cache = reset_row(cache, 0, row_of(first))
    cache = step(cache, *history.take([150, 0, 0, 0], 200))
    prefix = pages.fork(first[: cache.format.full_pages(150)])
    assert len(prefix) == 2
    cache = reset_row(cache, 3, row_of(prefix + pages.allocate(2)), 128)
    for x in (history.k, history.v):
        x[3, :128] = x[0, :128]
    history.lengths[3] = 128
    history.check(cache)
    cache = step(cache, *history.take([8, 0, 0, 70], 200))
    history.check(cache)


@pytest.mark.parametrize(("text", "length"), [("k4c32,v2t", 40), ("k4t,v2t,sink4", 64), ("k4t32,v2t", CAPACITY + 1)])
def test_a_traced_length_that_pages_do_not_hold(text, length):
    cache = reset_row(create_paged(text), 2, row_of([0, 1]), jnp.int32(length))
    np.testing.assert_array_equal(cache.overflowed, [False, False, True, False])
    assert np.isnan(np.asarray(attend(support.queries((4, 6, DIM)), cache))[2]).all()


@pytest.mark.parametrize("row", [-1, 4, 2**31 - 1, -(2**31)])
def test_a_traced_row_out_of_range_changes_nothing(row):
    """So that a program may carry an operation it does not always need."""
    before = jax.tree.map(np.asarray, step(create("k4c32,v2t"), *History().take([70, 0, 33, 5], 70)))
    row = jnp.int32(row)
    fresh = lambda: jax.tree.map(jnp.asarray, before)  # noqa: E731
    support.assert_same_bits(reset_row(fresh(), row, row_of([3])), before)
    support.assert_same_bits(copy_row(fresh(), row, 1, row_of([3, 2, 1, 0])), before)
    support.assert_same_bits(copy_row(fresh(), 0, row, row_of([3, 2, 1, 0])), before)


# --- Transformations --------------------------------------------------------------------------------------------------


def requests(cache, src, dst, count):
    """All three, as one program."""
    return cache.rollback(count).copy_row(src, dst).reset_row(src)


def test_under_vmap():
    """Stacked caches, with mapped and unmapped rows and counts, are as one by one."""
    caches = [step(create("k4c32,v2t"), *History(seed=s).take([8, 5, 7, 1], 8)) for s in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    src, count = jnp.array([0, 1, 9]), jnp.array([1, 0, 1])
    actual = jax.jit(jax.vmap(requests, in_axes=(0, 0, None, 0)))(stacked, src, 2, count)
    for i, cache in enumerate(caches):
        expected = jax.jit(requests)(cache, src[i], 2, count[i])
        support.assert_same_bits(jax.tree.map(lambda x, i=i: x[i], actual), expected)


def test_under_shard_map():
    """Rows count within their shard; heads are split, too."""
    kinds = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, 2), ("data", "heads"), kinds, devices=jax.devices("cpu")[:4])
    with support.on("cpu"):
        cache = step(create("k4c32,v2t,sink4"), *History().take([8, 70, 7, 100], 200))
        specs = cache.specs(batch="data", heads="heads")
        sharded = jax.shard_map(lambda c: requests(c, 1, 0, 0), mesh=mesh, in_specs=(specs,), out_specs=specs)
        actual = jax.device_get(jax.jit(sharded)(cache))
        expected = reset_row(reset_row(copy_row(copy_row(cache, 1, 0), 3, 2), 1), 3)
    support.assert_same_bits(actual, jax.device_get(expected))


def test_in_a_scan():
    """Rows move inside a jitted loop."""

    def body(cache, row):
        return cache.copy_row(row, row + 1), None

    cache = step(create("k2c64,v4c32"), *History().take([100, 5, 7, 1], 100))
    want = rows_of(cache, np.zeros(4, int))
    support.assert_same_bits(rows_of(jax.jit(lambda c: jax.lax.scan(body, c, jnp.arange(3))[0])(cache), ALL), want)
