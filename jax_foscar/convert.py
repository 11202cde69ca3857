"""Caches of other libraries, NumPy dumps and checkpoints: to a ``KVCache`` and back, on the host and outside of jit.

Every ``from_`` function of a library gives a ``Layer``, and ``from_quantized`` makes a cache of all of them; every
``to_`` function takes a cache and a layer. Codes never change on the way; docs/convert.md tells what is rounded.

There are two forms of the same affine map. Ours and KIVI's is ``x = scale * code + offset``; OSCAR's and qwix's is
``x = scale * (code - zero)``, so ``offset = -zero * scale`` and ``zero = -offset / scale``. Zeros are kept as floats,
never rounded to integers. Both ways are computed in float64 and rounded once, so a float16 offset survives the way
through a float32 zero to the bit, and a float32 offset to its last place or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .cache import KVCache
from .dump import check_description, describe, from_numpy, to_numpy
from .format import KVFormat, Quant
from .unpacked import Layer, Tokens, expect_shape, from_quantized, spread, to_quantized

__all__ = [
    "Layer",
    "OscarBuffers",
    "QArray",
    "Tokens",
    "check_description",
    "describe",
    "from_kivi",
    "from_numpy",
    "from_oscar",
    "from_qarray",
    "from_quantized",
    "to_kivi",
    "to_numpy",
    "to_oscar",
    "to_qarray",
    "to_quantized",
]


def _offset(scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """``-zero * scale``, float32."""
    return (-zero.astype(np.float64) * scale.astype(np.float64)).astype(np.float32)


def _zero_form(tokens: Tokens, quant: Quant) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(codes, scale, zero)``, the parameters float32, of ``x = scale * (code - zero)``.

    A constant group (scale 0, or so small that its zero is beyond float32) has no zero: it becomes scale 1, codes 0 and
    zero ``-offset``, which are the same values.
    """
    scale, offset = tokens.scale.astype(np.float32), tokens.offset.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        zero = (-offset.astype(np.float64) / scale).astype(np.float32)
    constant = (scale == 0) | ~np.isfinite(zero)
    codes = np.where(spread(constant, quant, tokens.codes.shape[-1]), np.uint8(0), tokens.codes)
    return codes, np.where(constant, np.float32(1), scale), np.where(constant, -offset, zero)


def _unpacked(words: np.ndarray, bits: int, fields: int) -> np.ndarray:
    """Codes of packed words, lowest bits first, in a new last axis of ``fields``; the words are unsigned."""
    shift = np.arange(fields, dtype=words.dtype) * words.dtype.type(bits)
    codes = (words[..., None] >> shift) & words.dtype.type((1 << bits) - 1)
    return np.asarray(codes, np.uint8)


def _packed(codes: np.ndarray, bits: int, dtype: Any) -> np.ndarray:
    """The inverse: codes ``[..., fields]`` to words."""
    shift = np.arange(codes.shape[-1], dtype=dtype) * np.dtype(dtype).type(bits)
    return np.asarray(np.bitwise_or.reduce(codes.astype(dtype) << shift, axis=-1))


# --- KIVI -------------------------------------------------------------------------------------------------------------


def from_kivi(format: KVFormat, past_key_value: Sequence[Any]) -> Layer:
    """One layer of a KIVI cache, ``x = scale * code + mn``: what its models hand on as ``past_key_value``.

    Lossless for the quantized tokens, whose float16 scale and mn are a float16 format's. Keys are per channel and
    values per token, in groups of the same size. KIVI keeps up to ``residual_length`` newest values exact, and fewer
    keys: a format with ``recent_tokens=residual_length`` keeps what KIVI kept, in bfloat16.

    Args:
      format: has per-channel keys and per-token values, with KIVI's bits and group size.
      past_key_value: KIVI's tuple of nine, as NumPy arrays or what NumPy can read; n tokens, nh KV heads, w = 32 / bits
        codes a word: key codes int32 ``[B, nh, D, n_k / w]``, exact keys ``[B, nh, n - n_k, D]``, key scale and mn
        ``[B, nh, D, n_k / group]``, value codes int32 ``[B, nh, n_v, D / w]``, exact values ``[B, nh, n - n_v, D]``,
        value scale and mn ``[B, nh, n_v, D / group]``, n. What is empty may be None.

    Returns:
      The layer, its tokens padded to a multiple of 64; all rows have n tokens.

    Raises:
      ValueError: the format is of another kind, or an array of another shape.
    """
    _check_kivi(format)
    if len(past_key_value) != 9:
        raise ValueError(f"past_key_value must be KIVI's tuple of 9, got {len(past_key_value)} items")
    arrays = [None if x is None else np.asarray(x) for x in past_key_value[:8]]
    n = int(past_key_value[8])
    codes, exact, scale, offset = arrays[:4]
    if codes is not None:
        codes, scale, offset = (x.transpose(0, 3, 1, 2) for x in _kivi_words(0, codes, scale, offset, format.key))
    key = _kivi_tokens("key", codes, scale, offset, exact, n, format.key)
    codes, exact, scale, offset = arrays[4:]
    if codes is not None:
        codes, scale, offset = (x.swapaxes(1, 2) for x in _kivi_words(4, codes, scale, offset, format.value))
    return Layer(key, _kivi_tokens("value", codes, scale, offset, exact, n, format.value))


def to_kivi(cache: KVCache, layer: int = 0) -> tuple[Any, ...]:
    """One layer as KIVI's ``past_key_value``, the inverse of ``from_kivi``; ``x = scale * code + mn``.

    Lossless: parameters come in the format's ``param_dtype`` (KIVI's kernels read float16), exact tokens in float32.
    KIVI can continue where fewer tokens are exact than its ``residual_length``.

    Raises:
      ValueError: the format is of another kind, or the rows have unequal lengths, which KIVI cannot hold.
    """
    _check_kivi(cache.format)
    length = np.asarray(cache.length)
    if (length != length[0]).any():
        raise ValueError(f"cache must have rows of one length for KIVI, got {length.tolist()}: convert rows apart")
    if cache.format.key.group != cache.format.value.group_size(cache.value_head_dim):
        raise ValueError(
            f"format must have key and value groups of one size for KIVI, got {str(cache.format)!r}: "
            "to_quantized has no such limit"
        )
    key, value = to_quantized(cache, layer)
    n = int(length[0])
    held = n - int(key.is_exact[0].sum())  # a per-channel format always keeps exact tokens

    def packed(x: np.ndarray, bits: int) -> np.ndarray:
        return _packed(x.reshape(*x.shape[:-1], x.shape[-1] * bits // 32, 32 // bits), bits, np.uint32).view(np.int32)

    key_params = [x[:, : held // cache.format.key.group].transpose(0, 2, 3, 1) for x in (key.scale, key.offset)]
    value_params = [x[:, :held].swapaxes(1, 2) for x in (value.scale, value.offset)]
    exact_key, exact_value = (x.exact[:, held:n].swapaxes(1, 2).astype(np.float32) for x in (key, value))
    key_words = packed(key.codes[:, :held].transpose(0, 2, 3, 1), cache.format.key.bits)
    value_words = packed(value.codes[:, :held].swapaxes(1, 2), cache.format.value.bits)
    keys = (key_words, exact_key if held < n else None, *key_params)
    values = (value_words, exact_value, *value_params)
    return (
        *((None, exact_key, None, None) if held == 0 else keys),
        *((None, exact_value, None, None) if held == 0 else values),
        n,
    )


def _check_kivi(fmt: KVFormat) -> None:
    if (fmt.key.per, fmt.value.per, fmt.sink_tokens) != ("channel", "token", 0) or not fmt.value.quantized:
        raise ValueError(
            f"format must have keys per channel, values per token and no sink tokens for KIVI, got {str(fmt)!r}: an "
            "example is 'k2c32,v2t32,recent128'"
        )


def _kivi_words(index: int, codes: np.ndarray, scale: Any, offset: Any, quant: Quant) -> tuple[np.ndarray, ...]:
    """``past_key_value[index]`` unpacked along its last axis, with its scale and offset."""
    if codes.dtype != np.int32 or codes.ndim != 4:
        raise ValueError(f"past_key_value[{index}] must be int32 of rank 4, got {codes.dtype} {list(codes.shape)}")
    codes = _unpacked(codes.view(np.uint32), quant.bits, 32 // quant.bits)
    codes = codes.reshape(*codes.shape[:3], -1)
    group = quant.group_size(codes.shape[3])
    groups = (*codes.shape[:3], -(-codes.shape[3] // group))
    remedy = f"the format has {quant.bits} bits in groups of {group}"
    for name, x in ((index + 2, scale), (index + 3, offset)):
        expect_shape(f"past_key_value[{name}]", x, groups, remedy)
    return codes, scale, offset


def _kivi_tokens(name: str, codes: Any, scale: Any, offset: Any, exact: Any, n: int, quant: Quant) -> Tokens:
    """Quantized tokens ``[B, n_q, nh, D]`` and the exact ones ``[B, nh, n - n_q, D]`` after them."""
    if codes is None and exact is None:
        raise ValueError(f"past_key_value must have {name} codes or exact {name}s, got neither")
    held = 0 if codes is None else codes.shape[1]
    kept = 0 if exact is None else exact.shape[2]
    if held + kept != n:
        raise ValueError(f"past_key_value must have {n} {name}s, which its last item tells, got {held} + {kept}")
    total = -(-max(n, 1) // 64) * 64
    if codes is None:
        batch, heads, _, dim = exact.shape
        group = quant.group_size(dim)
        codes = np.zeros((batch, 0, heads, dim), np.uint8)
        scale = offset = np.zeros((batch, 0, heads, dim if quant.per == "channel" else dim // group), np.float32)

    def padded(x: np.ndarray, before: int, size: int) -> np.ndarray:
        return np.pad(x, [(0, 0), (before, size - before - x.shape[1]), (0, 0), (0, 0)])

    groups = total // quant.token_group
    tokens = Tokens(padded(codes, 0, total), padded(scale, 0, groups), padded(offset, 0, groups))
    if not kept:
        return tokens
    is_exact = np.broadcast_to(np.arange(total) >= held, (codes.shape[0], total))
    return tokens._replace(exact=padded(exact.swapaxes(1, 2), held, total), is_exact=is_exact)


# --- OSCAR ------------------------------------------------------------------------------------------------------------


class OscarBuffers(NamedTuple):
    """One layer of OSCAR's token pool (an SGLang pool of page size 1), ``x = scale * (code - zero)``, per token.

    N pool slots, K KV heads, w = 8 / bits. Query head h reads KV head ``h // (heads / K)``, as here.

    Attributes:
      k_buffer: uint8 ``[N, K, D / w]``; field f (the lowest bits first) of byte j is channel ``f * D / w + j``.
      v_buffer: as ``k_buffer``.
      k_scales_zeros: float32 ``[N, K, 2 * D / group]``: scale and zero of each group, interleaved; zero is not rounded.
      v_scales_zeros: as ``k_scales_zeros``.
      kv_indptr: int ``[B + 1]``: row b has the entries ``kv_indptr[b]`` to ``kv_indptr[b + 1]`` of ``kv_indices``.
      kv_indices: int, the pool slots of all rows' tokens, in order.
    """

    k_buffer: Any
    v_buffer: Any
    k_scales_zeros: Any
    v_scales_zeros: Any
    kv_indptr: Any
    kv_indices: Any


def from_oscar(format: KVFormat, buffers: OscarBuffers) -> Layer:
    """One layer of OSCAR's cache; ``np.diff(kv_indptr)`` are the lengths for ``from_quantized``.

    Codes are lossless. ``offset = -zero * scale`` is rounded once, to float32, and then with the scale to the format's
    ``param_dtype``: prefer ``float32``, in which the scale is OSCAR's to the bit. OSCAR caches keys and values in its
    rotated basis: queries must be rotated, and outputs rotated back, as there. The high-precision tier of its mixed
    pool is not read here; ``Tokens.exact`` takes such tokens.

    Args:
      format: has per-token keys and values, with the pool's bits (OSCAR has 2, SGLang's pool of this kind also 4).
      buffers: OSCAR's arrays, as NumPy arrays or what NumPy can read.

    Raises:
      ValueError: the format is of another kind, an array has another shape, or an index is out of the pool.
    """
    _check_oscar(format)
    arrays = OscarBuffers(*(np.asarray(x) for x in buffers))
    indptr, indices = arrays.kv_indptr.astype(np.int64), arrays.kv_indices
    lengths, slots = np.diff(indptr), arrays.k_buffer.shape[0]
    if not lengths.size or lengths.min() < 0 or indptr[0] < 0 or indptr[-1] > indices.size:
        raise ValueError(f"kv_indptr must rise from 0 to at most {indices.size}, got {indptr.tolist()}")
    token = np.arange(max(int(lengths.max()), 1))
    there = token < lengths[:, None]
    index = np.where(there, indices[np.where(there, indptr[:-1, None] + token, 0)] if indices.size else 0, 0)
    if index.min() < 0 or index.max() >= slots:
        raise ValueError(f"kv_indices must be in [0, {slots}), the pool's slots, got {index.min()} to {index.max()}")

    def tokens(name: str, data: np.ndarray, params: np.ndarray, quant: Quant) -> Tokens:
        if data.dtype != np.uint8 or data.ndim != 3:
            raise ValueError(f"{name}_buffer must be uint8 of rank 3, got {data.dtype} {list(data.shape)}")
        codes = _unpacked(data[index], quant.bits, 8 // quant.bits).swapaxes(-1, -2)
        codes = codes.reshape(*codes.shape[:-2], -1)
        dim = codes.shape[-1]
        remedy = f"the format has {quant.bits} bits in groups of {quant.group_size(dim)}"
        expect_shape(f"{name}_scales_zeros", params, (*data.shape[:2], 2 * (dim // quant.group_size(dim))), remedy)
        scale, zero = params[index][..., 0::2], params[index][..., 1::2]
        return Tokens(codes, scale, _offset(scale, zero))

    return Layer(
        tokens("k", arrays.k_buffer, arrays.k_scales_zeros, format.key),
        tokens("v", arrays.v_buffer, arrays.v_scales_zeros, format.value),
    )


def to_oscar(cache: KVCache, layer: int = 0) -> OscarBuffers:
    """One layer as OSCAR's token pool, the inverse of ``from_oscar``: the rows' tokens one after another, no slot free.

    ``zero = -offset / scale`` in float32, not rounded to an integer. A constant group becomes scale 1, codes 0 and zero
    ``-offset``: the same values.

    Raises:
      ValueError: the format is per channel, 16 bits, or keeps exact tokens, which OSCAR's pool has no place for.
    """
    _check_oscar(cache.format)
    if cache.format.keeps_exact:
        raise ValueError(
            f"format must keep no exact tokens for OSCAR's pool, got {str(cache.format)!r}: "
            "to_quantized returns them apart"
        )
    lengths = np.asarray(cache.length)
    buffers = []
    for tokens, quant in zip(to_quantized(cache, layer), (cache.format.key, cache.format.value), strict=True):
        codes, scale, zero = _zero_form(tokens, quant)
        there = np.arange(codes.shape[1]) < lengths[:, None]
        codes = codes[there].reshape(-1, codes.shape[2], 8 // quant.bits, codes.shape[3] * quant.bits // 8)
        params = np.stack([scale[there], zero[there]], axis=-1)
        buffers.append((_packed(codes.swapaxes(-1, -2), quant.bits, np.uint8), params.reshape(*params.shape[:2], -1)))
    (k, k_params), (v, v_params) = buffers
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return OscarBuffers(k, v, k_params, v_params, indptr, np.arange(indptr[-1], dtype=np.int64))


def _check_oscar(fmt: KVFormat) -> None:
    if not all(quant.per == "token" and quant.quantized for quant in (fmt.key, fmt.value)):
        raise ValueError(
            f"format must have keys and values of 2 or 4 bits per token for OSCAR, got {str(fmt)!r}: an "
            "example is 'k2t,v2t'"
        )


# --- qwix.QArray ------------------------------------------------------------------------------------------------------


class QArray(NamedTuple):
    """Keys or values of one layer in the form of ``qwix.QArray``: ``x = scale * (qvalue - zero_point)``.

    Attributes:
      qvalue: integers ``[B, T, K, D]``.
      scale: floating, ``[B, T, K, D/group]`` per token or ``[B, T/group, K, D]`` per channel.
      zero_point: as ``scale``; None where it is 0.
      exact: as in ``Tokens``; so is ``is_exact``. ``qwix.QArray`` has neither.
      is_exact: bool ``[B, T]``, or None.
    """

    qvalue: Any
    scale: Any
    zero_point: Any = None
    exact: Any = None
    is_exact: Any = None


def from_qarray(quant: Quant, array: Any) -> Tokens:
    """Keys or values from a ``qwix.QArray``, or anything with its ``qvalue``, ``scale`` and ``zero_point``.

    Signed codes, [-8, 7] or [-2, 1], are shifted to start at 0; unsigned ones are taken as they are (convert integers
    from 0 in a signed dtype to uint8 first). ``offset = -zero * scale`` is rounded once, to float32: lossless where
    zero points are integers and scales bfloat16 or float16. The scale is lossless where the format's ``param_dtype``
    holds it.

    Args:
      quant: the bits and groups, ``format.key`` or ``format.value``.
      array: shapes as in ``QArray``; scale and zero point have the same shape.

    Raises:
      ValueError: 16 bits, or a zero point of another shape than the scale.
    """
    if not isinstance(quant, Quant) or not quant.quantized:
        raise ValueError(f"quant must be a Quant of 2 or 4 bits, got {quant!r}")
    codes, scale = np.asarray(array.qvalue), np.asarray(array.scale)
    shift = 1 << (quant.bits - 1) if jnp.issubdtype(codes.dtype, jnp.signedinteger) else 0
    zero = np.zeros(scale.shape, np.float32) if array.zero_point is None else np.asarray(array.zero_point)
    expect_shape("zero_point", zero, scale.shape, "it has the shape of scale")
    codes = codes.astype(np.int32) + shift
    offset = _offset(scale, zero.astype(np.float64) + shift)
    return Tokens(codes, scale, offset, getattr(array, "exact", None), getattr(array, "is_exact", None))


def to_qarray(cache: KVCache, layer: int = 0) -> tuple[QArray, QArray]:
    """Keys and values of one layer in the form of ``qwix.QArray``, the inverse of ``from_qarray``.

    ``qvalue`` is uint8 from 0; scale and zero point are float32, and ``zero_point = -offset / scale`` is not rounded. A
    constant group becomes scale 1, codes 0 and zero ``-offset``: the same values. qwix's own ``dequantize`` insists on
    zero points of ``qvalue``'s integer dtype; rounding costs up to half a scale a value, and is left to the caller.

    Raises:
      ValueError: a 16-bit format, which has no codes.
    """
    quants = (cache.format.key, cache.format.value)
    if not all(quant.quantized for quant in quants):
        raise ValueError(f"format must have 2 or 4 bits for a QArray, got {str(cache.format)!r}: use cache.dequantize")
    key, value = (
        QArray(*_zero_form(tokens, quant), tokens.exact, tokens.is_exact)
        for tokens, quant in zip(to_quantized(cache, layer), quants, strict=True)
    )
    return key, value
