"""A cache as plain NumPy arrays, one code a byte, and back: what the converters in ``convert.py`` reshape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from . import layout, rows, windows
from .cache import KVCache, Pages
from .format import KVFormat, Quant

_pack = jax.jit(layout.pack, static_argnames=("operand", "bits"))
_quantized_length = jax.jit(windows.quantized_length, static_argnames="fmt")
_slot_tokens = jax.jit(windows.slot_tokens, static_argnames="fmt")


class Tokens(NamedTuple):
    """Keys or values of one layer: a token's channel is ``scale * code + offset``, or stands in ``exact``.

    B rows, T tokens (more than a row has are ignored), K KV heads, D channels, g the group:

    Attributes:
      codes: uint8 (any integers, to ``from_quantized``) ``[B, T, K, D]``; None where no token is quantized.
      scale: floating, ``[B, T, K, D/g]`` per token or ``[B, T/g, K, D]`` per channel; None where ``codes`` is.
      offset: as ``scale``.
      exact: floating ``[B, T, K, D]``, the tokens that are not quantized (yet); None where all are.
      is_exact: bool ``[B, T]``, which tokens these are; None where ``exact`` is.
    """

    codes: Any
    scale: Any
    offset: Any
    exact: Any = None
    is_exact: Any = None


class Layer(NamedTuple):
    """Keys and values of one layer."""

    key: Tokens
    value: Tokens


def spread(params: np.ndarray, quant: Quant, dim: int) -> np.ndarray:
    """Parameters of groups, ``[B, T, K, D/g]`` or ``[B, T/g, K, D]``, repeated to ``[B, T, K, D]``."""
    return np.repeat(params, quant.group_size(dim), axis=-1 if quant.per == "token" else 1)


def _token_groups(mask: np.ndarray, quant: Quant) -> np.ndarray:
    """Which groups hold a token of ``mask [B, T]``, to be broadcast against parameters."""
    batch, tokens = mask.shape
    groups = mask.reshape(batch, tokens // quant.token_group, quant.token_group, 1, 1)
    return np.asarray(groups.any(axis=2))


def expect_shape(name: str, array: Any, shape: tuple[int, ...], remedy: str) -> None:
    """Raises ValueError unless ``array`` has this shape."""
    if np.shape(array) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(np.shape(array))}: {remedy}")


# --- To arrays --------------------------------------------------------------------------------------------------------


def to_quantized(cache: KVCache, layer: int = 0) -> Layer:
    """One layer of a cache as plain arrays, on the host.

    Lossless: codes, scales and offsets are those in the pages (0 where no quantized token is), exact tokens those in
    ``exact_key`` and ``exact_value``. At 16 bits all tokens are exact ones.

    Args:
      cache: any cache, paged ones included.
      layer: the layer.

    Returns:
      Keys and values, with T the longest row rounded up to whole pages; ``scale`` and ``offset`` in the format's
      ``param_dtype``, ``exact`` in bfloat16.

    Raises:
      ValueError: ``layer`` is out of range, or a row has no page where tokens should be.
      OverflowError: a row lost tokens (``cache.check``).
    """
    cache._check_arrays()
    cache.check()
    rows.index("layer", layer, cache.num_layers)
    fmt, page = cache.format, cache.format.page_size
    length = np.asarray(cache.length)
    width = max(-(-int(length.max()) // page), 1)
    token = np.arange(width * page)
    there, held = _held(token, length, fmt)
    ids = np.asarray(cache.page_table)[:, :width]
    used = held.reshape(*ids.shape, page).any(-1)
    if (used & ((ids < 0) | (ids >= cache.key.codes.shape[2]))).any():
        raise ValueError("cache has a row whose page_table names no page where tokens should be: see KVCache.reset_row")
    ids = np.where(used, ids, 0)
    pool = (np.arange(cache.batch) * cache.key.codes.shape[0] // cache.batch)[:, None]
    is_exact = there & ~held if fmt.keeps_exact else None
    slot = np.where(token < fmt.sink_tokens, token, fmt.sink_tokens + token % max(fmt.ring, 1))

    def tokens(pages: Pages, exact: Array | None, operand: layout.Operand, quant: Quant, dim: int) -> Tokens:
        def joined(x: np.ndarray) -> np.ndarray:  # [B, M, K, rows of a page, ...] to [B, tokens or groups, K, ...]
            array = x.swapaxes(2, 3)
            return array.reshape(array.shape[0], -1, *array.shape[3:])

        data: Any = np.asarray(pages.codes[:, layer])[pool, ids]  # of NumPy, unpack compiles nothing
        codes = joined(np.asarray(layout.unpack(data, operand, quant.bits, dim)))
        codes = np.where(held[..., None, None], codes, codes.dtype.type(0))
        kept = None
        if exact is not None and is_exact is not None:
            kept = np.asarray(exact[:, layer])[:, :, slot].swapaxes(1, 2)
            kept = np.where(is_exact[..., None, None], kept, kept.dtype.type(0))
        if pages.params is None:
            all_exact = codes if kept is None else np.where(held[..., None, None], codes, kept)
            return Tokens(None, None, None, all_exact, there)
        params = joined(np.asarray(pages.params[:, layer])[pool, ids])
        params = np.where(_token_groups(held, quant)[..., None], params, params.dtype.type(0))
        return Tokens(codes, params[..., 0], params[..., 1], kept, is_exact)

    return Layer(
        tokens(cache.key, cache.exact_key, "key", fmt.key, cache.head_dim),
        tokens(cache.value, cache.exact_value, "value", fmt.value, cache.value_head_dim),
    )


def _held(token: np.ndarray, length: np.ndarray, fmt: KVFormat) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens a row has, and which of them stand in pages, bool ``[B, T]``."""
    there = token < length[:, None]
    if not fmt.keeps_exact:
        return there, there
    first_exact = np.asarray(_quantized_length(length, fmt))[:, None]
    return there, (token >= fmt.sink_tokens) & (token < first_exact)


# --- From arrays ------------------------------------------------------------------------------------------------------


def from_quantized(format: KVFormat, layers: Sequence[Layer], lengths: Sequence[int], *, max_length: int) -> KVCache:
    """A cache that holds these tokens, as ``KVCache.create`` lays it out; made on the host.

    Codes are taken as they are. Scale and offset are rounded to ``format.param_dtype``, which is lossless where they
    come in that dtype. Tokens that the format keeps exact (``sink_tokens``, ``recent_tokens``, an unfinished channel
    group) are taken from ``exact``, or dequantized where they come quantized, and rounded to bfloat16. Nothing is
    quantized here: tokens that the format would have quantized must come so.

    Args:
      format: how the tokens are kept; bits and groups must be those of ``layers``.
      layers: one ``Layer`` (or pair of ``Tokens``) for each layer of the model.
      lengths: int ``[B]``, tokens of each row.
      max_length: tokens a row can hold, as in ``KVCache.create``.

    Raises:
      TypeError: codes that are not integers.
      ValueError: an array of another shape than the format's bits and groups give, codes out of range, a scale that is
        negative, a scale or offset that is not finite (also as ``param_dtype``), a token that is exact where the format
        has it quantized, or lengths that do not fit.
    """
    if not layers:
        raise ValueError("layers must hold one Layer a layer of the model, got none")
    layers = [Layer(*layer) for layer in layers]
    length = np.asarray(lengths)
    batch, tokens, heads, head_dim = _shape("layers[0].key", layers[0].key)
    value_head_dim = _shape("layers[0].value", layers[0].value)[3]
    cache = KVCache.create(
        format,
        batch=batch,
        max_length=max_length,
        num_layers=len(layers),
        num_kv_heads=heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
    )
    limit = min(tokens, max_length)
    if length.dtype.kind not in "iu" or length.shape != (batch,) or length.min() < 0 or length.max() > limit:
        raise ValueError(
            f"lengths must be {batch} ints in [0, {limit}], got {length.tolist()}: layers bring {tokens} tokens a row, "
            f"and max_length is {max_length}"
        )
    keys = [
        _Stored.of(f"layers[{i}].key", layer.key, "key", format, length, cache.capacity, (heads, head_dim))
        for i, layer in enumerate(layers)
    ]
    values = [
        _Stored.of(f"layers[{i}].value", layer.value, "value", format, length, cache.capacity, (heads, value_head_dim))
        for i, layer in enumerate(layers)
    ]

    def stack(arrays: list[Any]) -> Any:
        return None if arrays[0] is None else jnp.asarray(np.stack(arrays, axis=1))

    return dataclasses.replace(
        cache,
        key=Pages(stack([x.codes for x in keys]), stack([x.params for x in keys])),
        value=Pages(stack([x.codes for x in values]), stack([x.params for x in values])),
        length=jnp.asarray(length, jnp.int32),
        exact_key=stack([x.exact for x in keys]),
        exact_value=stack([x.exact for x in values]),
    )


def _shape(name: str, tokens: Tokens) -> tuple[int, ...]:
    """``(B, T, K, D)``."""
    array = tokens.codes if tokens.codes is not None else tokens.exact
    if np.ndim(array) != 4:
        raise ValueError(f"{name} must have codes (or exact tokens) [B, T, K, D], got shape {list(np.shape(array))}")
    return np.shape(array)


class _Stored(NamedTuple):
    """One layer of one operand in the cache's arrays."""

    codes: np.ndarray  # [B, M, K, page, bytes]
    params: np.ndarray | None
    exact: np.ndarray | None  # [B, K, S + W, D]

    @classmethod
    def of(
        cls,
        name: str,
        given: Tokens,
        operand: layout.Operand,
        fmt: KVFormat,
        length: np.ndarray,
        capacity: int,
        head: tuple[int, int],
    ) -> _Stored:
        quant = fmt.key if operand == "key" else fmt.value
        batch, count = length.size, _shape(name, given)[1]
        given = _checked(name, given, quant, str(fmt), (batch, count, *head))
        there, held = _held(np.arange(count), length, fmt)
        is_exact = np.zeros((batch, count), bool) if given.is_exact is None else given.is_exact
        _check_exact(name, is_exact, held, length, fmt, quant)
        width = capacity // fmt.page_size

        def paged(x: np.ndarray, mask: np.ndarray, step: int) -> np.ndarray:
            """``[B, T/step, K, ...]`` to ``[B, M, K, page/step, ...]``; 0 outside of ``mask``."""
            x = np.where(mask, x, x.dtype.type(0))[:, : capacity // step]
            x = np.pad(x, [(0, 0), (0, capacity // step - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
            return x.reshape(batch, width, fmt.page_size // step, *x.shape[2:]).swapaxes(2, 3)

        exact = _exact(given, is_exact, length, fmt, quant) if fmt.keeps_exact else None
        if given.codes is None:
            values = given.exact.astype(jnp.bfloat16)
            return cls(np.asarray(_pack(paged(values, held[..., None, None], 1), operand, 16)), None, exact)
        quantized = there & ~is_exact
        groups = _token_groups(quantized, quant)
        params = np.stack(_params(name, given, groups, quant.levels, fmt), axis=-1)
        bad = quantized[..., None, None] & ((given.codes < 0) | (given.codes > quant.levels))
        if bad.any():
            raise ValueError(
                f"{name}.codes must be in [0, {quant.levels}], got {int(given.codes[bad][0])}: the format has "
                f"{quant.bits} bits, and signed codes are shifted to start at 0 (offset -= shift * scale)"
            )
        codes = paged(given.codes.astype(np.uint8), held[..., None, None], 1)
        pairs = paged(params, _token_groups(held, quant)[..., None], quant.token_group)
        return cls(np.asarray(_pack(codes, operand, quant.bits)), pairs, exact)


def _checked(name: str, given: Tokens, quant: Quant, text: str, shape: tuple[int, ...]) -> Tokens:
    """``given`` as NumPy arrays of the right kinds and shapes."""
    arrays = {field: None if x is None else np.asarray(x) for field, x in given._asdict().items()}
    batch, count, heads, dim = shape
    group = quant.group_size(dim)
    if count % quant.token_group:
        raise ValueError(f"{name}.codes must have a multiple of group={group} tokens, got {count}: pad them")
    if quant.per == "token":
        grouped, kind = (batch, count, heads, dim // group), f"{group} channels"
    else:
        grouped, kind = (batch, count // group, heads, dim), f"{group} tokens"
    expected = {"exact": shape, "is_exact": shape[:2]}
    if quant.quantized:
        expected |= {"codes": shape, "scale": grouped, "offset": grouped}
        if arrays["codes"] is None or arrays["scale"] is None or arrays["offset"] is None:
            raise ValueError(f"{name} must have codes, scale and offset: {text!r} has {quant.bits} bits there")
        if not jnp.issubdtype(arrays["codes"].dtype, jnp.integer):
            raise TypeError(f"{name}.codes must be integers, one a byte, got {arrays['codes'].dtype}")
        arrays["codes"] = arrays["codes"].astype(np.int32)  # also from 4-bit dtypes, which NumPy does not compute with
    elif arrays["codes"] is not None or arrays["exact"] is None:
        raise ValueError(f"{name} must have exact tokens and no codes: {text!r} has 16 bits there")
    if (arrays["exact"] is None) != (arrays["is_exact"] is None):
        raise ValueError(f"{name} must have both exact and is_exact, or neither")
    if arrays["is_exact"] is not None:
        arrays["is_exact"] = arrays["is_exact"].astype(bool)
    for field, array in arrays.items():
        if array is not None:
            remedy = (
                f"{text!r} has groups of {kind}" if field in ("scale", "offset") else "all arrays agree on B, T, K, D"
            )
            expect_shape(f"{name}.{field}", array, expected[field], remedy)
    return Tokens(**arrays)


def _check_exact(
    name: str, is_exact: np.ndarray, held: np.ndarray, length: np.ndarray, fmt: KVFormat, quant: Quant
) -> None:
    """Raises ValueError unless exact tokens and the format's windows agree."""
    if not quant.quantized:
        missing = (np.arange(is_exact.shape[1]) < length[:, None]) & ~is_exact
        if missing.any():
            raise ValueError(f"{name}.is_exact must cover all tokens, which {str(fmt)!r} does not quantize")
        return
    wrong = held & is_exact
    if wrong.any():
        row, token = (int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"{name} brings token {token} of row {row} exact, of {int(length[row])}, and {str(fmt)!r} has it "
            f"quantized: a format with recent_tokens={int(length[row]) - token} or more keeps it"
        )


def _params(name: str, given: Tokens, groups: np.ndarray, levels: int, fmt: KVFormat) -> list[np.ndarray]:
    """Scale and offset in the format's dtype, checked where ``groups`` says that tokens are."""
    stored = []
    for field, array in (("scale", given.scale), ("offset", given.offset)):
        with np.errstate(over="ignore"):
            rounded = np.asarray(array).astype(fmt.param_dtype)
        bad = groups & ~np.isfinite(rounded)
        if bad.any():
            value = float(array[bad][0])
            remedy = (
                "such tokens have no codes: bring them exact" if not np.isfinite(value) else "use float32 parameters"
            )
            raise ValueError(f"{name}.{field} must be finite in {fmt.param_dtype.name}, got {value}: {remedy}")
        negative = groups & (rounded < 0)
        if field == "scale" and negative.any():
            raise ValueError(
                f"{name}.scale must not be negative, got {float(array[negative][0])}: mirror that group's codes to "
                f"{levels} - code, its offset to offset + {levels} * scale, and its scale to -scale"
            )
        stored.append(rounded)
    return stored


def _exact(given: Tokens, is_exact: np.ndarray, length: np.ndarray, fmt: KVFormat, quant: Quant) -> np.ndarray:
    """The tokens of all sink and ring slots, bfloat16 ``[B, K, S + W, D]``, dequantized where they come quantized."""
    token = np.asarray(_slot_tokens(length, fmt))
    there = (token >= 0)[..., None, None]
    index = np.clip(token, 0, is_exact.shape[1] - 1)
    at = lambda x, step=1: np.take_along_axis(x, (index // step)[..., None, None], axis=1)  # noqa: E731
    if given.codes is None:
        values = at(given.exact)
    else:
        repeat = quant.group_size(given.codes.shape[-1]) if quant.per == "token" else 1
        scale, offset = (
            np.repeat(at(x, quant.token_group), repeat, axis=-1).astype(np.float32) for x in (given.scale, given.offset)
        )
        with np.errstate(invalid="ignore", over="ignore"):  # where no token is, anything may stand
            values = scale * at(given.codes).astype(np.float32) + offset
        if given.exact is not None:
            values = np.where(np.take_along_axis(is_exact, index, 1)[..., None, None], at(given.exact), values)
    return np.asarray(np.where(there, values, 0), jnp.bfloat16).swapaxes(1, 2)
