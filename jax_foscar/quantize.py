"""Affine quantization of token arrays: ``x = scale * code + offset``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .format import KVFormat, Quant


def _grouped(x: Array, quant: Quant) -> Array:
    """``[..., T, D]`` with the group as an axis of its own: ``[..., T, D/g, g]`` or ``[..., T/g, g, D]``."""
    *lead, tokens, dim = x.shape
    if quant.per == "token":
        group = quant.group_size(dim)
        return x.reshape(*lead, tokens, dim // group, group)
    group = quant.group_size(dim)
    return x.reshape(*lead, tokens // group, group, dim)


def _check_tokens(name: str, x: Array, quant: Quant) -> None:
    if x.ndim < 2:
        raise ValueError(f"{name} must be [..., tokens, channels], got shape {x.shape}")
    axis, what = (-1, "channels") if quant.per == "token" else (-2, "tokens")
    if x.shape[axis] % quant.group_size(x.shape[-1]):
        raise ValueError(f"{name} has {x.shape[axis]} {what}, which is not a multiple of group={quant.group}")


def quantize(
    x: Array, quant: Quant, *, param_dtype: Any = np.float16, where: Array | None = None
) -> tuple[Array, Array]:
    """Quantizes tokens to 2 or 4 bits.

    Each group keeps ``offset = min(x)`` and ``scale = (max(x) - offset) / (2**bits - 1)``, both rounded to
    ``param_dtype``; codes are the nearest to ``x`` under the *rounded* scale and offset. ``cuda/quantize.h`` states
    the same rule for the kernels.

    - A constant group has scale 0 and codes 0: it comes back as the stored offset.
    - Parameters saturate at the largest finite value of ``param_dtype`` (float16: 65504): groups beyond it are clipped,
      never infinite; use float32 parameters for them. A scale too small for ``param_dtype`` becomes 0, which costs at
      most ``2**bits * 2**-25`` with float16.
    - A group that holds NaN or inf gets scale and offset NaN, so its tokens come back as NaN: per token that is the one
      token (its group of channels), per channel all the group's tokens in that channel.

    Args:
      x: ``[..., T, D]``, floating.
      quant: 2 or 4 bits; its group must divide D (per token) or T (per channel).
      param_dtype: float16 or float32.
      where: bool ``[..., T, 1]``, tokens that a channel group's range is taken over; all by default.

    Returns:
      ``(codes, params)``: codes uint8 ``[..., T, D]``, one a byte; params ``[..., T, D/group, 2]`` per token or
      ``[..., T/group, D, 2]`` per channel, scale and offset interleaved.

    Raises:
      ValueError: 16 bits, or a shape that the group does not divide.
    """
    if not isinstance(quant, Quant) or not quant.quantized:
        raise ValueError(f"quant must be a Quant of 2 or 4 bits, got {quant!r}")
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x must be floating, got {x.dtype}")
    _check_tokens("x", x, quant)
    groups = _grouped(x.astype(jnp.float32), quant)
    axis = -1 if quant.per == "token" else -2
    low_of, high_of, is_finite = groups, groups, jnp.isfinite(groups)
    if where is not None:
        kept = _grouped(jnp.broadcast_to(where, x.shape), quant)
        low_of, high_of = jnp.where(kept, groups, jnp.inf), jnp.where(kept, groups, -jnp.inf)
        is_finite |= ~kept
    low, high = low_of.min(axis, keepdims=True), high_of.max(axis, keepdims=True)
    if where is not None:  # a group without tokens
        empty = ~kept.any(axis, keepdims=True)
        low, high = jnp.where(empty, 0, low), jnp.where(empty, 0, high)
    finite = is_finite.all(axis, keepdims=True)  # not from low and high: XLA's CPU minimum may drop NaN

    limit = float(jnp.finfo(param_dtype).max)

    def store(value: Array) -> Array:
        # Without the barrier XLA on a GPU drops the rounding where it converts back (xla_allow_excess_precision).
        stored: Array = lax.optimization_barrier(jnp.clip(value, -limit, limit).astype(param_dtype))
        return stored

    offset = store(jnp.where(low == 0, 0, low))  # not -0, which a minimum may or may not pick
    # Compilers may contract to FMA and divide by multiplying: here neither changes a bit. A quarter is exact, is what
    # keeps the range inside float32, and each product that rounds comes last; what is divided by is said.
    quarter = offset.astype(jnp.float32) * 0.25
    scale = store(jnp.where(high > low, (high * 0.25 - quarter) * np.float32(4 / quant.levels), 0))
    scale = jnp.where(scale > 0, scale, 0)
    step = scale.astype(jnp.float32)
    inverse = jnp.where(step > 0, 4 / jnp.where(step > 0, step, 1), 0)
    steps = (groups * 0.25 - quarter) * inverse
    codes = jnp.clip(jnp.round(steps), 0, quant.levels)
    codes = jnp.where(finite & (codes >= 0), codes, 0).astype(jnp.uint8)  # NaN has no code
    params = jnp.stack([jnp.where(finite, scale, jnp.nan), jnp.where(finite, offset, jnp.nan)], axis=-1)
    return codes.reshape(x.shape), jnp.squeeze(params, axis - 1)


def dequantize(codes: Array, params: Array, quant: Quant) -> Array:
    """``scale * code + offset`` in float32, ``[..., T, D]``: the inverse of ``quantize`` up to rounding.

    Args:
      codes: uint8 ``[..., T, D]``, one a byte.
      params: as ``quantize`` returns them.
      quant: the quantization that made them.
    """
    if not isinstance(quant, Quant) or not quant.quantized:
        raise ValueError(f"quant must be a Quant of 2 or 4 bits, got {quant!r}")
    codes, params = jnp.asarray(codes), jnp.asarray(params)
    if codes.dtype != jnp.uint8:
        raise TypeError(f"codes must be uint8, got {codes.dtype}")
    _check_tokens("codes", codes, quant)
    axis = -1 if quant.per == "token" else -2
    groups = _grouped(codes, quant).astype(jnp.float32)
    expected = (*groups.shape[:axis], *groups.shape[axis:][1:], 2)
    if params.shape != expected:
        raise ValueError(f"params must have shape {expected} for codes of shape {codes.shape}, got {params.shape}")
    pairs = jnp.expand_dims(params.astype(jnp.float32), axis - 1)
    return (pairs[..., 0] * groups + pairs[..., 1]).reshape(codes.shape)


def params_shape(fmt: KVFormat, quant: Quant, head_dim: int) -> tuple[int, int, int]:
    """Shape of one page's parameters."""
    group = quant.group_size(head_dim)
    if quant.per == "token":
        return fmt.page_size, head_dim // group, 2
    return fmt.page_size // group, head_dim, 2
