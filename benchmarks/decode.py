"""One decode step of attention: our kernels against what a JAX user has otherwise, in one run on one device.

    python benchmarks/decode.py                                     # 4 rows, 8192 tokens, 32/8 heads, head dim 128
    python benchmarks/decode.py --batch 1 --length 32768 --formats k4t,v4t k2c64,v2t64 --csv out.csv

Each contender attends over the same tokens: ours over the quantized cache, our jnp path over the same cache, and
``jax.nn.dot_product_attention`` over those tokens in bfloat16 and float32. Outputs are checked before anything is
timed: ours must equal attention over the dequantized cache. Times are medians of whole jitted calls, contenders
interleaved.
"""

from __future__ import annotations

import argparse
import csv
import functools
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_foscar import KVCache, KVFormat, decode_attention


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="rows")
    parser.add_argument("--length", type=int, default=8192, help="tokens cached a row")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of the queries")
    parser.add_argument(
        "--formats", nargs="+", type=KVFormat.parse, default=[KVFormat.parse("k4t,v4t")], metavar="FORMAT"
    )
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of each contender")
    parser.add_argument("--csv", type=Path, help="also write the table there")
    return parser.parse_args()


def filled_cache(args: argparse.Namespace, fmt: KVFormat, k: jax.Array, v: jax.Array) -> KVCache:
    cache = KVCache.create(
        fmt, batch=args.batch, max_length=args.length, num_layers=1, num_kv_heads=args.kv_heads, head_dim=args.head_dim
    )
    append = jax.jit(KVCache.append, donate_argnums=0)
    for start in range(0, args.length, 1024):
        cache = append(cache, k[:, start : start + 1024], v[:, start : start + 1024])
    cache.check()
    return cache


def jax_nn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """``jax.nn.dot_product_attention`` of one query a row over all tokens; q [B, N, D], k and v [B, S, K, D]."""
    return jax.nn.dot_product_attention(q[:, None].astype(k.dtype), k, v)[:, 0]


def check(ours: jax.Array, cache: KVCache, q: jax.Array) -> float:
    """Relative L2 distance to float32 attention over the dequantized cache; raises where it is more than rounding."""
    k, v = cache.dequantize()
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(jax_nn(q.astype(jnp.float32), k, v), np.float64)
    error = float(np.linalg.norm(np.asarray(ours, np.float64) - expected) / np.linalg.norm(expected))
    limit = {"float32": 1e-3, "bfloat16": 5e-3, "float16": 2e-3}[q.dtype.name]
    if not error < limit:
        sys.exit(f"{cache.format}: relative L2 error {error:.1e} against the dequantized cache, limit {limit:.0e}")
    return error


def medians(contenders: dict[str, Callable[[], jax.Array]], repeats: int) -> dict[str, float]:
    """Median seconds of each, timed in turn so that a drift of the machine's speed meets all alike."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(2):
        for call in contenders.values():
            jax.block_until_ready(call())
    for _ in range(repeats):
        for name, call in contenders.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    args = parse_arguments()
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {device.platform} {device.device_kind}, {platform.machine()}")
    print(" ".join(["python benchmarks/decode.py", *sys.argv[1:]]))
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (args.batch, args.length, args.kv_heads, args.head_dim)
    k, v = jax.random.normal(keys[0], shape), jax.random.normal(keys[1], shape)
    q = jax.random.normal(keys[2], (args.batch, args.heads, args.head_dim), args.dtype)

    contenders: dict[str, Callable[[], jax.Array]] = {}
    nbytes: dict[str, int] = {}
    errors: dict[str, float] = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        name = f"jax.nn {jnp.dtype(dtype).name}"
        contenders[name] = functools.partial(jax.jit(jax_nn), q, k.astype(dtype), v.astype(dtype))
        nbytes[name] = 2 * k.size * jnp.dtype(dtype).itemsize
    for fmt in args.formats:
        cache = filled_cache(args, fmt, k, v)
        for label, implementation in (("kernel", None), ("jnp", "xla")):
            name = f"{fmt} {label}"
            call = jax.jit(functools.partial(decode_attention, implementation=implementation))
            contenders[name] = functools.partial(call, q, cache)
            nbytes[name] = cache.nbytes
            errors[name] = check(call(q, cache), cache, q)

    times = medians(contenders, args.repeats)
    rows = [
        {
            "contender": name,
            "us": round(seconds * 1e6, 1),
            "GB/s": round(nbytes[name] / seconds / 1e9, 2),
            "cache MB": round(nbytes[name] / 1e6, 1),
            **{f"x over {other}": round(times[other] / seconds, 2) for other in ("jax.nn float32", "jax.nn bfloat16")},
            "rel L2": f"{errors[name]:.1e}" if name in errors else "",
        }
        for name, seconds in times.items()
    ]
    widths = {column: max(len(column), *(len(str(row[column])) for row in rows)) for column in rows[0]}
    for row in [dict(zip(rows[0], rows[0], strict=True)), *rows]:
        print("  ".join(f"{row[column]!s:>{width}}" for column, width in widths.items()))
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
