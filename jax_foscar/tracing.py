"""What both primitives need of JAX: result types, varying axes and the refusal of what they cannot serve."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, PartitionSpec


def like(operand: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a result that is sharded and varies as ``operand`` does on the leading axes they share."""
    spec = PartitionSpec(*(tuple(operand.sharding.spec) + (None,) * len(shape))[: len(shape)])
    return operand.update(shape=shape, dtype=dtype, weak_type=False, sharding=operand.sharding.update(spec=spec))


def same_varying(operands: list[Array]) -> list[Array]:
    """Operands cast to vary over the union of their manual mesh axes; without it shard_map would believe a result
    replicated that is not."""
    union: frozenset[str] = frozenset().union(*(jax.typeof(x).mat.varying for x in operands))
    return [
        jax.lax.pcast(x, tuple(missing), to="varying") if (missing := union - jax.typeof(x).mat.varying) else x
        for x in operands
    ]


def refuse_explicit_sharding(name: str, **arrays: Array | None) -> None:
    """Raises ValueError where an operand is sharded over an Explicit mesh axis: XLA would gather it for the call."""
    for argument, array in arrays.items():
        if array is None:
            continue
        sharding = jax.typeof(array).sharding
        explicit = {n for n, kind in zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
                    if kind == AxisType.Explicit}  # fmt: skip
        used = {axis for part in sharding.spec if part for axis in (part if isinstance(part, tuple) else (part,))}
        if used & explicit:
            raise ValueError(
                f"{name}: {argument} is sharded over the explicit mesh axes {sorted(used & explicit)}, which a kernel "
                "call cannot follow: call it under jax.shard_map, with cache.specs(...) for the cache"
            )


def no_jvp(name: str) -> Any:
    """The JVP rule of an operation without gradients: advice."""

    def rule(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{name} has no gradient, because codes are integers: attend over unquantized keys and values (for example "
            "with jax.nn.dot_product_attention) where you differentiate, or wrap the operands in jax.lax.stop_gradient"
        )

    return rule
