"""Which tokens a query sees, and what else a call asks for: pure rules, shared by the primitive and the jnp reference.

``cuda/visibility.h`` states the same rules for the kernels.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from . import windows
from .format import KVFormat

UNBOUNDED = 2**31 - 1
"""A window's side without a limit."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a call asks for that is static.

    Attributes:
      scale: multiplies the logits.
      is_causal: a query sees no token after its own; otherwise all of the row's.
      window: tokens before and after a query's position that it sees, each ``UNBOUNDED`` where there is no limit.
      soft_cap: logits become ``soft_cap * tanh(logit / soft_cap)``; 0 leaves them.
    """

    scale: float
    is_causal: bool = True
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    soft_cap: float = 0.0


class Visible(NamedTuple):
    """What each query of each row sees, int32 ``[B, T, 1]``: tokens ``begin <= t < end``, drafts as ``drafts`` says.

    Tokens from ``boundary`` on, and the sink tokens, are read from the exact arrays. Draft token i of a row stands at
    ``first + i`` (``first`` is ``[B, 1, 1]``); ``drafts`` is bool ``[B, T, T]``, or None: all drafts are visible.
    """

    begin: Array
    end: Array
    boundary: Array
    first: Array
    drafts: Array | None

    def sees(self, tokens: Array) -> Array:
        """Whether each query sees the tokens at these positions, ``[B or 1, 1, S]`` to bool ``[B, T, S]``."""
        seen = (tokens >= self.begin) & (tokens < self.end)
        if self.drafts is None:
            return seen
        index = jnp.broadcast_to(tokens - self.first, seen.shape)
        draft = jnp.take_along_axis(self.drafts, jnp.clip(index, 0, self.drafts.shape[-1] - 1), axis=-1)
        return seen & ((index < 0) | draft)


def query_counts(query_lengths: Array | None, num_queries: int, n: Array) -> Array:
    """Real queries of each row, int32 ``[B]``: those given, clipped to ``[0, T]``, or T."""
    return jnp.full_like(n, num_queries) if query_lengths is None else jnp.clip(query_lengths, 0, num_queries)


def first_visible(n: Array, count: Array, options: Options) -> Array:
    """First token of each row that any of its queries may see; pages wholly before it may be anything."""
    first = jnp.maximum(n - count, options.window[0]) - options.window[0]
    return jnp.where(count == 0, n, first)


def visible(
    n: Array, count: Array, tree_mask: Array | None, num_queries: int, fmt: KVFormat, options: Options
) -> Visible:
    """What each query sees, in rows of ``n`` tokens of which the last ``count`` are the queries' own, both ``[B]``.

    In a tree a query's position is that of its depth: as many tokens further as it sees drafts, the newest of them
    standing for itself, and the window counts along that path. A tree that is a chain is the causal rule.
    """
    left, right = options.window
    n, count = n[:, None, None], count[:, None, None]
    first, query = n - count, jnp.arange(num_queries, dtype=n.dtype)[:, None]
    drafts = None
    if tree_mask is None:
        position = first + query
        begin = jnp.maximum(position, left) - left
        ahead = n - 1 - position  # tokens after the query's own
        end = position + 1 + (0 if options.is_causal else jnp.minimum(ahead, right))
    else:
        draft = jnp.arange(num_queries, dtype=n.dtype)
        drafts = tree_mask & (draft < count) & (first + draft >= 0)
        newer = jnp.cumsum(drafts[..., ::-1], axis=-1, dtype=n.dtype)[..., ::-1] - drafts  # drafts seen after each
        seen = drafts.sum(-1, keepdims=True, dtype=n.dtype)
        base = jnp.maximum(first, 0)
        position = base + jnp.maximum(seen - 1, 0)
        near = jnp.where(drafts & (newer <= left), first + draft, UNBOUNDED).min(-1, keepdims=True)
        begin = jnp.where(seen > left, near, jnp.maximum(position, left) - left)
        end = jnp.where(drafts, first + draft + 1, base).max(-1, keepdims=True)
    end = jnp.where(query < count, end, 0)
    newest = position if options.is_causal else n - 1
    boundary = windows.boundary(newest, n, fmt) if fmt.keeps_exact else n
    return Visible(begin, end, jnp.broadcast_to(boundary, end.shape), first, drafts)
