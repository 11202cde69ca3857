"""The SmolLM2 (Llama) transformer, with the attention left open.

The model does not know how keys and values are cached. It hands every layer's `q, k, v` to an attention hook together
with a state that it only passes along; the state (the cache) rides in the carry of the scan over layers, so that XLA
updates it in place:

    hook(q, k, v, state, layer) -> (out, state)      # first write k, v to the state, then attend

Axes: B rows of a batch, T tokens, E embedding, L layers, N query heads, K key/value heads, D head dim, F feed-forward,
V vocabulary. A KV cache keeps keys after RoPE, so a cached key never changes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]
AttentionHook = Callable[[jax.Array, jax.Array, jax.Array, Any, jax.Array], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class Config:
    num_layers: int  # L
    embed_dim: int  # E
    ffn_dim: int  # F
    num_heads: int  # N
    num_kv_heads: int  # K, each shared by N / K query heads
    head_dim: int  # D
    vocab_size: int  # V
    context_length: int
    rope_theta: float
    norm_eps: float


def param_shapes(config: Config) -> Params:
    """The shapes of the parameter pytree. Every array of `layers` is stacked over layers, for `lax.scan`."""
    c = config
    layers = {
        "attn_norm": (c.embed_dim,),
        "q": (c.embed_dim, c.num_heads * c.head_dim),
        "k": (c.embed_dim, c.num_kv_heads * c.head_dim),
        "v": (c.embed_dim, c.num_kv_heads * c.head_dim),
        "o": (c.num_heads * c.head_dim, c.embed_dim),
        "ffn_norm": (c.embed_dim,),
        "gate": (c.embed_dim, c.ffn_dim),
        "up": (c.embed_dim, c.ffn_dim),
        "down": (c.ffn_dim, c.embed_dim),
    }
    return {
        "embedding": (c.vocab_size, c.embed_dim),  # also the output projection: the two are tied
        "layers": {name: (c.num_layers, *shape) for name, shape in layers.items()},
        "final_norm": (c.embed_dim,),
    }


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotates channel i together with channel i + D/2; x [B, T, heads, D], positions [B, T]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half) / half)  # [D/2]
    angle = positions[..., None, None] * frequency  # [B, T, 1, D/2]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def forward(
    params: Params, config: Config, tokens: jax.Array, positions: jax.Array, attention: AttentionHook, state: Any
) -> tuple[jax.Array, Any]:
    """Runs tokens [B, T] at positions [B, T] through all layers; returns hidden [B, T, E] and the hook's new state."""

    def split_heads(x: jax.Array) -> jax.Array:  # [B, T, heads * D] -> [B, T, heads, D]
        return x.reshape(*x.shape[:2], -1, config.head_dim)

    def block(carry, w: Params):
        x, state, layer = carry
        h = rms_norm(x, w["attn_norm"], config.norm_eps)
        q = rope(split_heads(h @ w["q"]), positions, config.rope_theta)  # [B, T, N, D]
        k = rope(split_heads(h @ w["k"]), positions, config.rope_theta)  # [B, T, K, D]
        v = split_heads(h @ w["v"])  # [B, T, K, D]
        out, state = attention(q, k, v, state, layer)  # [B, T, N, D]
        x = x + out.reshape(*out.shape[:2], -1) @ w["o"]
        h = rms_norm(x, w["ffn_norm"], config.norm_eps)
        x = x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
        return (x, state, layer + 1), None

    x = params["embedding"][tokens]  # [B, T, E]
    (x, state, _), _ = jax.lax.scan(block, (x, state, jnp.int32(0)), params["layers"])
    return rms_norm(x, params["final_norm"], config.norm_eps), state


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """hidden [..., E] -> logits [..., V]. Apart from `forward`, so that prefill can ask for the last token only."""
    return jnp.einsum("...e,ve->...v", hidden, params["embedding"])  # XLA's CPU backend would copy `embedding.T`
