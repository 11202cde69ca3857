"""Dumps of a cache: named NumPy arrays, and the description that stands beside a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .cache import KVCache
from .format import KVFormat


def describe(cache: KVCache) -> dict[str, Any]:
    """What the arrays do not tell: format (layout version included) and head dims, for JSON beside a checkpoint."""
    return {"format": str(cache.format), "head_dim": cache.head_dim, "value_head_dim": cache.value_head_dim}


def check_description(cache: KVCache, saved: Mapping[str, Any]) -> None:
    """Raises ValueError unless ``saved``, from ``describe``, is of a cache like this one.

    Before restoring: INT4 bytes fit into an INT2 cache of twice the head dim, and nothing else would notice.

    Args:
      cache: where the checkpoint is to go; one of shapes (``jax.eval_shape``) will do.
      saved: what stands beside the checkpoint.
    """
    for name, ours in describe(cache).items():
        theirs = saved.get(name)
        if theirs != ours:
            raise ValueError(
                f"saved {name} is {theirs!r}, the cache's is {ours!r}: restore into a cache created with what was saved"
            )


def to_numpy(cache: KVCache) -> dict[str, np.ndarray]:
    """A cache as named NumPy arrays, which ``np.savez`` takes and ``np.load`` returns without pickle.

    Holds the bytes as they are under the arrays' names (``key.codes``, ...), and what ``describe`` tells beside them.
    bfloat16, which ``.npy`` files do not know, stands as its bits in uint16.
    """
    arrays = {name: np.asarray(value) for name, value in describe(cache).items()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(cache):
        array = np.asarray(leaf)
        arrays[_name(path)] = array.view(np.uint16) if array.dtype == jnp.bfloat16 else array
    return arrays


def from_numpy(arrays: Mapping[str, np.ndarray], format: KVFormat | None = None) -> KVCache:
    """The cache that ``to_numpy`` wrote, to the bit.

    Args:
      arrays: what ``to_numpy`` returned, or an open ``np.load`` of it.
      format: the format that the program needs; a dump of another one is refused. None takes what there is.

    Raises:
      ValueError: another format or layout version, or an array that is missing, or has another dtype or shape than the
        format gives.
    """
    there = lambda name: np.asarray(arrays[name]) if name in arrays else None  # noqa: E731
    missing = [
        name for name in ("format", "head_dim", "value_head_dim", "key.codes", "page_table") if name not in arrays
    ]
    if missing:
        raise ValueError(f"arrays must be what to_numpy returned, and lack {missing}")
    saved = KVFormat.parse(str(arrays["format"]))
    if format is not None and saved != format:
        raise ValueError(
            f"arrays hold format {str(saved)!r}, not {str(format)!r}: create the program's cache like that"
        )
    codes, table = np.shape(arrays["key.codes"]), np.shape(arrays["page_table"])
    if len(codes) != 6 or len(table) != 2 or 0 in (*codes, *table):
        raise ValueError(f"arrays must have key.codes of rank 6 and page_table of rank 2, got {codes} and {table}")
    expected = jax.eval_shape(
        lambda: KVCache.create_paged(
            saved,
            num_pages=codes[2],
            num_pools=codes[0],
            batch=table[0],
            max_length=table[1] * saved.page_size,
            num_layers=codes[1],
            num_kv_heads=codes[3],
            head_dim=int(arrays["head_dim"]),
            value_head_dim=int(arrays["value_head_dim"]),
        )
    )

    def leaf(path: Any, spec: jax.ShapeDtypeStruct) -> jax.Array:
        name, array = _name(path), there(_name(path))
        dtype = np.dtype(np.uint16) if spec.dtype == jnp.bfloat16 else np.dtype(spec.dtype)
        if array is None or (array.dtype, array.shape) != (dtype, spec.shape):
            got = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
            raise ValueError(f"arrays[{name!r}] must be {dtype} {list(spec.shape)} for {str(saved)!r}, got {got}")
        return jnp.asarray(array.view(spec.dtype))

    cache: KVCache = jax.tree_util.tree_map_with_path(leaf, expected)
    return cache


def _name(path: Any) -> str:
    return ".".join(entry.name for entry in path)
