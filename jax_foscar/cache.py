"""The cache of a whole model: one frozen pytree that travels through jit, scan and vmap."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jax.sharding import PartitionSpec

from . import layout, native, reference, rows, tracing, windows
from . import write as writing
from .format import KVFormat, Quant, _integer
from .quantize import params_shape

_FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Pages:
    """The pages of one operand, K or V.

    Attributes:
      codes: uint8 ``[U, L, P, K, page, bytes]``; the last two axes are a byte count that only ``layout`` indexes.
      params: scale and offset interleaved, ``[U, L, P, K, page, D/group, 2]`` per token or
        ``[U, L, P, K, page/group, D, 2]`` per channel; None at 16 bits.
    """

    codes: Array
    params: Array | None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KVCache:
    """Keys and values of all layers, quantized in pages, with the tokens that are not (yet) quantized beside them.

    A frozen pytree: each method returns a new cache, and a jitted step that donates the cache updates it in place. With
    B rows, L layers, K KV heads, U pools of P pages a layer, M page-table entries a row and S + W exact slots:

    Attributes:
      format: the static ``KVFormat``.
      head_dim: channels of a key (and query) head.
      value_head_dim: channels of a value head.
      key: ``Pages`` of the keys.
      value: ``Pages`` of the values.
      page_table: int32 ``[B, M]``, ids in [0, P) of the row's own pool ``b * U // B``, the same for every layer.
        Entries past a row's length may hold anything.
      length: int32 ``[B]``, tokens cached a row.
      num_new: int32 ``[B]``, tokens of the last ``advance``.
      overflowed: bool ``[B]``, set once a write did not fit or met a bad page id, and is dropped; also where a row was
        rolled back, copied or reset to tokens that are gone. Only ``reset_row`` and ``copy_row`` clear it.
      exact_key: bfloat16 ``[B, L, K, S + W, head_dim]``, or None where the format keeps no exact tokens.
      exact_value: bfloat16 ``[B, L, K, S + W, value_head_dim]``, or None.
    """

    format: KVFormat
    head_dim: int
    value_head_dim: int
    key: Pages
    value: Pages
    page_table: Array
    length: Array
    num_new: Array
    overflowed: Array
    exact_key: Array | None
    exact_value: Array | None

    @classmethod
    def create(
        cls,
        format: KVFormat,
        *,
        batch: int,
        max_length: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        value_head_dim: int | None = None,
    ) -> KVCache:
        """An empty cache in which each row owns the pages of ``max_length`` tokens (rounded up to whole pages).

        Args:
          format: how keys and values are kept.
          batch: rows.
          max_length: tokens a row can hold.
          num_layers: layers of the model.
          num_kv_heads: KV heads a layer.
          head_dim: channels of a key head: 64, 80, 96, 128, 192 or 256.
          value_head_dim: channels of a value head, ``head_dim`` by default.

        Raises:
          TypeError, ValueError: an argument of the wrong type, or out of range.
        """
        width = _table_width(format, max_length)
        cache = cls.create_paged(
            format,
            num_pages=width,
            num_pools=batch,
            batch=batch,
            max_length=max_length,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
        )
        return dataclasses.replace(cache, page_table=jnp.tile(jnp.arange(width, dtype=jnp.int32), (batch, 1)))

    @classmethod
    def create_paged(
        cls,
        format: KVFormat,
        *,
        num_pages: int,
        num_pools: int = 1,
        batch: int,
        max_length: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        value_head_dim: int | None = None,
    ) -> KVCache:
        """An empty cache whose rows own no page: the page table is the caller's, and is filled with -1.

        ``PageAllocator`` hands out ids, ``reset_row`` and ``copy_row`` put them into the table. Rows may share pages
        that none of them writes any more (``format.full_pages``). docs/serving.md walks through it.

        Args:
          format: how keys and values are kept.
          num_pages: pages of one layer of one pool.
          num_pools: pools; row b draws from pool ``b * num_pools // batch``. One pool serves all rows best, but cannot
            be sharded over rows.
          batch: rows, a multiple of ``num_pools``.
          max_length: tokens a row can hold, given the pages: the width of the page table (rounded up to whole pages).
          num_layers, num_kv_heads, head_dim, value_head_dim: as in ``create``.

        Raises:
          TypeError, ValueError: an argument of the wrong type, or out of range.
        """
        width = _table_width(format, max_length)
        batch = _integer("batch", batch, 1)
        num_pages = _integer("num_pages", num_pages, 1)
        num_pools = _integer("num_pools", num_pools, 1)
        if batch % num_pools:
            raise ValueError(f"batch must be a multiple of num_pools={num_pools}, got {batch}: pools serve rows evenly")
        num_layers = _integer("num_layers", num_layers, 1)
        num_kv_heads = _integer("num_kv_heads", num_kv_heads, 1)
        head_dim = _integer("head_dim", head_dim, 1)
        value_head_dim = head_dim if value_head_dim is None else _integer("value_head_dim", value_head_dim, 1)
        format.key.check_head_dim("head_dim", head_dim)
        format.value.check_head_dim("value_head_dim", value_head_dim)
        lead = (num_pools, num_layers, num_pages, num_kv_heads)

        # Each array gets a buffer of its own: one that stood twice could not be donated.
        def empty_pages(quant: Quant, dim: int) -> Pages:
            codes = jnp.zeros((*lead, format.page_size, layout.token_bytes(quant.bits, dim)), jnp.uint8)
            shape = params_shape(format, quant, dim)
            return Pages(codes, jnp.zeros((*lead, *shape), format.param_dtype) if quant.quantized else None)

        def empty_exact(dim: int) -> Array | None:
            slots = format.sink_tokens + format.ring
            return (
                jnp.zeros((batch, num_layers, num_kv_heads, slots, dim), jnp.bfloat16) if format.keeps_exact else None
            )

        return cls(
            format=format,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            key=empty_pages(format.key, head_dim),
            value=empty_pages(format.value, value_head_dim),
            page_table=jnp.full((batch, width), -1, jnp.int32),
            length=jnp.zeros((batch,), jnp.int32),
            num_new=jnp.zeros((batch,), jnp.int32),
            overflowed=jnp.zeros((batch,), bool),
            exact_key=empty_exact(head_dim),
            exact_value=empty_exact(value_head_dim),
        )

    # --- Sizes -----------------------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Rows."""
        return self.length.shape[0]

    @property
    def num_layers(self) -> int:
        """Layers."""
        return self.key.codes.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """KV heads a layer."""
        return self.key.codes.shape[3]

    @property
    def capacity(self) -> int:
        """Tokens a row can hold."""
        return self.page_table.shape[1] * self.format.page_size

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; also of a cache of shapes (``jax.eval_shape``)."""
        return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(self))

    @property
    def effective_bits(self) -> float:
        """Bits that one cached value costs in the pages: codes, their padding, scale and offset."""
        arrays = [x for pages in (self.key, self.value) for x in (pages.codes, pages.params) if x is not None]
        stored = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in arrays)
        values = math.prod(self.key.codes.shape[:5]) * (self.head_dim + self.value_head_dim)
        return 8 * stored / values

    def __repr__(self) -> str:
        sizes = {"pools": 0, "layers": 1, "pages": 2, "kv_heads": 3}
        try:
            shape = self.key.codes.shape
            parts = [f"batch={self.batch}", *(f"{name}={shape[axis]}" for name, axis in sizes.items())]
            parts += [f"head_dim={self.head_dim}", f"value_head_dim={self.value_head_dim}"]
        except (AttributeError, IndexError, TypeError):  # JAX unflattens pytrees with anything inside
            parts = []
        return f"KVCache({', '.join([repr(str(self.format)), *parts])})"

    # --- Steps -----------------------------------------------------------------------------------------------------

    def advance(self, count: int | Array) -> KVCache:
        """Counts new tokens in; once a step, before ``write``.

        Args:
          count: new tokens of every row, or int ``[B]``, one count a row; 0 leaves a row as it is. Negative counts of
            an array are taken as 0.
        """
        counts = rows.counts("count", count, self.length.shape)
        return dataclasses.replace(self, length=self.length + counts, num_new=counts)

    def positions(self, num_tokens: int) -> Array:
        """Absolute positions of the step's tokens, int32 ``[B, num_tokens]``: what RoPE needs.

        Token j of a row is its j-th new one; positions past the row's count of new tokens are those of padding.
        """
        start = self.length - self.num_new
        return start[:, None] + jnp.arange(_integer("num_tokens", num_tokens, 0), dtype=jnp.int32)

    def write(
        self,
        k: Array,
        v: Array,
        *,
        layer: int | Array,
        implementation: Literal["cuda", "cpu", "xla"] | None = None,
    ) -> KVCache:
        """Stores the step's tokens in one layer; ``advance`` has counted them.

        Row b takes the first ``num_new[b]`` tokens of ``k`` and ``v``; the rest is padding. Tokens are rounded to
        bfloat16 first where the format keeps exact ones. A token that does not fit, or whose page id is out of range,
        is dropped and sets ``overflowed``. Write first, then attend: in this order, with the cache donated, nothing is
        copied.

        Args:
          k: ``[B, T, K, head_dim]``, after RoPE; float32, bfloat16 or float16.
          v: ``[B, T, K, value_head_dim]``.
          layer: int, or an integer scalar that may be traced.
          implementation: as in ``decode_attention``; all of them write the same bytes.

        Raises:
          TypeError, ValueError: an argument of the wrong dtype, shape or range; under vmap, ``k`` or ``v`` mapped while
            the cache is not.
          RuntimeError: the program is compiled for a platform whose module was not built.
        """
        self._check_arrays()
        native.check_implementation(implementation)
        heads = self.num_kv_heads
        for name, x, dim in (("k", k, self.head_dim), ("v", v, self.value_head_dim)):
            if not hasattr(x, "dtype") or x.dtype.name not in _FLOATS:
                raise TypeError(f"{name} must be an array of {', '.join(_FLOATS)}, got {getattr(x, 'dtype', type(x))}")
            if x.ndim != 4 or (x.shape[0], x.shape[2], x.shape[3]) != (self.batch, heads, dim):
                raise ValueError(f"{name} must have shape [{self.batch}, T, {heads}, {dim}], got {list(x.shape)}")
        if k.shape[1] != v.shape[1]:
            raise ValueError(f"k and v must bring the same tokens, got T={k.shape[1]} and T={v.shape[1]}")
        if k.shape[1] == 0:
            return self
        tracing.refuse_explicit_sharding("write", k=k, v=v, cache=self.key.codes)
        written = writing.write(
            writing.Written(
                self.key.codes, self.key.params, self.value.codes, self.value.params, self.exact_key, self.exact_value,
                self.overflowed,
            ),
            writing.Given(
                self.page_table, self.length, self.num_new, self._layer_operand(layer), jnp.asarray(k), jnp.asarray(v)
            ),
            self.format,
            implementation,
        )  # fmt: skip
        return dataclasses.replace(
            self,
            key=Pages(written.key_codes, written.key_params),
            value=Pages(written.value_codes, written.value_params),
            exact_key=written.exact_key,
            exact_value=written.exact_value,
            overflowed=written.overflowed,
        )

    def append(self, k: Array, v: Array, *, implementation: Literal["cuda", "cpu", "xla"] | None = None) -> KVCache:
        """``advance`` and ``write`` at once, for a cache of one layer.

        Raises:
          ValueError: the cache has several layers, each of which needs its own ``write`` after one ``advance``.
        """
        self._check_arrays()
        if self.num_layers != 1:
            raise ValueError(
                f"append serves caches of one layer, and this one has num_layers={self.num_layers}: call advance once "
                "a step, then write(k, v, layer=i) in each layer"
            )
        if getattr(k, "ndim", 0) != 4:
            raise ValueError(f"k must have shape [B, T, K, D], got {getattr(k, 'shape', k)}")
        return self.advance(k.shape[1]).write(k, v, layer=0, implementation=implementation)

    def check(self) -> None:
        """Raises OverflowError if a row lost tokens; reads ``overflowed`` on the host."""
        lost = np.flatnonzero(np.asarray(self.overflowed))
        if lost.size:
            raise OverflowError(
                f"rows {lost.tolist()} of the cache lost tokens: they outgrew {self.capacity} tokens a row (create the "
                f"cache with a larger max_length), had no page id in [0, {self.key.codes.shape[2]}) where a token went "
                "(give a row its pages before the step), or were rolled back, copied or reset to tokens that are gone"
            )

    def dequantize(self, layer: int | Array = 0) -> tuple[Array, Array]:
        """Keys and values of one layer as attention sees them, float32 ``[B, capacity, K, D]``; 0 past the length."""
        self._check_arrays()
        index = self._layer_operand(layer)[0]
        fmt, n = self.format, self.length
        pool = (jnp.arange(self.batch) * self.key.codes.shape[0] // self.batch)[:, None]
        ids = jnp.clip(self.page_table, 0, self.key.codes.shape[2] - 1)
        token = jnp.arange(self.capacity, dtype=n.dtype)

        def tokens(pages: Pages, exact: Array | None, operand: layout.Operand, quant: Quant, dim: int) -> Array:
            params = None if pages.params is None else pages.params[pool, index, ids]
            x = reference.dequantize_pages(pages.codes[pool, index, ids], params, operand, quant, dim)
            x = x.swapaxes(2, 3).reshape(self.batch, -1, self.num_kv_heads, dim)
            if exact is not None:
                slot = jnp.where(token < fmt.sink_tokens, token, fmt.sink_tokens + token % fmt.ring)
                is_exact = (token < fmt.sink_tokens) | (token >= windows.quantized_length(n, fmt)[:, None])
                x = jnp.where(is_exact[..., None, None], exact[:, index][:, :, slot].swapaxes(1, 2).astype(x.dtype), x)
            return jnp.where((token < n[:, None])[..., None, None], x, 0)

        return (
            tokens(self.key, self.exact_key, "key", fmt.key, self.head_dim),
            tokens(self.value, self.exact_value, "value", fmt.value, self.value_head_dim),
        )

    # --- Rows ------------------------------------------------------------------------------------------------------

    def rollback(self, count: int | Array) -> KVCache:
        """Forgets the newest ``count`` tokens of the last step: what speculative decoding does with rejected drafts.

        Lowers ``length`` and ``num_new``, and nothing else; the next step leaves what it would have left had the
        forgotten tokens never been written. Where the format keeps exact tokens, this takes a step of at most
        ``format.max_new`` tokens, the rejected ones counted: after longer ones the ring has forgotten what is needed.

        Args:
          count: tokens of every row, or int ``[B]``; at most ``num_new``. Negative counts of an array are taken as 0. A
            row that is asked for more than can be undone is lost: attention gives NaN, and ``overflowed`` is set.

        Raises:
          TypeError, ValueError: ``count`` of the wrong dtype or shape, or an int out of range.
        """
        self._check_arrays()
        return rows.rollback(self, count)

    def reset_row(
        self, row: int | Array, page_ids: Array | Sequence[int] | None = None, length: int | Array = 0
    ) -> KVCache:
        """Gives one row to another request (admits it), or to none (retires it); clears ``overflowed``.

        Changes small int arrays only. A retired row stands still as long as its count in ``advance`` is 0.

        Args:
          row: the row; an int, or an integer scalar that may be traced (one out of range changes nothing).
          page_ids: the row's new entries in the page table, at most M of them, padded with -1 (``[]``: it owns
            nothing). None leaves the entries as they are.
          length: tokens that these pages hold already: a shared prefix. Where the format keeps any of them exact, pages
            do not suffice (``copy_row`` does): an int raises, and a traced length loses the row, as in ``rollback``.

        Raises:
          TypeError, ValueError: an argument of the wrong dtype or shape, or an int out of range.
        """
        self._check_arrays()
        return rows.reset_row(self, row, page_ids, length)

    def copy_row(self, src: int | Array, dst: int | Array, page_ids: Array | Sequence[int] | None = None) -> KVCache:
        """Makes row ``dst`` hold the tokens of row ``src``: a fork, for beam search or a shared prefix.

        Pages that both rows name are shared; the other pages that hold tokens are copied, and so are exact tokens,
        ``length`` and ``overflowed``. Neither row can be rolled back past this point (``num_new`` is 0).

        A fork shares the ``format.full_pages(length)`` first pages of ``src``, which no step writes again, and owns the
        rest: both rows will write their last page. With the cache donated, only what is copied is touched.

        Args:
          src: the row to copy; an int, or an integer scalar that may be traced (one out of range changes nothing).
          dst: the row to replace, likewise.
          page_ids: the new entries of ``dst`` in the page table, at most M, padded with -1. Pages to be copied into
            must not be in use. None keeps the entries of ``dst``. A page id that is out of range loses the row.

        Raises:
          TypeError, ValueError: an argument of the wrong dtype or shape, or an int out of range.
        """
        self._check_arrays()
        return rows.copy_row(self, src, dst, page_ids)

    # --- Sharding --------------------------------------------------------------------------------------------------

    def specs(self, *, batch: Any = None, heads: Any = None) -> KVCache:
        """The cache as a pytree of PartitionSpecs, for ``jax.shard_map`` and ``jax.device_put``.

        Args:
          batch: mesh axis (or axes) over which rows are split; the number of pools must be divisible by it, too.
          heads: mesh axis (or axes) over which KV heads are split.
        """
        pools, exact = PartitionSpec(batch, None, None, heads), PartitionSpec(batch, None, heads)

        def spec(path: Any, _: Any) -> PartitionSpec:
            name = path[0].name
            if name in ("key", "value"):
                return pools
            return exact if name in ("exact_key", "exact_value") else PartitionSpec(batch)

        specs: KVCache = jax.tree_util.tree_map_with_path(spec, self)
        return specs

    # --- Checks that the operations share --------------------------------------------------------------------------

    def _layer_operand(self, layer: int | Array) -> Array:
        """``layer`` as the int32 ``[1]`` operand of a kernel; a Python int out of range raises ValueError."""
        return rows.index("layer", layer, self.num_layers).reshape(1)

    def _check_arrays(self) -> None:
        """Refuses a cache whose arrays were swapped for others, for example a stacked one outside its vmap."""
        shape: tuple[int, ...] = getattr(self.key.codes, "shape", ())
        if len(shape) != 6 or getattr(self.page_table, "ndim", 0) != 2:
            raise ValueError(
                f"cache must hold codes of rank 6, got shape {list(shape)}: a stack of caches is mapped with jax.vmap, "
                "and layers live inside one cache (num_layers)"
            )
        if self.length.shape[0] % shape[0]:
            raise ValueError(f"cache has {shape[0]} pools, which do not divide its {self.length.shape[0]} rows")


def _table_width(format: KVFormat, max_length: int) -> int:
    """Pages that ``max_length`` tokens take."""
    if not isinstance(format, KVFormat):
        raise TypeError(f"format must be a KVFormat (KVFormat.parse reads a string), got {format!r}")
    width = -(-_integer("max_length", max_length, 1) // format.page_size)
    if width * format.page_size >= 2**31:
        raise ValueError(f"max_length must be below 2**31 tokens, got {max_length}")
    return width


for _cls, _meta in ((Pages, ()), (KVCache, ("format", "head_dim", "value_head_dim"))):
    _data = [f.name for f in dataclasses.fields(_cls) if f.name not in _meta]
    jax.tree_util.register_dataclass(_cls, data_fields=_data, meta_fields=list(_meta))
export.register_pytree_node_serialization(
    Pages,
    serialized_name="jax_foscar.Pages",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: (),
)
export.register_pytree_node_serialization(
    KVCache,
    serialized_name="jax_foscar.KVCache",
    serialize_auxdata=lambda aux: json.dumps([str(aux[0]), *aux[1:]]).encode(),
    deserialize_auxdata=lambda data: (lambda fmt, *dims: (KVFormat.parse(fmt), *dims))(*json.loads(data)),
)
