"""The control: a float32 KV cache in plain JAX, with the methods of `jax_foscar.KVCache` that the examples use."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PlainCache:
    key: jax.Array  # [L, B, S, K, D], S tokens of capacity
    value: jax.Array  # [L, B, S, K, D]
    length: jax.Array  # [B] tokens cached
    num_new: jax.Array  # [B] tokens of this step

    @classmethod
    def create(cls, *, batch: int, max_length: int, num_layers: int, num_kv_heads: int, head_dim: int) -> Self:
        shape = (num_layers, batch, max_length, num_kv_heads, head_dim)
        # Every array has a buffer of its own: a buffer cannot be donated twice.
        return cls(jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))

    def advance(self, count: int | jax.Array) -> Self:
        num_new = jnp.broadcast_to(jnp.asarray(count, jnp.int32), self.length.shape)
        return dataclasses.replace(self, length=self.length + num_new, num_new=num_new)

    def positions(self, num_tokens: int) -> jax.Array:
        return (self.length - self.num_new)[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)  # [B, T]

    def write(self, k: jax.Array, v: jax.Array, *, layer: int | jax.Array) -> Self:
        """k, v [B, T, K, D]; of each row the first `num_new` tokens count, the rest is padding and dropped."""
        position = self.positions(k.shape[1])
        position = jnp.where(position < self.length[:, None], position, self.key.shape[2])
        at = (layer, jnp.arange(k.shape[0])[:, None], position)
        return dataclasses.replace(
            self, key=self.key.at[at].set(k, mode="drop"), value=self.value.at[at].set(v, mode="drop")
        )

    @property
    def nbytes(self) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))


def plain_decode_attention(q: jax.Array, cache: PlainCache, *, layer: int | jax.Array) -> jax.Array:
    """q [B, T, N, D]: the newest T tokens attend to the cache."""
    query = cache.positions(q.shape[1])  # [B, T]
    visible = jnp.arange(cache.key.shape[2]) <= query[:, None, :, None]  # [B, 1, T, S]
    return jax.nn.dot_product_attention(q, cache.key[layer], cache.value[layer], mask=visible)
