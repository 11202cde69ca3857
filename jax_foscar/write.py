"""Writing new tokens into the cache: quantize what became quantizable, keep the newest exact.

A primitive that is one kernel on CPU and CUDA, whose results are its operands' own buffers (``cuda/write_params.h``
states what is written where). Elsewhere it is a jnp gather, merge and scatter of the touched pages, which writes the
same bytes; under donation the scatters happen in place. Targets out of range are dropped (``mode="drop"``), never
clamped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from . import layout, primitive, quantize, tracing, windows
from .format import KVFormat, Quant


class Written(NamedTuple):
    """What a write updates; the arrays of ``KVCache``, with None for those the format does not have."""

    key_codes: Any
    key_params: Any
    value_codes: Any
    value_params: Any
    exact_key: Any
    exact_value: Any
    overflowed: Any


class Given(NamedTuple):
    """What a write reads besides."""

    page_table: Any  # [B, M]
    length: Any  # [B], the new tokens counted in
    num_new: Any  # [B]
    layer: Any  # [1]
    k: Any  # [B, T, K, D]
    v: Any  # [B, T, K, Dv]


def _present(written: Written) -> list[Any]:
    return [x for x in written if x is not None]


def _named(args: Any, fmt: KVFormat) -> tuple[Written, Given]:
    rest = iter(args)
    written = Written(*(None if name in fmt.absent else next(rest) for name in Written._fields))
    return written, Given(*rest)


def _write(cache: Written, given: Given, fmt: KVFormat) -> Written:
    """One write, without batching."""
    table, length, num_new, layer, k, v = given
    batch, num_tokens = k.shape[:2]
    pools, layers, pages, _, page_size = cache.key_codes.shape[:5]
    group = fmt.token_group
    start = length - num_new  # [B]
    # A row whose count exceeds the tokens that were handed over, or its length, has nothing well-defined to write.
    active = (num_new > 0) & (num_new <= jnp.minimum(length, num_tokens)) & (layer >= 0) & (layer < layers)
    refused = (num_new > 0) & ~active
    refused |= (num_new > 0) & (length > table.shape[1] * page_size)
    row = jnp.arange(batch)

    # Tokens [first, last) become quantized now: a whole number of groups, a static number at most.
    first, last = windows.quantized_length(start, fmt), windows.quantized_length(length, fmt)
    num_quantized = -(-num_tokens // group) * group
    quantized = first[:, None] + jnp.arange(num_quantized, dtype=first.dtype)  # [B, F]

    # The pages they touch, likewise, and the tokens of those pages.
    num_touched = (num_quantized + page_size - group - 1) // page_size + 1
    touched = (first // page_size)[:, None] + jnp.arange(num_touched, dtype=first.dtype)  # [B, A]
    token = touched[..., None] * page_size + jnp.arange(page_size, dtype=first.dtype)  # [B, A, page]
    fresh = (token >= first[:, None, None]) & (token < last[:, None, None]) & (token >= fmt.sink_tokens)
    page_id = jnp.take_along_axis(table, jnp.clip(touched, 0, table.shape[1] - 1), axis=1)
    valid = (touched < table.shape[1]) & (page_id >= 0) & (page_id < pages)
    needed = fresh.any(-1)
    refused |= active & (needed & ~valid).any(-1)
    # An index past the end is dropped by the scatters, a clipped one is what the gathers read and discard.
    target = jnp.where(valid & needed & active[:, None], page_id, pages)
    pool = (row * pools // batch)[:, None]

    def flush(codes: Array, params: Array | None, operand: layout.Operand, quant: Quant, new: Array,
              exact: Array | None) -> tuple[Array, Array | None]:  # fmt: skip
        """Quantizes [first, last) of one operand into its pages."""
        dim = new.shape[-1]
        source = jnp.clip(quantized - start[:, None], 0, num_tokens - 1)
        tokens = new[row[:, None], source]  # [B, F, K, D]
        if exact is not None:
            # Older tokens come from the ring; all pass through its dtype, so that how tokens arrive does not matter.
            slot = fmt.sink_tokens + quantized % fmt.ring
            held = _bits(exact[row[:, None], layer, :, slot], jnp.bfloat16)
            tokens = jnp.where((quantized < start[:, None])[..., None, None], held, tokens.astype(held.dtype))
        tokens = tokens.swapaxes(1, 2)  # [B, K, F, D]
        index = (pool, layer, jnp.minimum(target, pages - 1))
        into = jnp.clip(token - first[:, None, None], 0, num_quantized - 1).reshape(batch, 1, -1, 1)

        def paged(x: Array) -> Array:
            """[B, K, F, ...] to the touched pages, [B, A, K, page, ...]."""
            taken = jnp.take_along_axis(x.reshape(*x.shape[:3], -1), into, axis=2)
            taken = taken.reshape(batch, -1, num_touched, page_size, *x.shape[3:])
            return taken.swapaxes(1, 2)

        def merge(pool_array: Array, pages_of: Array, keep: Array) -> Array:
            merged = jnp.where(keep, pages_of, pool_array[index])
            return pool_array.at[pool, layer, target].set(merged, mode="drop")

        keep = fresh[:, :, None, :, None]  # [B, A, 1, page, 1]
        if not quant.quantized:
            old = _bits(layout.unpack(codes[index], operand, 16, dim), jnp.uint16)
            merged = jnp.where(keep, paged(_bits(tokens.astype(jnp.bfloat16), jnp.uint16)), old)
            merged = layout.pack(_bits(merged, jnp.bfloat16), operand, 16)
            return codes.at[pool, layer, target].set(merged, mode="drop"), None
        assert params is not None
        where = (quantized >= fmt.sink_tokens)[:, None, :, None] if quant.per == "channel" else None
        new_codes, new_params = quantize.quantize(tokens, quant, param_dtype=params.dtype, where=where)
        old = layout.unpack(codes[index], operand, quant.bits, dim)
        merged = layout.pack(jnp.where(keep, paged(new_codes), old), operand, quant.bits)
        codes = codes.at[pool, layer, target].set(merged, mode="drop")
        if quant.per == "channel":  # one pair a group of tokens: repeated to tokens, placed, and taken once a group
            new_params = jnp.repeat(new_params, quant.token_group, axis=2)
        placed = paged(new_params)  # [B, A, K, page, ...]
        if quant.per == "channel":
            placed = placed[:, :, :, :: quant.token_group]
            keep = fresh.reshape(batch, num_touched, 1, -1, quant.token_group).any(-1)[..., None]
        params = merge(params, placed, keep[..., None])
        return codes, params

    exact_key, exact_value = _bits(cache.exact_key, jnp.uint16), _bits(cache.exact_value, jnp.uint16)

    def keep_exact() -> tuple[Array, Array]:
        return (_keep_exact(exact_key, k, start, num_new, active, layer, fmt),
                _keep_exact(exact_value, v, start, num_new, active, layer, fmt))  # fmt: skip

    # After a step of at most max_new tokens the ring still holds what is quantized now, so it is written first: a read
    # after the write happens in place; before it, XLA would copy the ring. Longer steps must read first.
    ring_first = num_tokens <= fmt.max_new
    if exact_key is not None and ring_first:
        exact_key, exact_value = keep_exact()
    key_codes, key_params = flush(cache.key_codes, cache.key_params, "key", fmt.key, k, exact_key)
    value_codes, value_params = flush(cache.value_codes, cache.value_params, "value", fmt.value, v, exact_value)
    if exact_key is not None and not ring_first:
        exact_key, exact_value = keep_exact()
    exact_key, exact_value = _bits(exact_key, jnp.bfloat16), _bits(exact_value, jnp.bfloat16)
    return Written(key_codes, key_params, value_codes, value_params, exact_key, exact_value, cache.overflowed | refused)


def _bits(exact: Any, dtype: Any) -> Any:
    """Exact tokens as uint16, or back: JAX 0.10 on the CPU gathers and scatters bfloat16 by way of a float32 copy."""
    return None if exact is None else lax.bitcast_convert_type(exact, dtype)


def _keep_exact(
    exact: Array, new: Array, start: Array, num_new: Array, active: Array, layer: Array, fmt: KVFormat
) -> Array:
    """Puts the newest tokens into the ring and the first ones into the sink slots."""
    batch, num_tokens = new.shape[:2]
    row = jnp.arange(batch)[:, None]

    def place(exact: Array, index: Array, slot: Array, wanted: Array) -> Array:
        """Token ``index`` of ``new`` ``[B, C]`` into ``slot``, where wanted."""
        slot = jnp.where(wanted & active[:, None], slot, exact.shape[3])
        tokens = _bits(new[row, jnp.clip(index, 0, num_tokens - 1)].astype(jnp.bfloat16), exact.dtype)
        return exact.at[row, layer, :, slot].set(tokens, mode="drop")

    count = min(num_tokens, fmt.ring)  # of more tokens than slots only the last ones stay
    index = num_new[:, None] - count + jnp.arange(count, dtype=num_new.dtype)
    position = start[:, None] + index
    slot = fmt.sink_tokens + position % fmt.ring
    exact = place(exact, index, slot, (index >= 0) & (position >= fmt.sink_tokens))
    if fmt.sink_tokens:
        index = jnp.broadcast_to(
            jnp.arange(min(num_tokens, fmt.sink_tokens), dtype=num_new.dtype), (batch, min(num_tokens, fmt.sink_tokens))
        )
        position = start[:, None] + index
        exact = place(exact, index, position, (index < num_new[:, None]) & (position < fmt.sink_tokens))
    return exact


write_p = Primitive("jax_foscar_write")
write_p.multiple_results = True


def write(cache: Written, given: Given, fmt: KVFormat, implementation: str | None) -> Written:
    """Binds the primitive: the cache's arrays with the row's ``num_new`` tokens of ``k`` and ``v`` written."""
    # ``overflowed`` follows from rows and positions alone: under shard_map it does not vary over axes that split heads.
    overflowed, *positions = tracing.same_varying([cache.overflowed, *given[:4]])
    arrays = [*_present(cache._replace(overflowed=None)), given.k, given.v]
    *arrays, k, v = tracing.same_varying([*arrays, overflowed])[:-1]
    results = write_p.bind(*arrays, overflowed, *positions, k, v, fmt=fmt, num_vmaps=0, implementation=implementation)
    return _named([*results, *given], fmt)[0]


write_p.def_impl(lambda *args, **params: xla.apply_primitive(write_p, *args, **params))


@write_p.def_abstract_eval
def _abstract(*operands: Any, **_: Any) -> list[Any]:
    return [tracing.like(x, x.shape, x.dtype) for x in operands[: len(operands) - len(Given._fields)]]


ad.primitive_jvps[write_p] = tracing.no_jvp("KVCache.write")


def _batch(args: Any, dims: Any, *, num_vmaps: int, **params: Any) -> tuple[Any, Any]:
    """The mapped axis goes in front of every operand; ``num_vmaps`` counts them. By the row rule, flattened into pools
    and rows it leaves every row in its pool and at its layer, so that the kernels need not know of it."""
    num_written = len(args) - len(Given._fields)
    if all(d is None for d in dims[:num_written]):
        raise ValueError(
            "write: k, v or the positions are mapped by vmap, but the cache is not, so that the result would be as "
            "many caches: map the cache too (in_axes=0), or make the mapped axis part of the batch"
        )
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    placed = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims, strict=True)
    ]
    results = write_p.bind(*placed, num_vmaps=num_vmaps + 1, **params)
    return results, [0] * num_written


batching.primitive_batchers[write_p] = _batch


def _jnp(*args: Array, fmt: KVFormat, num_vmaps: int) -> list[Any]:
    def one(*args: Array) -> list[Any]:
        cache, given = _named(args, fmt)
        return _present(_write(cache, given._replace(layer=given.layer[0]), fmt))

    for _ in range(num_vmaps):
        one = jax.vmap(one)
    return one(*args)


_lower_jnp = mlir.lower_fun(_jnp, multiple_results=True)


def _lower_elsewhere(ctx: Any, *operands: Any, implementation: str | None, **params: Any) -> Any:
    if implementation != "xla":
        primitive.refuse_elsewhere(ctx, implementation)
    return _lower_jnp(ctx, *operands, **params)


def _lower_kernel(platform: str) -> Any:
    def lower(ctx: Any, *operands: Any, fmt: KVFormat, num_vmaps: int, implementation: str | None) -> Any:
        if implementation == "xla":
            return _lower_jnp(ctx, *operands, fmt=fmt, num_vmaps=num_vmaps)
        primitive.require_kernel(platform, implementation)
        *_, k, v = ctx.avals_in
        in_place = {i: i for i in range(len(ctx.avals_out))}
        call = jax.ffi.ffi_lowering(primitive.WRITE_TARGET, operand_output_aliases=in_place)
        return call(ctx, *operands, **primitive.format_attributes(fmt, k.shape[-1], v.shape[-1]))

    return lower


mlir.register_lowering(write_p, _lower_elsewhere)
mlir.register_lowering(write_p, _lower_kernel("cpu"), platform="cpu")
mlir.register_lowering(write_p, _lower_kernel("cuda"), platform="cuda")
