"""Which tokens of a row are exact and which are quantized: pure functions of its length.

With n tokens cached, R recent tokens and G the token group: tokens [S, quantized_length(n)) are quantized, the first S
and those from quantized_length(n) on are exact. ``cuda/windows.h`` states the same rules for the kernels.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from .format import KVFormat


def quantized_length(n: Array, fmt: KVFormat) -> Array:
    """First token that is not quantized once ``n`` tokens are cached."""
    group = fmt.token_group
    return jnp.maximum(n - fmt.recent_tokens, 0) // group * group


def boundary(position: Array, n: Array, fmt: KVFormat) -> Array:
    """First token that the query at ``position`` reads exactly, in a row of ``n`` tokens.

    What a cache of ``position + 1`` tokens would hold, so that T tokens at once equal T single steps, but never older
    than the ring.
    """
    own = quantized_length(position + 1, fmt)
    if not fmt.keeps_exact:
        return own
    group = fmt.token_group
    oldest = (jnp.maximum(n - fmt.ring, 0) + group - 1) // group * group
    return jnp.maximum(own, oldest)


def slot_tokens(n: Array, fmt: KVFormat) -> Array:
    """The newest token, of ``n`` cached, that each of the S + W slots holds, ``[..., S + W]``; negative where none."""
    n = jnp.asarray(n)[..., None]
    sinks = jnp.broadcast_to(jnp.arange(fmt.sink_tokens, dtype=n.dtype), (*n.shape[:-1], fmt.sink_tokens))
    sinks = jnp.where(sinks < n, sinks, -1)
    ring = n - 1 - (n - 1 - jnp.arange(fmt.ring, dtype=n.dtype)) % fmt.ring
    return jnp.concatenate([sinks, jnp.where(ring >= fmt.sink_tokens, ring, -1)], axis=-1)
