"""The attention primitive: abstract evaluation, batching by the row rule, lowerings.

Operands, in order: q ``[B, T, N, D]``, key codes and params, value codes and params (``[..., U, L, P, K, a, b]``),
page_table ``[X, M]``, length ``[X]``, layer ``[X]``, exact key and value ``[X, L, K, S+W, D]``, sinks f32 ``[X, N]``,
query_lengths ``[X]``, tree_mask bool ``[X, T, T]``. Those that the format does not have (params at 16 bits, exact
arrays) or the call did not give are left out, and named in the static ``absent``.

Row rule: row r of B uses entry ``r * X // B`` of an operand with X rows, and pool ``r * U // B``. It is what lets every
vmap become one call on the same buffers, without a copy of the cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from . import native, reference, tracing
from .format import KVFormat
from .visibility import Options

TARGET = "jax_foscar_decode_attention_v1"
WRITE_TARGET = "jax_foscar_write_v1"  # write.py's


class Operands(NamedTuple):
    """The primitive's operands by name; None for those that are absent."""

    q: Any
    key_codes: Any
    key_params: Any
    value_codes: Any
    value_params: Any
    page_table: Any
    length: Any
    layer: Any
    exact_key: Any
    exact_value: Any
    sinks: Any
    query_lengths: Any
    tree_mask: Any

    def present(self) -> list[Any]:
        return [x for x in self if x is not None]

    def absent(self) -> tuple[str, ...]:
        return tuple(name for name, x in zip(self._fields, self, strict=True) if x is None)


POOLS = ("key_codes", "key_params", "value_codes", "value_params")


def _named(present: Any, absent: tuple[str, ...]) -> Operands:
    """The inverse of ``Operands.present``."""
    rest = iter(present)
    return Operands(*(None if name in absent else next(rest) for name in Operands._fields))


decode_attention_p = Primitive("jax_foscar_decode_attention")
decode_attention_p.multiple_results = True


def bind(
    operands: Operands, *, fmt: KVFormat, options: Options, value_head_dim: int, implementation: str | None
) -> tuple[Array, Array]:
    """Binds the primitive; returns ``(out [B, T, N, value_head_dim], lse [B, T, N])``."""
    out, lse = decode_attention_p.bind(
        *tracing.same_varying(operands.present()),
        absent=operands.absent(),
        fmt=fmt,
        options=options,
        value_head_dim=value_head_dim,
        implementation=implementation,
    )
    return out, lse


decode_attention_p.def_impl(lambda *args, **params: xla.apply_primitive(decode_attention_p, *args, **params))


@decode_attention_p.def_abstract_eval
def _abstract(q: Any, *_: Any, value_head_dim: int, **__: Any) -> list[Any]:
    return [
        tracing.like(q, (*q.shape[:3], value_head_dim), q.dtype),
        tracing.like(q, q.shape[:3], np.dtype("float32")),
    ]


ad.primitive_jvps[decode_attention_p] = tracing.no_jvp("decode_attention")


# --- Batching -----------------------------------------------------------------------------------------------------


def _batch(args: Any, dims: Any, *, absent: tuple[str, ...], **params: Any) -> tuple[Any, Any]:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    x, dim = _named(args, absent), _named(dims, absent)
    mapped = {name for name in Operands._fields if getattr(dim, name) is not None}
    if mapped & set(POOLS):
        batched, axis = _axis_in_front(x, dim, size), 0
    elif mapped <= {"q", "sinks"}:
        return _axis_in_heads(x, dim, size, **params)
    else:
        batched, axis = _axis_behind(x, dim, size), 1
    results = bind(batched, **params)
    rows = x.q.shape[0 if dim.q is None or dim.q > 0 else 1]
    shape = (size, rows) if axis == 0 else (rows, size)
    return [r.reshape(*shape, *r.shape[1:]) for r in results], [axis, axis]


def _axis_in_front(x: Operands, dim: Operands, size: int) -> Operands:
    """Pools mapped: each keeps the axis in front of U; the rows of the others are (axis, row)."""

    def place(name: str) -> Any:
        value, d = getattr(x, name), getattr(dim, name)
        if value is None:
            return None
        value = jnp.broadcast_to(value, (size, *value.shape)) if d is None else jnp.moveaxis(value, d, 0)
        return value if name in POOLS else value.reshape(-1, *value.shape[2:])

    return Operands(*map(place, Operands._fields))


def _axis_behind(x: Operands, dim: Operands, size: int) -> Operands:
    """Pools not mapped: the rows of mapped operands become (row, axis), so that a row still finds its pool."""
    rows = x.q.shape[0 if dim.q is None or dim.q > 0 else 1]

    def place(name: str) -> Any:
        value, d = getattr(x, name), getattr(dim, name)
        if name == "q" and d is None:
            return jnp.repeat(value, size, axis=0)
        if value is None or d is None:
            return value
        value = reference.expand_rows(jnp.moveaxis(value, d, 0).swapaxes(0, 1), rows)
        return value.reshape(-1, *value.shape[2:])

    return Operands(*map(place, Operands._fields))


def _axis_in_heads(x: Operands, dim: Operands, size: int, **params: Any) -> tuple[Any, Any]:
    """Only q or sinks mapped: the axis joins the heads that share a KV head, so that the cache is read once."""
    kv_heads = x.key_codes.shape[-3]

    def join(value: Any, d: int | None, axis: int) -> Any:
        """``value`` with the mapped axis right behind the KV heads in ``axis``, that of the heads."""
        value = jnp.broadcast_to(value, (size, *value.shape)) if d is None else jnp.moveaxis(value, d, 0)
        lead, heads, rest = value.shape[1 : axis + 1], value.shape[axis + 1], value.shape[axis + 2 :]
        split = value.reshape(size, *lead, kv_heads, heads // kv_heads, *rest)
        return jnp.moveaxis(split, 0, axis + 1).reshape(*lead, size * heads, *rest)

    q = join(x.q, dim.q, 2)
    sinks = None if x.sinks is None else join(x.sinks, dim.sinks, 1)
    rows, queries, heads = q.shape[0], q.shape[1], q.shape[2] // size
    results = bind(x._replace(q=q, sinks=sinks), **params)

    def part(r: Array) -> Array:
        r = r.reshape(rows, queries, kv_heads, size, heads // kv_heads, *r.shape[3:])
        r = jnp.moveaxis(r, 3, 0)
        return r.reshape(size, rows, queries, heads, *r.shape[5:])

    return [part(r) for r in results], [0, 0]


batching.primitive_batchers[decode_attention_p] = _batch


# --- Lowering -----------------------------------------------------------------------------------------------------


def _reference(*args: Array, absent: tuple[str, ...], implementation: str | None, **params: Any) -> tuple[Array, Array]:
    return reference.attend(*_named(args, absent), **params)


def _lower_elsewhere(ctx: Any, *operands: Any, implementation: str | None, **params: Any) -> Any:
    """Platforms without a kernel of ours (TPU, ROCm): the jnp reference."""
    refuse_elsewhere(ctx, implementation)
    return mlir.lower_fun(_reference, multiple_results=True)(ctx, *operands, implementation=None, **params)


def _lower_kernel(platform: str) -> Any:
    def lower(
        ctx: Any,
        *operands: Any,
        absent: tuple[str, ...],
        fmt: KVFormat,
        options: Options,
        value_head_dim: int,
        implementation: str | None,
    ) -> Any:
        require_kernel(platform, implementation)
        # The handler's arguments are always all there; one that is absent is filled and not looked at.
        avals = _named(ctx.avals_in, absent)
        values = _named(operands, absent)
        filled = [
            (values.page_table, avals.page_table) if value is None else (value, aval)
            for value, aval in zip(values, avals, strict=True)
        ]
        results = list(ctx.avals_out)
        if platform == "cuda":
            batch, num_queries, num_heads, _ = avals.q.shape
            size = workspace_bytes(batch, num_queries, num_heads, avals.key_codes.shape[-3], value_head_dim)
            results.append(tracing.like(avals.length, (size,), np.dtype("uint8")))
        full = ctx.replace(avals_in=[aval for _, aval in filled], avals_out=results)
        attributes = _attributes(fmt, options, avals, value_head_dim)
        return jax.ffi.ffi_lowering(TARGET)(full, *(value for value, _ in filled), **attributes)[: len(ctx.avals_out)]

    return lower


def _attributes(fmt: KVFormat, options: Options, x: Operands, value_head_dim: int) -> dict[str, np.generic]:
    """Format, options and which operands there are, as the handler's attributes (``cuda/ffi_params.h``)."""
    left, right = options.window
    attributes = {"is_causal": options.is_causal, "window_left": left, "window_right": right}
    for name in ("sinks", "query_lengths", "tree_mask"):
        attributes[f"has_{name}"] = getattr(x, name) is not None
    reals = {"scale": options.scale, "logits_soft_cap": options.soft_cap}
    return {
        **format_attributes(fmt, x.q.shape[-1], value_head_dim),
        **{name: np.int32(value) for name, value in attributes.items()},
        **{name: np.float32(value) for name, value in reals.items()},
    }


def format_attributes(fmt: KVFormat, head_dim: int, value_head_dim: int) -> dict[str, np.int32]:
    """The format as a handler's attributes; dtypes are fixed here and in ``_attributes`` and nowhere else."""
    attributes = {"sink_tokens": fmt.sink_tokens, "recent_tokens": fmt.recent_tokens}
    for name, quant, dim in (("key", fmt.key, head_dim), ("value", fmt.value, value_head_dim)):
        attributes[f"{name}_bits"] = quant.bits
        attributes[f"{name}_group"] = quant.group_size(dim)
        attributes[f"{name}_per_channel"] = quant.per == "channel"
    return {name: np.int32(value) for name, value in attributes.items()}


def workspace_bytes(batch: Any, num_queries: Any, num_heads: int, num_kv_heads: int, value_head_dim: int) -> Any:
    """Bytes of scratch memory of a call on CUDA, whatever the device; ``cuda/workspace.h`` says what stands there."""
    rows = num_queries * (num_heads // num_kv_heads)
    if isinstance(rows, int) and rows <= 4:
        item_rows = 4
    elif value_head_dim > 128 or (isinstance(rows, int) and rows <= 8):
        item_rows = 8
    else:
        item_rows = 16
    return (batch + 4) // 4 * 16 + 4 * 2 * 2048 * item_rows * (value_head_dim + 2)


def refuse_elsewhere(ctx: Any, implementation: str | None) -> None:
    """Raises ValueError where a kernel was asked for by name and the platform has none of ours."""
    if implementation is not None:
        raise ValueError(
            f"implementation={implementation!r} cannot run on {'/'.join(ctx.module_context.platforms)}: leave "
            "implementation out, or pass implementation='xla'"
        )


def require_kernel(platform: str, implementation: str | None) -> None:
    """Raises ValueError where another platform's kernel was asked for by name, and RuntimeError where the program will
    run in this process and the platform's kernels are not built."""
    if implementation not in (None, platform):
        raise ValueError(
            f"implementation={implementation!r} was asked for, but this program is compiled for {platform}: leave "
            f"implementation out, or place the computation on a {implementation} device"
        )
    runs_here = platform == "cpu" or jax.default_backend() == "gpu"
    if runs_here and native.module(platform) is None:
        remedy = "put nvcc on PATH and reinstall jax_foscar" if platform == "cuda" else "reinstall jax_foscar"
        raise RuntimeError(
            f"this jax_foscar was built without its {platform} module: {remedy}, or pass implementation='xla'"
        )


mlir.register_lowering(decode_attention_p, _lower_elsewhere)
mlir.register_lowering(decode_attention_p, _lower_kernel("cpu"), platform="cpu")
mlir.register_lowering(decode_attention_p, _lower_kernel("cuda"), platform="cuda")


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What ``jax.export.export(..., disabled_checks=jax_foscar.export_checks())`` needs to accept our custom calls."""
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in (TARGET, WRITE_TARGET)]
