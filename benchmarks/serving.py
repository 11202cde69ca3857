"""What serving asks of a cache beside plain decoding, each against its plain form, on a GPU in one run.

    python benchmarks/serving.py

What a run of joining and leaving requests takes beside the cache; random page tables, exact windows, local windows,
writing one token and writing a long prompt. Times are differences between programs of different length
(jax_contenders.py), medians of several runs in turns; a write's bytes are the keys and values that it reads and what it
stores, and the copy rate is that of XLA reading and writing an array in the same run.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_contenders
from jax_foscar import KVCache, KVFormat, PageAllocator, decode_attention
from shapes import Shape

REPEATS = 9
CALLS = 32  # in a program: with few, the jitter of its start shows
HEADS = {"num_kv_heads": 8, "head_dim": 128}


def attention(cache: KVCache, q: jax.Array, layers: int, **options: object) -> Callable[[], float]:
    """Measures microseconds of one call."""
    return jax_contenders.stopwatch(
        lambda q, cache, i: decode_attention(q, cache, layer=i % layers, **options), q, cache, CALLS
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
    shuffled_us, ordered_us = jax_contenders.in_turns([attention(cache, q, 2), attention(ordered, q, 2)], REPEATS)
    print(f"{text} 128 x 32768: page table in order {ordered_us:.0f} us, shuffled {shuffled_us:.0f} us "
          f"({shuffled_us / ordered_us - 1:+.1%})")  # fmt: skip


def exact_windows(text: str) -> None:
    plain, q = random(128, 32768, text)
    fmt = dataclasses.replace(KVFormat.parse(text), sink_tokens=64, recent_tokens=256)
    cache, _ = random(128, 32768, str(fmt))
    plain_us, us = jax_contenders.in_turns([attention(plain, q, 2), attention(cache, q, 2)], REPEATS)
    print(
        f"{text} 128 x 32768: {plain_us:.0f} us, with 64 sink and 256 recent tokens {us:.0f} us "
        f"({us / plain_us - 1:+.1%})"
    )


def local_windows(text: str) -> None:
    for batch in 128, 32:
        cache, q = random(batch, 65536, text)
        windows = {}, {"local_window_size": (4095, 0)}
        full, local = jax_contenders.in_turns([attention(cache, q, 2, **window) for window in windows], REPEATS)
        print(f"{text} {batch} x 65536: {full:.0f} us, local window of 4096 {local:.0f} us ({full / local:.1f}x)")
        del cache


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

    @functools.partial(jax.jit, donate_argnums=0)
    def program(cache: KVCache, k: jax.Array, v: jax.Array, rounds: int) -> KVCache:
        def write_all(_: int, cache: KVCache) -> KVCache:
            for i in range(layers):
                cache = cache.write(k, v, layer=i)
            return cache

        return jax.lax.fori_loop(0, rounds, write_all, cache)

    cache = KVCache.create(fmt, batch=batch, max_length=max(tokens, 64), num_layers=layers, **HEADS).advance(tokens)
    held = [cache]

    def run(rounds: int) -> None:
        held[0] = program(held[0], k, v, rounds)
        jax.block_until_ready(held[0])

    few, many = 2, 42
    seconds = jax_contenders.seconds(lambda: run(many), REPEATS) - jax_contenders.seconds(lambda: run(few), REPEATS)
    stored = batch * tokens * 8 * 256 * cache.effective_bits / 8
    for exact in cache.exact_key, cache.exact_value:  # every slot is written once where the tokens suffice
        stored += 0 if exact is None else min(exact.nbytes // layers, k.nbytes)
    held[0].check()
    return seconds / (many - few) / layers * 1e6, int(k.nbytes + v.nbytes + stored)


def writes(texts: list[str], rate: float) -> None:
    for text in texts:
        us, _ = write_us(text, 128, 1, 32)
        print(f"{text} write of one token, 128 rows: {us:.1f} us")
    for text in texts:
        us, moved = write_us(text, 16, 2048, 16)
        speed = moved / us / 1e3
        print(f"{text} write of 2048 tokens, 16 rows: {us:.0f} us, {speed:.0f} GB/s ({speed / rate:.0%} of copy)")


def serving_run(text: str, steps: int = 200, slots: int = 32, layers: int = 32) -> None:
    """Requests join and leave the slots of one jitted step over all layers, and what that takes beside the cache.

    There is no model: a layer's queries, keys and values are made of one random token each.
    """
    fmt = dataclasses.replace(KVFormat.parse(text), sink_tokens=4, recent_tokens=64)
    max_length = 16384
    num_pages = slots * max_length // fmt.page_size // 2
    cache = KVCache.create_paged(
        fmt, batch=slots, num_pages=num_pages, max_length=max_length, num_layers=layers, **HEADS
    )  # fmt: skip
    allocator = PageAllocator(num_pages)
    rng = np.random.default_rng(0)
    compilations = 0

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(cache: KVCache, key: jax.Array, counts: jax.Array) -> tuple[KVCache, jax.Array]:
        nonlocal compilations
        compilations += 1
        cache = cache.advance(counts)

        def layer(carry: tuple[KVCache, jax.Array], i: jax.Array) -> tuple[tuple[KVCache, jax.Array], None]:
            cache, total = carry
            q, k, v = (
                jax.random.normal(jax.random.fold_in(key, 3 * i + j), (slots, 1, heads, 128), "bfloat16")
                for j, heads in enumerate((32, 8, 8))
            )
            cache = cache.write(k, v, layer=i)
            return (cache, total + decode_attention(q, cache, layer=i).astype("float32").sum()), None

        return jax.lax.scan(layer, (cache, jnp.float32(0)), jnp.arange(layers))[0]

    @functools.partial(jax.jit, donate_argnames="cache")
    def reset(cache: KVCache, row: int, ids: jax.Array) -> KVCache:
        return cache.reset_row(row, ids)

    jax.block_until_ready(cache)

    def memory(name: str) -> int:
        return jax.devices()[0].memory_stats()[f"{name}bytes_in_use"]

    before = memory("")
    pages: list[list[int]] = [[] for _ in range(slots)]
    for number in range(steps):
        for slot in range(slots):  # every step some requests end and others come in their place
            if not pages[slot] or rng.random() < 0.05:
                allocator.free(pages[slot])
                pages[slot] = allocator.allocate(int(rng.integers(4, max_length // fmt.page_size // 4)))
                table_row = np.full(cache.page_table.shape[1], -1, np.int32)
                table_row[: len(pages[slot])] = pages[slot]
                cache = reset(cache, slot, table_row)
        cache, total = step(cache, jax.random.key(number), np.ones(slots, np.int32))
        if number == 0:
            # XLA needed most while it compiled: as much ballast as that, and the peak shows what serving adds.
            total.block_until_ready()
            compiled = memory("peak_")
            ballast = jnp.zeros(compiled - memory(""), jnp.uint8)
            ballasted = memory("peak_")
    total.block_until_ready()
    cache.check()
    assert np.isfinite(total)
    assert compilations == 1
    sizes = {"cache": cache.nbytes, "steps": memory("peak_") - ballasted, "compiling": compiled - before}
    print(
        f"serving {fmt}: {steps} steps of {slots} slots, {layers} layers, compiled once; "
        + ", ".join(f"{what} {nbytes / 2**20:.1f} MiB" for what, nbytes in sizes.items())
    )
    del ballast


def main() -> None:
    if jax.default_backend() != "gpu":
        raise SystemExit("serving.py: needs a GPU")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, python benchmarks/serving.py", *sys.argv[1:])
    serving_run("k4t,v4t")  # first: the peak is the process's
    rate = copy_rate()
    print(f"copy: {rate:.0f} GB/s")
    for text in ("k4t,v4t", "k2t,v2t"):
        page_tables(text)
        exact_windows(text)
        local_windows(text)
    writes(["k4t,v4t", "k2t,v2t", "k4c64,v4t64", "k2c64,v2t64"], rate)


if __name__ == "__main__":
    main()
