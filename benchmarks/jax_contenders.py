"""Contenders that live in JAX: our kernels, our jnp path, and what a JAX user has otherwise."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_foscar import KVCache, KVFormat, Pages, decode_attention
from shapes import Shape

COLD_BYTES = 1 << 30
ERROR_LIMIT = {"float32": 1e-3, "bfloat16": 5e-3, "float16": 2e-3}  # relative L2; the low ones are the dtype's rounding


def cache_shapes(shape: Shape, fmt: KVFormat, layers: int) -> KVCache:
    """The cache of a shape, without its arrays."""
    size = {"batch": shape.batch, "max_length": shape.length, "num_layers": layers}
    heads = {"num_kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    return jax.eval_shape(functools.partial(KVCache.create, fmt, **size, **heads))


def random_cache(shape: Shape, fmt: KVFormat, layers: int) -> KVCache:
    """A cache of random codes, with parameters that make keys and values about normal; pages in random order."""
    empty = cache_shapes(shape, fmt, layers)

    @functools.partial(jax.jit, static_argnames=("name",))
    def pages(key: jax.Array, name: str) -> Pages:
        like, quant = getattr(empty, name), getattr(fmt, name)
        if not quant.quantized:
            values = jax.random.normal(key, (*like.codes.shape[:-1], like.codes.shape[-1] // 2), jnp.bfloat16)
            return Pages(jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(like.codes.shape), None)
        bits, spread = jax.random.split(key)
        scale = 4 / quant.levels * jax.random.uniform(spread, like.params.shape[:-1], minval=0.8, maxval=1.2)
        offset = -scale * quant.levels / 2
        params = jnp.stack([scale, offset], -1).astype(like.params.dtype)
        return Pages(jax.random.bits(bits, like.codes.shape, jnp.uint8), params)

    key, value = (pages(jax.random.key(i), name) for i, name in enumerate(("key", "value")))
    exact = [
        None if x is None else jax.random.normal(jax.random.key(2 + i), x.shape, x.dtype)
        for i, x in enumerate((empty.exact_key, empty.exact_value))
    ]
    rows, width = empty.page_table.shape
    table = np.random.default_rng(0).permuted(np.tile(np.arange(width, dtype=np.int32), (rows, 1)), axis=1)
    lengths = jnp.asarray(shape.row_lengths())
    return KVCache(
        fmt, shape.head_dim, shape.head_dim, key, value, jnp.asarray(table), lengths, jnp.ones_like(lengths),
        jnp.zeros(rows, bool), *exact,
    )  # fmt: skip


def bytes_read(cache: KVCache) -> int:
    """Bytes that one call must read: codes and parameters of the cached tokens."""
    per_token = cache.effective_bits * (cache.head_dim + cache.value_head_dim) * cache.num_kv_heads / 8
    return int(np.sum(np.asarray(cache.length), dtype=np.int64) * per_token)


def row_of(cache: KVCache, row: int) -> KVCache:
    """One row as a cache of its own."""
    return jax.tree.map(lambda x: x[row : row + 1], cache)


def check(cache: KVCache, q: jax.Array, out: jax.Array) -> float:
    """Largest relative L2 distance of the first, middle and last row to the jnp reference; exits where too large."""
    worst = 0.0
    for row in {0, cache.batch // 2, cache.batch - 1}:
        one = q[row : row + 1].astype(jnp.float32)
        expected = np.asarray(decode_attention(one, row_of(cache, row), implementation="xla"), np.float64)
        error = np.linalg.norm(np.asarray(out[row], np.float64) - expected[0]) / np.linalg.norm(expected)
        worst = max(worst, float(error))
    if not worst < ERROR_LIMIT[q.dtype.name]:
        raise SystemExit(f"{cache.format}: relative L2 error {worst:.1e} is over {ERROR_LIMIT[q.dtype.name]:.0e}")
    return worst


def once(call: Callable[[], object]) -> float:
    """Wall time in seconds of a call that is waited for."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def in_turns(measures: list[Callable[[], float]], repeats: int) -> list[float]:
    """The median of each; in turns, since a GPU that has worked for a while is slower than one that has not."""
    times = [[measure() for measure in measures] for _ in range(repeats + 2)]
    return [statistics.median(of_one) for of_one in zip(*times[2:], strict=True)]


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The median of ``once``."""
    return in_turns([functools.partial(once, call)], repeats)[0]


def stopwatch(step: Callable[..., jax.Array], q: jax.Array, operands: object, calls: int) -> Callable[[], float]:
    """Each call measures the microseconds of one ``step(q, operands, i)``, whose output is the next step's query.

    On a GPU from the difference between programs of ``calls`` and of three times as many: a program costs a few hundred
    microseconds to start and to wait for, which a model pays once a step and a CUDA graph of a peer hardly at all.
    """

    @functools.partial(jax.jit, static_argnames="count")
    def program(q: jax.Array, operands: object, count: int) -> jax.Array:
        for i in range(count):
            q = step(q, operands, i).astype(q.dtype)  # Pallas gives float32
        return q

    def seconds_of(count: int) -> float:
        return once(lambda: program(q, operands, count))

    if jax.default_backend() != "gpu":
        return lambda: seconds_of(1) * 1e6
    return lambda: (seconds_of(3 * calls) - seconds_of(calls)) / (2 * calls) * 1e6


def microseconds(step: Callable[..., jax.Array], q: jax.Array, operands: object, calls: int, repeats: int) -> float:
    """The median of a ``stopwatch``."""
    return in_turns([stopwatch(step, q, operands, calls)], repeats)[0]


def calls_for(nbytes: int) -> int:
    """Calls in a program, each of which reads ``nbytes``: short ones need many, or the start's jitter shows."""
    return min(max((8 << 30) // nbytes, 8), 64)


def ours(shape: Shape, fmt: KVFormat, dtype: str, implementation: str | None, repeats: int) -> tuple[float, int, float]:
    """Microseconds a call, bytes a call reads, relative L2 error.

    On a GPU the calls go through several layers, as a model's do, so that none is warm in L2.
    """
    one_layer = cache_shapes(shape, fmt, layers=1).nbytes
    layers = min(max(-(-COLD_BYTES // one_layer), 2), 32) if jax.default_backend() == "gpu" else 1
    cache = random_cache(shape, fmt, layers)
    q = jax.random.normal(jax.random.key(7), (shape.batch, shape.heads, shape.head_dim), dtype)
    attend = functools.partial(decode_attention, implementation=implementation)

    def step(q: jax.Array, cache: KVCache, i: int) -> jax.Array:
        return attend(q, cache, layer=i % layers)

    error = check(cache, q, jax.jit(attend)(q, cache))
    nbytes = bytes_read(cache)
    return microseconds(step, q, cache, calls_for(nbytes), repeats), nbytes, error


def unquantized(shape: Shape, dtype: str) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """A query a row, and keys, values and lengths as ``jax.nn`` has them."""
    keys = jax.random.split(jax.random.key(0), 3)
    size = (shape.batch, shape.length, shape.kv_heads, shape.head_dim)
    k, v = (jax.random.normal(key, size, dtype) for key in keys[:2])
    q = jax.random.normal(keys[2], (shape.batch, 1, shape.heads, shape.head_dim), dtype)
    return q, (k, v, jnp.asarray(shape.row_lengths()))


def jax_nn(shape: Shape, dtype: str, implementation: str, repeats: int) -> float:
    """Microseconds of ``jax.nn.dot_product_attention`` over a cache of ``dtype``."""
    q, operands = unquantized(shape, dtype)

    def step(q: jax.Array, operands: tuple[jax.Array, ...], _: int) -> jax.Array:
        k, v, lengths = operands
        return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation=implementation)

    return microseconds(step, q, operands, calls_for(operands[0].nbytes + operands[1].nbytes), repeats)


def pallas(shape: Shape, repeats: int) -> float:
    """Microseconds of JAX's Pallas decode attention over a bfloat16 cache."""
    from jax.experimental.pallas.ops.gpu import decode_attention as pallas_decode

    q, operands = unquantized(shape, "bfloat16")

    def step(q: jax.Array, operands: tuple[jax.Array, ...], _: int) -> jax.Array:
        k, v, lengths = operands
        return pallas_decode.gqa(q, k, v, kv_seq_len=lengths)

    return microseconds(step, q[:, 0], operands, calls_for(operands[0].nbytes + operands[1].nbytes), repeats)
