"""A prompt that many rows share, cached once: attention over it for the whole batch, merged with each row's own.

    python examples/shared_prefix.py

The prefix is a cache of one row; the queries of all rows become its T axis, so that it is read once a step. Each part
is a softmax over its own tokens with its log-sum-exp, and ``merge_states`` joins the two: the result is attention over
one long row. Attention sinks would go to one of the parts only, and windows count within a part: the function has
neither.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_foscar import KVCache, KVFormat, decode_attention, merge_states

FORMAT = KVFormat.parse("k4t,v4t")
KV_HEADS, HEADS, DIM = 2, 8, 64


def shared_prefix_attention(q: jax.Array, prefix: KVCache, own: KVCache, *, layer: int | jax.Array = 0) -> jax.Array:
    """Attention of q ``[B, T, N, D]`` over the tokens of ``prefix`` (one row), then those of its row in ``own``."""
    # Every query comes after the whole prefix, so it sees all of it: no causal rule there.
    joined = q.reshape(1, -1, *q.shape[2:])
    out, lse = decode_attention(joined, prefix, layer=layer, is_causal=False, return_residual=True)
    shared = out.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])
    return merge_states([shared, decode_attention(q, own, layer=layer, return_residual=True)])[0]


def tokens(key: jax.Array, batch: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values ``[B, count, K, D]``; a model would rotate keys by their position after the prefix."""
    k, v = jax.random.normal(key, (2, batch, count, KV_HEADS, DIM))
    return k, v


def filled(batch: int, max_length: int, *parts: tuple[jax.Array, jax.Array, jax.Array]) -> KVCache:
    """A cache with the tokens (k, v, how many of them a row) of all parts, one after the other."""
    cache = KVCache.create(
        FORMAT, batch=batch, max_length=max_length, num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM
    )
    write = jax.jit(lambda cache, k, v, counts: cache.advance(counts).write(k, v, layer=0))
    for part in parts:
        cache = write(cache, *part)
    return cache


def main() -> None:
    """Compares the two levels with one cache that holds everything, and says what is saved."""
    keys = jax.random.split(jax.random.key(0), 3)
    batch, length = 4, 600
    own_lengths = jnp.array([3, 64, 20, 41])
    k, v = tokens(keys[0], 1, length)
    own = tokens(keys[1], batch, 64)
    q = jax.random.normal(keys[2], (batch, 2, HEADS, DIM))

    prefix = filled(1, 640, (k, v, jnp.array([length])))
    rows = filled(batch, 64, (*own, own_lengths))
    repeated = [jnp.repeat(x, batch, axis=0) for x in (k, v)]
    whole = filled(batch, 704, (*repeated, jnp.full(batch, length)), (*own, own_lengths))

    out = jax.jit(shared_prefix_attention)(q, prefix, rows)
    error = jnp.abs(out - decode_attention(q, whole)).max()
    print(f"largest difference from one cache: {error:.1e}")
    print(f"cache: {prefix.nbytes + rows.nbytes} bytes instead of {whole.nbytes}")
    assert error < 1e-3


if __name__ == "__main__":
    main()
