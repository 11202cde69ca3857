"""Rows are admitted, forked, rolled back and retired: the ``KVCache`` methods that write no token.

All but ``copy_row`` change only the small int arrays. What cannot be honoured, and only the data shows it, *loses* the
row: it counts as longer than its capacity, so that attention gives NaN, and is flagged in ``overflowed``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from . import windows
from .format import KVFormat, _integer

if TYPE_CHECKING:
    from .cache import KVCache

# --- Arguments --------------------------------------------------------------------------------------------------------


def index(name: str, value: int | Array, size: int) -> Array:
    """``value`` as an int32 scalar; a Python int out of [0, size) raises ValueError."""
    if isinstance(value, (int, np.integer)):
        if not 0 <= value < size:
            raise ValueError(f"{name} must be in [0, {size}), got {value}")
    elif not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.integer) or value.shape != ():
        raise TypeError(f"{name} must be an int or an integer scalar, got {value!r}")
    return jnp.asarray(value, jnp.int32)


def counts(name: str, value: int | Array, shape: tuple[int, ...]) -> Array:
    """``value``, one for all rows or one a row, as int32 of ``shape``; negative ones of an array become 0."""
    if isinstance(value, (int, np.integer)):
        value = _integer(name, value, 0)
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be an int or an int array, got dtype {array.dtype}")
    if array.shape not in ((), shape):
        raise ValueError(f"{name} must be a scalar or have shape {shape}, got {array.shape}")
    return jnp.broadcast_to(jnp.maximum(array, 0).astype(jnp.int32), shape)


def _table_row(page_ids: Array | Sequence[int], width: int) -> Array:
    """``page_ids`` as a row of the page table, padded with -1."""
    ids = jnp.asarray(page_ids)
    if ids.size and not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"page_ids must be ints, got dtype {ids.dtype}")
    if ids.ndim != 1 or ids.size > width:
        raise ValueError(f"page_ids must have shape [m], m at most the page table's {width}, got {list(ids.shape)}")
    return jnp.pad(ids.astype(jnp.int32), (0, width - ids.size), constant_values=-1)


def _is_row(row: Array, cache: KVCache) -> Array:
    return (row >= 0) & (row < cache.batch)


def _setter(row: Array) -> Callable[[Array, Any], Array]:
    """Sets entry ``row`` of an array; past its end, nothing."""
    return lambda array, value: array.at[row].set(value, mode="drop")


# --- The methods ------------------------------------------------------------------------------------------------------


def _pages_suffice(length: Any, fmt: KVFormat) -> Any:
    """Whether pages alone hold ``length`` tokens: none of them is kept exact."""
    none_stay_exact = fmt.sink_tokens == fmt.recent_tokens == 0
    return (length == 0) | (none_stay_exact & (length % fmt.token_group == 0))


def reset_row(cache: KVCache, row: int | Array, page_ids: Array | Sequence[int] | None, length: int | Array) -> KVCache:
    """``KVCache.reset_row``."""
    n = index("length", length, cache.capacity + 1)
    if isinstance(length, (int, np.integer)) and not _pages_suffice(length, cache.format):
        raise ValueError(
            f"length={length} tokens include exact ones under {str(cache.format)!r}, which pages do not hold: take the "
            "prefix from a row that has it, with copy_row, or write it"
        )
    row = index("row", row, cache.batch)
    put = _setter(jnp.where(_is_row(row, cache), row, cache.batch))
    lost = (n < 0) | (n > cache.capacity) | ~_pages_suffice(n, cache.format)
    table = cache.page_table
    return dataclasses.replace(
        cache,
        page_table=table if page_ids is None else put(table, _table_row(page_ids, table.shape[1])),
        length=put(cache.length, jnp.where(lost, cache.capacity + 1, n)),
        num_new=put(cache.num_new, 0),
        overflowed=put(cache.overflowed, lost),
    )


def copy_row(cache: KVCache, src: int | Array, dst: int | Array, page_ids: Array | Sequence[int] | None) -> KVCache:
    """``KVCache.copy_row``."""
    fmt, (num_pools, _, num_pages) = cache.format, cache.key.codes.shape[:3]
    batch, width = cache.page_table.shape
    src, dst = index("src", src, batch), index("dst", dst, batch)
    both = _is_row(src, cache) & _is_row(dst, cache)
    dst = jnp.clip(dst, 0, batch - 1)
    src = jnp.where(both, src, dst)  # out of range, a row is copied onto itself
    old, n = cache.page_table[src], cache.length[src]
    new = cache.page_table[dst] if page_ids is None else _table_row(page_ids, width)
    old_pool, new_pool = src * num_pools // batch, dst * num_pools // batch

    # Pages that hold tokens: those that both rows name are shared, the others are copied.
    start = jnp.arange(width, dtype=n.dtype) * fmt.page_size
    used = both & (start + fmt.page_size > fmt.sink_tokens) & (start < windows.quantized_length(n, fmt))
    valid = (old >= 0) & (old < num_pages) & (new >= 0) & (new < num_pages)
    copied = used & valid & ((old != new) | (old_pool != new_pool))
    order = jnp.flatnonzero(copied, size=width, fill_value=0)

    def in_place(array: Array, read: tuple[Any, ...], write: tuple[Any, ...], size: tuple[int, ...]) -> Array:
        # Behind a barrier the slice is not fused into its update, which would then copy the whole array first.
        block = lax.optimization_barrier(lax.dynamic_slice(array, read, size))
        return lax.dynamic_update_slice(array, block, write)

    def copy_page(i: Array, pools: Any) -> Any:
        page = order[i]

        def one(pool: Array) -> Array:
            rest = (0,) * (pool.ndim - 3)
            size = (1, pool.shape[1], 1, *pool.shape[3:])
            return in_place(pool, (old_pool, 0, old[page], *rest), (new_pool, 0, new[page], *rest), size)

        return jax.tree.map(one, pools)

    def copy_exact(exact: Array) -> Array:
        bits = lax.bitcast_convert_type(exact, jnp.uint16)  # JAX 0.10 on the CPU updates bfloat16 by way of float32
        bits = in_place(bits, (src, 0, 0, 0, 0), (dst, 0, 0, 0, 0), (1, *bits.shape[1:]))
        return lax.bitcast_convert_type(bits, exact.dtype)

    key, value = lax.fori_loop(0, copied.sum(), copy_page, (cache.key, cache.value))
    exact_key, exact_value = jax.tree.map(copy_exact, (cache.exact_key, cache.exact_value))
    lost = (used & ~valid).any()
    put, put_source = _setter(jnp.where(both, dst, batch)), _setter(jnp.where(both, src, batch))
    return dataclasses.replace(
        cache,
        key=key,
        value=value,
        exact_key=exact_key,
        exact_value=exact_value,
        page_table=put(cache.page_table, new),
        length=put(cache.length, jnp.where(lost, cache.capacity + 1, n)),
        num_new=put_source(put(cache.num_new, 0), 0),
        overflowed=put(cache.overflowed, cache.overflowed[src] | lost),
    )


def rollback(cache: KVCache, count: int | Array) -> KVCache:
    """``KVCache.rollback``."""
    fmt = cache.format
    if isinstance(count, (int, np.integer)) and fmt.keeps_exact and count > fmt.max_new:
        raise ValueError(
            f"count must be at most format.max_new={fmt.max_new}, got {count}: older exact tokens are gone, so create "
            "the cache with a format of larger max_new"
        )
    back = counts("count", count, cache.length.shape)
    reach = jnp.where(fmt.keeps_exact & (cache.num_new > fmt.max_new), 0, cache.num_new)
    lost = back > reach
    return dataclasses.replace(
        cache,
        length=jnp.where(lost, cache.capacity + 1, cache.length - back),
        num_new=jnp.where(lost, 0, cache.num_new - back),
        overflowed=cache.overflowed | lost,
    )
