"""What decode attention costs inside a JAX program: a jitted scan over a model's layers against the bare kernels.

    python benchmarks/layers.py
    python benchmarks/layers.py --format k2t,v2t --batch 16 --length 4096

The scan makes one ``decode_attention`` a layer, the layer being a traced index into one cache; the bare kernels are the
same calls written out one after another. Prints microseconds a layer of both (differences between programs of one and
of three passes, so that what it costs to start a program is left out), the program's temporary memory, and how many of
100 runs gave other bits than the first. GPU only.
"""

from __future__ import annotations

import argparse

import jax
import numpy as np

import jax_contenders
from jax_foscar import KVCache, KVFormat, decode_attention
from shapes import Shape

LAYERS = 32


def scan_layers(q: jax.Array, cache: KVCache, passes: int) -> jax.Array:
    def layer(q: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        return decode_attention(q, cache, layer=index), None

    return jax.lax.scan(layer, q, np.tile(np.arange(LAYERS, dtype=np.int32), passes))[0]


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

    programs = {passes: jax.jit(scan_layers, static_argnums=2).lower(q, cache, passes).compile() for passes in (1, 3)}
    times = {
        passes: jax_contenders.seconds(lambda program=program: program(q, cache), args.repeats)
        for passes, program in programs.items()
    }
    scanned = (times[3] - times[1]) / (2 * LAYERS) * 1e6
    bare = jax_contenders.microseconds(
        lambda q, cache, i: decode_attention(q, cache, layer=i % LAYERS), q, cache, LAYERS, args.repeats
    )
    print(f"{args.format}, batch {args.batch}, {args.length} tokens, {LAYERS} layers")
    print(f"bare kernels  {bare:7.1f} us a layer")
    print(f"scan          {scanned:7.1f} us a layer, {scanned - bare:+.1f}")
    memory = programs[1].memory_analysis()
    print(f"temporary memory {memory.temp_size_in_bytes / 2**20:.1f} MiB, of a cache of {cache.nbytes / 2**20:.0f} MiB")
    first = np.asarray(programs[1](q, cache)).tobytes()
    others = sum(np.asarray(programs[1](q, cache)).tobytes() != first for _ in range(99))
    print(f"runs of 100 whose bits differ from the first: {others}")


if __name__ == "__main__":
    main()
