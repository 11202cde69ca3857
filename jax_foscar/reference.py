"""Decode attention in plain jnp: what the kernels are held against, and what runs where there is no kernel.

It dequantizes every page the table names, so its memory grows with the cache; the kernels' does not.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from . import layout, quantize, visibility, windows
from .format import KVFormat, Quant
from .visibility import Options


def expand_rows(x: Array, batch: int) -> Array:
    """The row rule: entry ``r * X // batch`` of an operand with X rows, for each row r."""
    return x if x.shape[0] == batch else jnp.repeat(x, batch // x.shape[0], axis=0)


def _flat_pools(x: Array, page_axes: int) -> Array:
    """Pages ``[..., U, L, P, K, *page axes]`` with one pool axis: the axes that vmap put before U count as pools."""
    return x.reshape(-1, *x.shape[-3 - page_axes :])


def dequantize_pages(codes: Array, params: Array | None, operand: layout.Operand, quant: Quant, head_dim: int) -> Array:
    """Pages ``[..., page, bytes]`` to float32 tokens ``[..., page, D]``."""
    values = layout.unpack(codes, operand, quant.bits, head_dim)
    if not quant.quantized:
        return values.astype(jnp.float32)
    assert params is not None
    return quantize.dequantize(values, params, quant)


def attend(
    q: Array,
    key_codes: Array,
    key_params: Array | None,
    value_codes: Array,
    value_params: Array | None,
    page_table: Array,
    length: Array,
    layer: Array,
    exact_key: Array | None,
    exact_value: Array | None,
    sinks: Array | None,
    query_lengths: Array | None,
    tree_mask: Array | None,
    *,
    fmt: KVFormat,
    options: Options,
    value_head_dim: int,
) -> tuple[Array, Array]:
    """Attention over the dequantized cache, in float32; operands and row rule as in ``primitive.py``.

    Returns:
      ``(out [B, T, N, value_head_dim] of q's dtype, lse [B, T, N] float32)``.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_pools, num_layers, num_pages, num_kv_heads, page_size = _flat_pools(key_codes, 2).shape[:5]
    table, n = expand_rows(page_table, batch), jnp.maximum(expand_rows(length, batch), 0)
    layer = expand_rows(layer, batch)
    pool = jnp.arange(batch) * num_pools // batch
    safe_layer = jnp.clip(layer, 0, num_layers - 1)

    def tokens(codes: Array, params: Array | None, operand: layout.Operand, quant: Quant, dim: int) -> Array:
        """Every page of the table, ``[B, K, M * page, D]``."""
        index = (pool[:, None], safe_layer[:, None], jnp.clip(table, 0, num_pages - 1))
        params = None if params is None else _flat_pools(params, 3)[index]
        x = dequantize_pages(_flat_pools(codes, 2)[index], params, operand, quant, dim)
        return x.swapaxes(1, 2).reshape(batch, num_kv_heads, -1, dim)

    keys = tokens(key_codes, key_params, "key", fmt.key, head_dim)
    values = tokens(value_codes, value_params, "value", fmt.value, value_head_dim)

    # What each query sees of the paged tokens [S]; queries [B, T, 1].
    given = None if query_lengths is None else expand_rows(query_lengths, batch)
    count = visibility.query_counts(given, num_queries, n)
    tree = None if tree_mask is None else expand_rows(tree_mask, batch)
    sight = visibility.visible(n, count, tree, num_queries, fmt, options)
    paged = jnp.arange(keys.shape[2], dtype=n.dtype)[None, None]
    visible = sight.sees(paged) & (paged >= fmt.sink_tokens) & (paged < sight.boundary)

    if exact_key is not None and exact_value is not None:
        row = jnp.arange(batch)
        rows_of = lambda x: x.reshape(-1, *x.shape[-4:])[row * exact_key.shape[0] // batch, safe_layer]  # noqa: E731
        keys = jnp.concatenate([keys, rows_of(exact_key).astype(jnp.float32)], axis=2)
        values = jnp.concatenate([values, rows_of(exact_value).astype(jnp.float32)], axis=2)
        held = windows.slot_tokens(n, fmt)[:, None]
        exact = (held >= 0) & sight.sees(held) & ((held < fmt.sink_tokens) | (held >= sight.boundary))
        visible = jnp.concatenate([visible, exact], axis=-1)

    # What a query does not see may hold anything and must not reach it, not even as 0 * NaN: values that are not finite
    # are taken out of the sum, and counted for those that do see them.
    visible = visible[:, None, None]  # [B, 1, 1, T, S]
    finite = jnp.isfinite(values)

    queries = q.astype(jnp.float32).reshape(batch, num_queries, num_kv_heads, -1, head_dim)
    highest = lax.Precision.HIGHEST
    logits = jnp.einsum("btkgd,bksd->bkgts", queries, keys, precision=highest) * jnp.float32(options.scale)
    if options.soft_cap:
        logits = jnp.tanh(logits / jnp.float32(options.soft_cap)) * jnp.float32(options.soft_cap)
    logits = jnp.where(visible, logits, -jnp.inf)
    peak = logits.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = expand_rows(sinks, batch).reshape(batch, num_kv_heads, -1, 1, 1)
        peak = jnp.maximum(peak, sink)
    base = jnp.where(jnp.isneginf(peak), 0, peak)
    weights = jnp.where(visible, jnp.exp(logits - base), 0)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - base)
    out = jnp.einsum("bkgts,bksd->bkgtd", weights, jnp.where(finite, values, 0), precision=highest)
    out = out / jnp.where(total == 0, 1, total)
    poisoned = jnp.einsum("bkgts,bksd->bkgtd", jnp.broadcast_to(visible, weights.shape).astype(jnp.float32),
                          (~finite).astype(jnp.float32))  # fmt: skip
    out = jnp.where(poisoned > 0, jnp.nan, out)
    lse = (peak + jnp.log(total))[..., 0]

    # A row that cannot be read as asked, or a query that is not finite, gives NaN instead of something plausible.
    pages = jnp.arange(table.shape[1], dtype=n.dtype) * page_size
    needed = jnp.maximum(visibility.first_visible(n, count, options), fmt.sink_tokens)
    used = (pages < windows.quantized_length(n, fmt)[:, None]) & (pages + page_size > needed[:, None])
    bad_row = (
        (n > table.shape[1] * page_size) | (layer != safe_layer) | (used & ((table < 0) | (table >= num_pages))).any(1)
    )
    bad = bad_row[:, None, None] | ~jnp.isfinite(q.astype(jnp.float32)).all(axis=-1)
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, num_queries, num_heads, value_head_dim)
    lse = lse.transpose(0, 3, 1, 2).reshape(batch, num_queries, num_heads)
    out, lse = jnp.where(bad[..., None], jnp.nan, out), jnp.where(bad, jnp.nan, lse)
    padding = (jnp.arange(num_queries) >= count[:, None])[..., None]
    return jnp.where(padding[..., None], 0, out).astype(q.dtype), jnp.where(padding, -jnp.inf, lse)
