"""Random histories of a cache that serves requests, checked after each step against a numpy cache that keeps every
token and quantizes by rule. Pages and exact tokens start as NaN, unused page-table entries are absurd.

`make test ARGS='tests/test_histories.py --hypothesis-profile=thorough'` runs 2,000 histories.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from test_rows import copy_row, poisoned, reset_row, rollback, row_of

from jax_foscar import KVCache, KVFormat, PageAllocator

BATCH, LAYERS, HEADS, DIM, MAX_LENGTH = 4, 2, 1, 64, 192
CASES = {  # format: pools, pages a pool. As many pools as rows: the cache of KVCache.create.
    "k2c32,v2t": (1, 8),
    "k4c64,v4t64": (2, 5),
    "k4t,v2t32": (1, 8),
    "k2c32,v4t,sink4,recent20,f32": (1, 8),
    "k4t,v4c32,page128,sink70": (4, 2),
}
PARTS = st.lists(st.sampled_from([1, 1, 1, 0.3, 0.02, 0]), min_size=BATCH, max_size=BATCH)  # of a count, for each row
ROW = st.integers(0, BATCH - 1)
ABSURD = (-1, 2**31 - 1, -(2**31), 8)

# All tokens there are; a row's history is a list of indices into them.
TOKENS = support.random_rows((3000,), heads=LAYERS * HEADS, dim=DIM)
KEYS, VALUES = (np.moveaxis(x[0, 0], 0, 1) for x in (TOKENS.k, TOKENS.v))  # [3000, L * K, D]


@jax.jit
def fetch(cache):
    """Keys and values of all layers, ``[L, B, capacity, K, D]``."""
    return jax.lax.map(cache.dequantize, jnp.arange(LAYERS))


def _step(cache, table, counts, k, v):
    """What a model does; k and v ``[L, B, T, K, D]``."""
    cache = dataclasses.replace(cache, page_table=table).advance(counts)
    return jax.lax.fori_loop(0, LAYERS, lambda i, c: c.write(k[i], v[i], layer=i), cache)


step = jax.jit(_step, donate_argnums=0)


@dataclasses.dataclass
class Row:
    """One row, as its user knows it."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    num_new: int = 0
    busy: bool = False
    lost: bool = False
    poison: bool = False  # its tokens are NaN


class Histories(RuleBasedStateMachine):
    """A cache, its allocators, and the same in lists."""

    def __init__(self, text):
        super().__init__()
        self.fmt = KVFormat.parse(text)
        self.pools, num_pages = CASES[text]
        sizes = {"batch": BATCH, "max_length": MAX_LENGTH, "num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": DIM}
        if self.pools == BATCH:
            cache = KVCache.create(self.fmt, **sizes)
        else:
            cache = KVCache.create_paged(self.fmt, num_pages=num_pages, num_pools=self.pools, **sizes)
        self.cache = poisoned(cache)
        self.num_pages = cache.key.codes.shape[2]
        self.capacity, self.page = cache.capacity, self.fmt.page_size
        self.allocators = [PageAllocator(self.num_pages) for _ in range(self.pools)]
        self.rows = [Row() for _ in range(BATCH)]
        self.next_token = 0

    # --- What a server does on the host ---

    def allocator(self, row):
        return self.allocators[row * self.pools // BATCH]

    def table_row(self, ids):
        return row_of(ids, ABSURD[self.next_token % len(ABSURD)], self.capacity // self.page)

    def release(self, row):
        self.allocator(row).free(self.rows[row].ids)
        self.rows[row] = Row()

    def grow(self, row, length):
        """Pages for ``length`` tokens; False if there are too few."""
        own, allocator = self.rows[row].ids, self.allocator(row)
        missing = -(-length // self.page) - len(own)
        if length > self.capacity or missing > allocator.num_free:
            return False
        own += allocator.allocate(max(missing, 0))
        return True

    def source(self, start, dst):
        """The first row from ``start`` on that has tokens to give to ``dst`` by their pages; None if there is none."""
        for src in ((start + i) % BATCH for i in range(BATCH)):
            row = self.rows[src]
            if src != dst and row.tokens and not row.lost and self.allocator(src) is self.allocator(dst):
                return src
        return None

    # --- Steps ---

    @initialize(parts=PARTS)
    def start(self, parts):
        for row in range(BATCH):
            self.admit(row, False)
        self.advance(70, parts)

    @rule(width=st.sampled_from([1, 8, 8]), parts=PARTS, rejected=PARTS, reckless=st.sampled_from([False] * 9 + [True]))
    def decode(self, width, parts, rejected, reckless):
        self.advance(width, parts, reckless)
        self.agrees()
        self.roll_back([1 - part for part in rejected])

    @rule(parts=PARTS)
    def prefill(self, parts):
        self.advance(70, parts)

    def advance(self, width, parts, reckless=False):
        """Ragged counts, also 0; a reckless server gives a row no page for its tokens, which are then lost."""
        counts = np.zeros(BATCH, np.int32)
        for b, (row, part) in enumerate(zip(self.rows, parts, strict=True)):
            count = int(np.ceil(part * width))
            if not row.busy or not count:
                continue
            if reckless or self.grow(b, len(row.tokens) + count):
                counts[b] = count
            else:  # no room: the row makes place for a new request
                self.admit(b, False)
        k, v = (np.full((BATCH, width, LAYERS * HEADS, DIM), np.nan, np.float32) for _ in range(2))
        for b, row in enumerate(self.rows):
            start, stop = len(row.tokens), len(row.tokens) + int(counts[b])
            new = [(self.next_token + i) % len(KEYS) for i in range(counts[b])]
            self.next_token += len(new)
            if not row.poison:
                k[b, : len(new)], v[b, : len(new)] = KEYS[new], VALUES[new]
            row.tokens += new
            row.num_new = len(new)
            first, last = (support.quantized_length(n, self.fmt) for n in (start, stop))
            written = range(max(first, self.fmt.sink_tokens), last)
            missing = bool(written) and written[-1] // self.page >= len(row.ids)
            row.lost |= bool(new) and (missing or stop > self.capacity)
        table = np.stack([self.table_row(row.ids) for row in self.rows])
        split = lambda x: np.moveaxis(x.reshape(BATCH, width, LAYERS, HEADS, DIM), 2, 0)  # noqa: E731
        self.cache = step(self.cache, table, counts, split(k), split(v))

    def reach(self, row):
        """Tokens that can be rolled back."""
        return row.num_new if support.ring(self.fmt) == 0 or row.num_new <= self.fmt.max_new else 0

    def roll_back(self, parts):
        counts = np.zeros(BATCH, np.int32)
        for b, (row, part) in enumerate(zip(self.rows, parts, strict=True)):
            counts[b] = int(np.ceil(part * self.reach(row)))
            row.num_new -= int(counts[b])
            row.tokens = row.tokens[: len(row.tokens) - counts[b]]
        self.cache = rollback(self.cache, counts)

    # --- Rows ---

    def reset(self, row, length=0):
        ids = self.table_row(self.rows[row].ids)
        self.cache = reset_row(self.cache, np.int32(row), ids, np.int32(length))

    def copy(self, src, dst):
        ids = self.table_row(self.rows[dst].ids)
        self.cache = copy_row(self.cache, np.int32(src), np.int32(dst), ids)

    @rule(row=ROW, poison=st.sampled_from([False, False, True]))
    def admit(self, row, poison):
        self.release(row)
        self.rows[row] = Row(busy=True, poison=poison)
        self.reset(row)

    @rule(row=ROW)
    def retire(self, row):
        self.release(row)
        self.reset(row)

    @rule(start=ROW, dst=ROW, whole=st.booleans())
    def fork(self, start, dst, whole):
        """Shares what no row writes again; owns the rest. ``whole``: also pages that hold no token yet."""
        src = self.source(start, dst)
        if src is None:
            return
        self.release(dst)
        row, allocator = self.rows[src], self.allocator(dst)
        shared = self.fmt.full_pages(len(row.tokens))
        total = len(row.ids) if whole else min(-(-len(row.tokens) // self.page), len(row.ids))
        if total - shared > allocator.num_free:
            self.reset(dst)
            return
        own = allocator.allocate(total - shared)
        row.num_new = 0
        self.rows[dst] = dataclasses.replace(row, tokens=list(row.tokens), ids=allocator.fork(row.ids[:shared]) + own)
        self.copy(src, dst)
        self.agrees()
        self.advance(8, [1] * BATCH)  # each writes its own last page

    @rule(src=ROW, dst=ROW)
    def copy_to_another_pool(self, src, dst):
        """Nothing is shared, and all tokens are copied."""
        row, allocator = self.rows[src], self.allocator(dst)
        if allocator is self.allocator(src) or row.lost:
            return
        self.release(dst)
        if len(row.ids) > allocator.num_free:
            self.reset(dst)
            return
        row.num_new = 0
        self.rows[dst] = dataclasses.replace(row, tokens=list(row.tokens), ids=allocator.allocate(len(row.ids)))
        self.copy(src, dst)

    @rule(start=ROW, dst=ROW)
    def move(self, start, dst):
        """All pages change hands; nothing is copied but exact tokens."""
        src = self.source(start, dst)
        if src is None:
            return
        self.release(dst)
        self.rows[dst], self.rows[src] = dataclasses.replace(self.rows[src], num_new=0), Row()
        self.copy(src, dst)
        self.reset(src)

    @precondition(lambda self: not (self.fmt.sink_tokens or self.fmt.recent_tokens))
    @rule(start=ROW, dst=ROW)
    def admit_with_prefix(self, start, dst):
        """Pages of another row that it will not write again, whatever it rolls back, are the prefix of a new one."""
        src = self.source(start, dst)
        if src is None:
            return
        self.release(dst)
        row = self.rows[src]
        shared = self.fmt.full_pages(len(row.tokens) - row.num_new)
        length = shared * self.page
        ids = self.allocator(dst).fork(row.ids[:shared])
        self.rows[dst] = Row(row.tokens[:length], ids, busy=True, poison=row.poison)
        self.reset(dst, length)

    # --- Checks ---

    @invariant()
    def agrees(self):
        lengths = [len(row.tokens) for row in self.rows]
        note(f"lengths {lengths}, ids {[row.ids for row in self.rows]}")
        np.testing.assert_array_equal(self.cache.length, lengths)
        np.testing.assert_array_equal(self.cache.num_new, [row.num_new for row in self.rows])
        np.testing.assert_array_equal(self.cache.overflowed, [row.lost for row in self.rows])
        rows = [b for b, row in enumerate(self.rows) if not row.lost and not row.poison and row.tokens]
        if rows:
            self.holds(rows, [lengths[b] for b in rows])
        held = [
            {page for b in range(BATCH) if self.allocator(b) is a for page in self.rows[b].ids} for a in self.allocators
        ]
        assert [a.num_free for a in self.allocators] == [self.num_pages - len(ids) for ids in held]

    def holds(self, rows, lengths):
        """These rows hold their tokens, in every layer."""
        for actual, tokens, quant in zip(
            fetch(self.cache), (KEYS, VALUES), (self.fmt.key, self.fmt.value), strict=True
        ):
            x = np.zeros((len(rows), self.capacity, LAYERS * HEADS, DIM), np.float32)
            for i, b in enumerate(rows):
                x[i, : lengths[i]] = tokens[self.rows[b].tokens]
            actual = np.moveaxis(np.asarray(actual)[:, rows], 0, 2).reshape(x.shape)
            support.assert_cached(actual, *support.as_cached(x, lengths, quant, self.fmt))


@pytest.mark.parametrize("text", CASES)
def test_histories(text):
    """A quarter as many histories a case as the profile has examples: 125 in all, thoroughly 2,000, for a GPU 200."""
    profile = settings(max_examples=settings().max_examples // 4, stateful_step_count=20, deadline=None)
    run_state_machine_as_test(lambda: Histories(text), settings=profile)
