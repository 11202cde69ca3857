"""The public attention function: names every misuse, then binds the primitive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax.numpy as jnp
import numpy as np
from jax import Array

from . import native, primitive, reference, tracing
from .cache import KVCache
from .format import _integer
from .visibility import UNBOUNDED, Options

_DTYPES = ("float32", "bfloat16", "float16")
_FLOAT32 = jnp.finfo(jnp.float32)


@overload
def decode_attention(
    q: Array,
    cache: KVCache,
    *,
    layer: int | Array = ...,
    scale: float | None = ...,
    is_causal: bool = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    logits_soft_cap: float | None = ...,
    sinks: Array | None = ...,
    query_lengths: Array | None = ...,
    tree_mask: Array | None = ...,
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
    is_causal: bool = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    logits_soft_cap: float | None = ...,
    sinks: Array | None = ...,
    query_lengths: Array | None = ...,
    tree_mask: Array | None = ...,
    return_residual: Literal[True],
    implementation: Literal["cuda", "cpu", "xla"] | None = ...,
) -> tuple[Array, Array]: ...
def decode_attention(
    q: Array,
    cache: KVCache,
    *,
    layer: int | Array = 0,
    scale: float | None = None,
    is_causal: bool = True,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    query_lengths: Array | None = None,
    tree_mask: Array | None = None,
    return_residual: bool = False,
    implementation: Literal["cuda", "cpu", "xla"] | None = None,
) -> Array | tuple[Array, Array]:
    """Attention of the newest tokens over everything cached: ``softmax(scale * q k^T) v``.

    Query j of T sits at the absolute position ``length - T + j`` and sees the tokens up to its own, so write the tokens
    first. T tokens at once (T up to ``format.max_new``) give what T single steps would have. ``docs/attention.md`` has
    the formula of each option; they combine freely.

    Args:
      q: ``[B, N, D]`` (one query a row) or ``[B, T, N, D]``, after RoPE; float32, bfloat16 or float16. N is a multiple
        of the cache's KV heads: query head n reads KV head ``n // (N // K)``.
      cache: the cache, with the queries' own tokens written.
      layer: which layer's keys and values; an int, or an integer scalar that may be traced.
      scale: multiplies the logits, ``1 / sqrt(D)`` by default; a Python number.
      is_causal: False lets every query see all ``length`` tokens of its row.
      local_window_size: ``(left, right)``: a query at position p sees the tokens ``p - left <= t <= p + right``; an int
        w is ``(w, w)``, and ``right`` counts only where ``is_causal=False``. p is absolute (jax.nn aligns the window to
        the query's index, which is wrong for decoding): Hugging Face's ``sliding_window=W`` is ``(W - 1, 0)``,
        FlashInfer's ``window_left=W`` is ``(W, 0)``. Pages outside every query's window are not read. It hides the
        format's ``sink_tokens``, too: they are exact, not always visible.
      logits_soft_cap: the scaled logits become ``cap * tanh(logit / cap)``; a Python number above 0.
      sinks: float ``[N]``, one more logit a head (neither scaled nor capped) that joins the softmax's denominator and
        has no value, as in gpt-oss; counted in the residual, so where states are merged only one part may have it.
      query_lengths: int ``[B]``: only the first ``query_lengths[b]`` (clipped to ``[0, T]``) queries of row b are real,
        query j at position ``length - query_lengths[b] + j``. The others are padding, which may hold anything.
      tree_mask: bool ``[T, T]`` or ``[B, T, T]``, for speculative trees: among the row's last T (or ``query_lengths``)
        tokens, the drafts, query j sees draft i iff ``tree_mask[..., j, i]``, instead of those up to its own; all older
        tokens it sees as ever. For windows and exact tokens its position is that of its depth, ``length - T`` plus the
        drafts it sees but for itself. A lower triangle is the causal rule.
      return_residual: also return the log-sum-exp of the logits.
      implementation: None takes the kernel of the platform that the program is compiled for, and plain jnp where there
        is none (TPU, ROCm). "cuda" and "cpu" insist on that kernel; "xla" is plain jnp everywhere.

    Returns:
      ``[B, N, value_head_dim]`` or ``[B, T, N, value_head_dim]``, of q's dtype; with ``return_residual`` also the
      natural log-sum-exp, float32 ``[B, N]`` or ``[B, T, N]``. A query that sees no token gives 0 and -inf (or its
      sink), padding 0 and -inf. A query or sink that is not finite gives NaN (a sink of -inf is none), and so does
      every query of a row that outgrew the cache, names a page out of range that it would read, or reads a layer out of
      range.

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
    queries = jnp.asarray(q)
    if queries.ndim == 3:
        queries = queries[:, None]
    options = _options(float(scale), is_causal, local_window_size, logits_soft_cap, queries.shape[1])
    if tree_mask is not None and not is_causal:
        raise ValueError("tree_mask replaces the causal rule among the drafts: leave is_causal=True, got False")
    native.check_implementation(implementation)
    batch, num_queries, num_heads, _ = queries.shape
    tree = (num_queries, num_queries)
    sinks = _checked("sinks", sinks, _DTYPES, (num_heads,))
    query_lengths = _checked("query_lengths", query_lengths, ("integer",), (batch,))
    tree_mask = _checked("tree_mask", tree_mask, ("bool",), tree, (batch, *tree))
    tracing.refuse_explicit_sharding(
        "decode_attention",
        q=q,
        cache=cache.key.codes,
        sinks=sinks,
        query_lengths=query_lengths,
        tree_mask=tree_mask,
    )

    operands = primitive.Operands(
        q=queries,
        key_codes=cache.key.codes,
        key_params=cache.key.params,
        value_codes=cache.value.codes,
        value_params=cache.value.params,
        page_table=cache.page_table,
        length=cache.length,
        layer=cache._layer_operand(layer),
        exact_key=cache.exact_key,
        exact_value=cache.exact_value,
        # Rows of these are the batch's, or one for all (row rule).
        sinks=None if sinks is None else sinks[None].astype(jnp.float32),
        query_lengths=None if query_lengths is None else query_lengths.astype(jnp.int32),
        tree_mask=tree_mask[None] if tree_mask is not None and tree_mask.ndim == 2 else tree_mask,
    )
    fmt, dim = cache.format, cache.value_head_dim
    if implementation == "xla":
        out, lse = reference.attend(*operands, fmt=fmt, options=options, value_head_dim=dim)
    else:
        out, lse = primitive.bind(operands, fmt=fmt, options=options, value_head_dim=dim, implementation=implementation)
    if q.ndim == 3:
        out, lse = out[:, 0], lse[:, 0]
    return (out, lse) if return_residual else out


def _options(scale: float, is_causal: Any, window: Any, soft_cap: Any, num_queries: int) -> Options:
    """The static options, checked and normalised."""
    if not isinstance(is_causal, (bool, np.bool_)):
        raise TypeError(f"is_causal must be True or False, not traced, got {is_causal!r}")
    if window is None:
        left = right = UNBOUNDED
    else:
        pair = window if isinstance(window, (tuple, list)) else (window, window)
        if len(pair) != 2:
            raise ValueError(f"local_window_size must be an int or a pair (left, right), got {window!r}")
        left, right = (min(_integer("local_window_size", side, 0), UNBOUNDED) for side in pair)
    if soft_cap is None:
        cap = 0.0
    elif not isinstance(soft_cap, (int, float, np.number)):
        raise TypeError(f"logits_soft_cap must be None or a Python number, not traced, got {soft_cap!r}")
    elif not _FLOAT32.tiny <= soft_cap <= _FLOAT32.max:
        raise ValueError(f"logits_soft_cap must be finite and above 0 (None is no cap), got {soft_cap!r}")
    else:
        cap = float(soft_cap)
    # One query a row is the newest token: it sees all that there are with or without the causal rule.
    is_causal = bool(is_causal) or num_queries == 1
    return Options(scale, is_causal, (left, UNBOUNDED if is_causal else right), cap)


def _checked(name: str, x: Any, kinds: tuple[str, ...], *shapes: tuple[int, ...]) -> Array | None:
    """``x`` as an array, where it has one of the dtypes ("integer": any) and shapes; None where it was not given."""
    if x is None:
        return None
    got = getattr(x, "dtype", None)
    if got is None or ("integer" if jnp.issubdtype(got, jnp.integer) else got.name) not in kinds:
        raise TypeError(
            f"{name} must be an array of {', '.join(kinds)}, got {type(x).__name__ if got is None else got}"
        )
    if x.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} must have shape {expected}, got {list(x.shape)}")
    return jnp.asarray(x)


def merge_states(states: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Attention over the union of disjoint sets of tokens, from the attention over each.

    ``out = sum_i exp(lse_i - lse) out_i`` with ``lse = log(sum_i exp(lse_i))``, in float32. A part without tokens (lse
    -inf) adds nothing. The log-sum-exp is the natural one; FlashInfer's is base 2 (multiply it by ``log(2)`` first).
    Sinks belong to one part only: the others are called without them.

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
