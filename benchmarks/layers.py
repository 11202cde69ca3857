"""What decode attention costs inside a JAX program: a jitted scan over a model's layers against the bare kernels.

    python benchmarks/layers.py
    python benchmarks/layers.py --format k2t,v2t --batch 16 --length 4096

The scan makes one ``decode_attention`` a layer, the layer being a traced index into one cache; the bare kernels are the
same calls written out one after another. A turn of a scan has small kernels of XLA's own (its counter, the layer's
index, a copy of what it carries), which ``jax.lax.scan(..., unroll=)`` spreads over as many layers. Prints microseconds
a layer of each, measured in turns (differences between programs of one and of three passes, so that what it costs to
start a program is left out), the program's temporary memory, and how many of 100 runs gave other bits than the first.
GPU only.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import jax
import numpy as np

import jax_contenders
from jax_foscar import KVCache, KVFormat, decode_attention
from shapes import Shape

LAYERS = 32
UNROLLS = 1, 2, 4


@functools.partial(jax.jit, static_argnames=("passes", "unroll"))
def scan_layers(q: jax.Array, cache: KVCache, passes: int, unroll: int) -> jax.Array:
    def layer(q: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        return decode_attention(q, cache, layer=index), None

    return jax.lax.scan(layer, q, np.tile(np.arange(LAYERS, dtype=np.int32), passes), unroll=unroll)[0]


def scan_stopwatch(q: jax.Array, cache: KVCache, unroll: int) -> Callable[[], float]:
    """Each call measures the microseconds of one layer."""

    def seconds_of(passes: int) -> float:
        return jax_contenders.once(lambda: scan_layers(q, cache, passes, unroll))

    return lambda: (seconds_of(3) - seconds_of(1)) / (2 * LAYERS) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", type=KVFormat.parse, default=KVFormat.parse("k4t,v4t"))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("layers.py: needs a GPU")
    shape = Shape(args.batch, args.length, 32, 8, 128)
    cache = jax_contenders.random_cache(shape, args.format, LAYERS)
    q = jax.random.normal(jax.random.key(7), (shape.batch, shape.heads, shape.head_dim), "bfloat16")

    stopwatches = [
        jax_contenders.stopwatch(
            lambda q, cache, i: decode_attention(q, cache, layer=i % LAYERS), q, cache, calls=LAYERS
        ),
        *(scan_stopwatch(q, cache, unroll) for unroll in UNROLLS),
    ]
    bare, *scanned = jax_contenders.in_turns(stopwatches, args.repeats)
    print(f"{args.format}, batch {args.batch}, {args.length} tokens, {LAYERS} layers")
    print(f"bare kernels   {bare:7.1f} us a layer")
    for unroll, us in zip(UNROLLS, scanned, strict=True):
        print(f"scan, unroll={unroll} {us:7.1f} us a layer, {us - bare:+.1f}")
    memory = scan_layers.lower(q, cache, 1, 1).compile().memory_analysis()
    print(f"temporary memory {memory.temp_size_in_bytes / 2**20:.1f} MiB, of a cache of {cache.nbytes / 2**20:.0f} MiB")
    first = np.asarray(scan_layers(q, cache, 1, 1)).tobytes()
    others = sum(np.asarray(scan_layers(q, cache, 1, 1)).tobytes() != first for _ in range(99))
    print(f"runs of 100 whose bits differ from the first: {others}")


if __name__ == "__main__":
    main()
