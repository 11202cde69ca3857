"""The public attention function: names every misuse, then binds the primitive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, overload

import jax.numpy as jnp
import numpy as np
from jax import Array

from . import native, primitive, reference, tracing
from .cache import KVCache

_DTYPES = ("float32", "bfloat16", "float16")


@overload
def decode_attention(
    q: Array,
    cache: KVCache,
    *,
    layer: int | Array = ...,
    scale: float | None = ...,
    return_residual: Literal[False] = ...,
    implementation: Literal["cuda", "cpu", "xla"] | None = ...,
) -> Array: ...
@overload
def decode_attention(
    q: Array,
    cache: KVCache,
    *,
    layer: int | Array = ...,
    scale: float | None = ...,
    return_residual: Literal[True],
    implementation: Literal["cuda", "cpu", "xla"] | None = ...,
) -> tuple[Array, Array]: ...
def decode_attention(
    q: Array,
    cache: KVCache,
    *,
    layer: int | Array = 0,
    scale: float | None = None,
    return_residual: bool = False,
    implementation: Literal["cuda", "cpu", "xla"] | None = None,
) -> Array | tuple[Array, Array]:
    """Attention of the newest tokens over everything cached: ``softmax(scale * q k^T) v``.

    Query j of T sits at the absolute position ``length - T + j`` and sees the tokens up to its own, so write the tokens
    first. T tokens at once (T up to ``format.max_new``) give what T single steps would have.

    Args:
      q: ``[B, N, D]`` (one query a row) or ``[B, T, N, D]``, after RoPE; float32, bfloat16 or float16. N is a multiple
        of the cache's KV heads: query head n reads KV head ``n // (N // K)``.
      cache: the cache, with the queries' own tokens written.
      layer: which layer's keys and values; an int, or an integer scalar that may be traced.
      scale: multiplies the logits, ``1 / sqrt(D)`` by default; a Python number.
      return_residual: also return the log-sum-exp of the logits.
      implementation: None takes the kernel of the platform that the program is compiled for, and plain jnp where there
        is none (TPU, ROCm). "cuda" and "cpu" insist on that kernel; "xla" is plain jnp everywhere.

    Returns:
      ``[B, N, value_head_dim]`` or ``[B, T, N, value_head_dim]``, of q's dtype; with ``return_residual`` also the
      natural log-sum-exp, float32 ``[B, N]`` or ``[B, T, N]``. A query before the first token gives 0 and -inf. A query
      that is not finite gives NaN, and so does every query of a row that outgrew the cache, names a page out of range,
      or reads a layer out of range.

    Raises:
      TypeError, ValueError: an argument of the wrong type, dtype, shape or value.
      RuntimeError: the program is compiled for a platform whose module was not built.
      NotImplementedError: differentiated.
    """
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be a KVCache, got {type(cache).__name__}")
    cache._check_arrays()
    if not hasattr(q, "dtype") or q.dtype.name not in _DTYPES:
        raise TypeError(f"q must be an array of {', '.join(_DTYPES)}, got {getattr(q, 'dtype', type(q).__name__)}")
    if q.ndim not in (3, 4) or q.shape[0] != cache.batch or q.shape[-1] != cache.head_dim:
        raise ValueError(
            f"q must have shape [{cache.batch}, N, {cache.head_dim}] or [{cache.batch}, T, N, {cache.head_dim}], "
            f"got {list(q.shape)}"
        )
    if q.shape[-2] == 0 or q.shape[-2] % cache.num_kv_heads:
        raise ValueError(
            f"q has {q.shape[-2]} heads, which must be a multiple of the cache's {cache.num_kv_heads} KV heads"
        )
    if scale is None:
        scale = 1 / math.sqrt(cache.head_dim)
    elif not isinstance(scale, (int, float, np.number)) or not math.isfinite(scale):
        raise TypeError(f"scale must be a finite Python number (multiply q by a traced one), got {scale!r}")
    native.check_implementation(implementation)
    tracing.refuse_explicit_sharding("decode_attention", q=q, cache=cache.key.codes)

    queries = jnp.asarray(q)
    operands = primitive.Operands(
        q=queries if queries.ndim == 4 else queries[:, None],
        key_codes=cache.key.codes,
        key_params=cache.key.params,
        value_codes=cache.value.codes,
        value_params=cache.value.params,
        page_table=cache.page_table,
        length=cache.length,
        layer=cache._layer_operand(layer),
        exact_key=cache.exact_key,
        exact_value=cache.exact_value,
    )
    fmt, dim, scale = cache.format, cache.value_head_dim, float(scale)
    if implementation == "xla":
        out, lse = reference.attend(*operands, fmt=fmt, scale=scale, value_head_dim=dim)
    else:
        out, lse = primitive.bind(operands, fmt=fmt, scale=scale, value_head_dim=dim, implementation=implementation)
    if queries.ndim == 3:
        out, lse = out[:, 0], lse[:, 0]
    return (out, lse) if return_residual else out


def merge_states(states: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Attention over the union of disjoint sets of tokens, from the attention over each.

    ``out = sum_i exp(lse_i - lse) out_i`` with ``lse = log(sum_i exp(lse_i))``, in float32. A part without tokens (lse
    -inf) adds nothing. The log-sum-exp is the natural one; FlashInfer's is base 2 (multiply it by ``log(2)`` first).

    Args:
      states: ``(out [..., D], lse [...])`` of each part, as ``decode_attention(..., return_residual=True)`` gives them.

    Returns:
      ``(out [..., D] of the first part's dtype, lse float32 [...])``.

    Raises:
      ValueError: no part, or shapes that differ.
    """
    states = list(states)
    if not states:
        raise ValueError("states must hold at least one (out, lse) pair, got none")
    shape = states[0][0].shape
    for i, (out, lse) in enumerate(states):
        if out.shape != shape or lse.shape != shape[:-1]:
            raise ValueError(f"states[{i}] must have shapes {shape} and {shape[:-1]}, got {out.shape} and {lse.shape}")
    lses = jnp.stack([lse.astype(jnp.float32) for _, lse in states])
    peak = lses.max(axis=0)
    weights = jnp.exp(lses - jnp.where(jnp.isneginf(peak), 0, peak))
    total = weights.sum(axis=0)
    # A part that is weighted 0 may hold anything.
    parts = [jnp.where(w[..., None] == 0, 0, w[..., None] * out.astype(jnp.float32))
             for w, (out, _) in zip(weights, states, strict=True)]  # fmt: skip
    merged = sum(parts) / jnp.where(total == 0, 1, total)[..., None]
    return jnp.asarray(merged).astype(states[0][0].dtype), peak + jnp.log(total)
