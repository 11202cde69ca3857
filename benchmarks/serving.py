"""What serving asks of a cache beside plain decoding, each against its plain form, on a GPU in one run.

    python benchmarks/serving.py

Random page tables, exact windows, local windows, writing one token and writing a long prompt. Times are differences
between programs of different length (jax_contenders.py), medians of several runs; a write's bytes are the keys and
values that it reads and what it stores, and the copy rate is that of XLA reading and writing an array in the same run.
"""

from __future__ import annotations

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jax_contenders
from jax_foscar import KVCache, KVFormat, decode_attention
from shapes import Shape

REPEATS = 15
HEADS = {"num_kv_heads": 8, "head_dim": 128}


def attention(cache: KVCache, q: jax.Array, layers: int, **options: object) -> float:
    """Microseconds of one call."""
    return jax_contenders.microseconds(
        lambda q, cache, i: decode_attention(q, cache, layer=i % layers, **options), q, cache, max(layers, 8), REPEATS
    )


def random(batch: int, length: int, text: str, layers: int = 2) -> tuple[KVCache, jax.Array]:
    shape = Shape(batch, length, 32, 8, 128)
    cache = jax_contenders.random_cache(shape, KVFormat.parse(text), layers)
    return cache, jax.random.normal(jax.random.key(7), (batch, 32, 128), "bfloat16")


def page_tables(text: str) -> None:
    cache, q = random(128, 32768, text)
    ordered = dataclasses.replace(
        cache, page_table=jnp.tile(jnp.arange(cache.page_table.shape[1], dtype=jnp.int32), (cache.batch, 1))
    )
    shuffled_us, ordered_us = attention(cache, q, 2), attention(ordered, q, 2)
    print(f"{text} 128 x 32768: page table in order {ordered_us:.0f} us, shuffled {shuffled_us:.0f} us "
          f"({shuffled_us / ordered_us - 1:+.1%})")  # fmt: skip


def exact_windows(text: str) -> None:
    plain, q = random(128, 32768, text)
    plain_us = attention(plain, q, 2)
    del plain
    fmt = dataclasses.replace(KVFormat.parse(text), sink_tokens=64, recent_tokens=256)
    cache, q = random(128, 32768, str(fmt))
    us = attention(cache, q, 2)
    print(
        f"{text} 128 x 32768: {plain_us:.0f} us, with 64 sink and 256 recent tokens {us:.0f} us "
        f"({us / plain_us - 1:+.1%})"
    )


def local_windows(text: str) -> None:
    cache, q = random(32, 65536, text)
    full, local = attention(cache, q, 2), attention(cache, q, 2, local_window_size=(4095, 0))
    print(f"{text} 32 x 65536: {full:.0f} us, local window of 4096 {local:.0f} us ({full / local:.1f}x)")


def copy_rate() -> float:
    """GB/s of a pass that reads and writes an array, both counted."""
    x = jnp.zeros((1 << 30,), jnp.uint32)
    us = jax_contenders.microseconds(
        lambda x, _, i: jax.lax.optimization_barrier(x + jnp.uint32(1)), x, None, calls=2, repeats=REPEATS
    )
    return 2 * x.nbytes / us / 1e3


def write_us(text: str, batch: int, tokens: int, layers: int) -> tuple[float, int]:
    """Microseconds of one write in one layer, and the bytes it moves."""
    fmt = KVFormat.parse(text)
    keys = jax.random.split(jax.random.key(1), 2)
    k, v = (jax.random.normal(key, (batch, tokens, 8, 128), "bfloat16") for key in keys)

    @functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
    def program(cache: KVCache, k: jax.Array, v: jax.Array, writes: int) -> KVCache:
        for i in range(writes):
            cache = cache.write(k, v, layer=i % layers)
        return cache

    cache = KVCache.create(fmt, batch=batch, max_length=max(tokens, 64), num_layers=layers, **HEADS).advance(tokens)
    held = [cache]

    def run(writes: int) -> None:
        held[0] = program(held[0], k, v, writes)
        jax.block_until_ready(held[0])

    few, many = layers, 3 * layers
    seconds = jax_contenders.seconds(lambda: run(many), REPEATS) - jax_contenders.seconds(lambda: run(few), REPEATS)
    stored = batch * tokens * 8 * 256 * cache.effective_bits / 8
    held[0].check()
    return seconds / (many - few) * 1e6, int(k.nbytes + v.nbytes + stored)


def writes(texts: list[str], rate: float) -> None:
    for text in texts:
        us, _ = write_us(text, 128, 1, 32)
        print(f"{text} write of one token, 128 rows: {us:.1f} us")
    for text in texts:
        us, moved = write_us(text, 16, 2048, 4)
        speed = moved / us / 1e3
        print(f"{text} write of 2048 tokens, 16 rows: {us:.0f} us, {speed:.0f} GB/s ({speed / rate:.0%} of copy)")


def main() -> None:
    if jax.default_backend() != "gpu":
        raise SystemExit("serving.py: needs a GPU")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, python benchmarks/serving.py", *sys.argv[1:])
    rate = copy_rate()
    print(f"copy: {rate:.0f} GB/s")
    for text in ("k4t,v4t", "k2t,v2t"):
        page_tables(text)
        exact_windows(text)
        local_windows(text)
    writes(["k4t,v4t", "k2t,v2t", "k4c64,v4t64", "k2c64,v2t64"], rate)
    stats = jax.devices()[0].memory_stats() or {}
    print(f"peak memory of this run {stats.get('peak_bytes_in_use', np.nan) / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
