"""The attention hooks: how a KV cache is plugged into a model that knows nothing of it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_foscar import KVCache, KVFormat, decode_attention
from smollm2.model import AttentionHook, Config
from smollm2.plain_cache import PlainCache, plain_decode_attention

Cache = KVCache | PlainCache

FORMATS = {"bf16": "k16,v16", "int4": "k4c64,v4t64", "int2": "k2c32,v2t32"}


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, block: int = 512) -> jax.Array:
    """`jax.nn.dot_product_attention(q, k, v, is_causal=True)`, whose logits would take gigabytes for a long prompt,
    a block of queries at a time: q [B, T, N, D] with T up to `block`, or a multiple of it."""
    batch, length, heads, dim = q.shape
    if length <= block:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    def attend(queries: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, position = queries  # [B, block, N, D], [block]
        return jax.nn.dot_product_attention(q, k, v, mask=(jnp.arange(length) <= position[:, None])[None, None])

    blocks = q.reshape(batch, -1, block, heads, dim).swapaxes(0, 1)
    out = jax.lax.map(attend, (blocks, jnp.arange(length).reshape(-1, block)))
    return out.swapaxes(0, 1).reshape(q.shape)


def prefill_hook(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, layer: jax.Array) -> tuple[jax.Array, Any]:
    """For the first tokens of an empty cache: they are all at hand, so attend to them as they are."""
    cache = cache.write(k, v, layer=layer)
    # Padding stands on the right, where causal attention of the real tokens does not look.
    return causal_attention(q, k, v), cache


def foscar_hook(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, layer: jax.Array) -> tuple[jax.Array, Any]:
    """For every later step: q [B, T, N, D] and k, v [B, T, K, D] are the newest tokens. Write first, then attend."""
    cache = cache.write(k, v, layer=layer)
    return decode_attention(q, cache, layer=layer), cache


def row_hook(row: jax.Array) -> AttentionHook:
    """For a prompt that enters one row of a larger cache: q [1, T, N, D], which the model computes for that row alone.

    `advance` has counted 0 tokens in all other rows, so that nothing is written there, and nothing read.
    """

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, layer: jax.Array) -> tuple[jax.Array, Any]:
        q, k, v = (jnp.zeros((cache.batch, *x.shape[1:]), x.dtype).at[row].set(x[0]) for x in (q, k, v))
        cache = cache.write(k, v, layer=layer)
        return decode_attention(q, cache, layer=layer, query_lengths=cache.num_new)[row][None], cache

    return attend


def plain_hook(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, layer: jax.Array) -> tuple[jax.Array, Any]:
    """The same through the float32 control."""
    cache = cache.write(k, v, layer=layer)
    return plain_decode_attention(q, cache, layer=layer), cache


def parse_kv(kv: str) -> KVFormat | None:
    """`f32` is None, the control; `bf16`, `int4`, `int2` are short for formats; all else is a format string."""
    return None if kv == "f32" else KVFormat.parse(FORMATS.get(kv, kv))


def decode_hook(fmt: KVFormat | None) -> AttentionHook:
    return plain_hook if fmt is None else foscar_hook


def create_cache(fmt: KVFormat | None, config: Config, *, batch: int, max_length: int) -> Cache:
    create = PlainCache.create if fmt is None else partial(KVCache.create, fmt)
    return create(batch=batch, max_length=max_length, **sizes(config))


def create_paged_cache(fmt: KVFormat, config: Config, *, num_pages: int, batch: int, max_length: int) -> KVCache:
    return KVCache.create_paged(fmt, num_pages=num_pages, batch=batch, max_length=max_length, **sizes(config))


def sizes(config: Config) -> dict[str, int]:
    """What a cache must know of the model."""
    return {"num_layers": config.num_layers, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
