"""How exact attention with E4M3 and E2M1 operands is, by the number of parts that queries and weights are split into.

    python benchmarks/blackwell_numerics.py              # emulated in numpy
    python benchmarks/blackwell_numerics.py --measure    # and measured, where there are nvcc and a GPU
    python benchmarks/blackwell_numerics.py --inputs sink --formats k2c64,v2t64 --tensor-core

The numbers of the Blackwell kernel (cuda/blackwell/operands.h) without a Blackwell GPU, over the library's own packed
pages: tiles of 128 tokens, weights scaled by each tile's maximum, accumulators that leave for f32 after every tile.
"emulated" sums products exactly, with --tensor-core as tensor cores do, which cut terms off below the largest one;
"running" is the same with weights scaled by the maximum of all tiles; "measured" is benchmarks/blackwell_numerics.cu,
which hands the same operand values to this GPU's f16 tensor cores, where they are exact. Prints the relative L2 error
against float64 over the dequantized cache; a column "q2 p3" has queries in two parts and weights in three.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import math
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_foscar import KVCache, KVFormat, Quant, layout

ROOT = Path(__file__).resolve().parent.parent
TILE = 128  # tokens
INPUTS = ("randn", "outlier", "sink", "flat", "real")
FORMATS = tuple(f"k{b}{k}64,v{b}{v}64" for b in (4, 2) for k in "tc" for v in "tc")
# (parts of queries, parts of weights); the kernel takes the last.
PARTS = ((1, 1), (1, 3), (3, 1), (2, 2), (3, 2), (2, 3), (3, 3))


# --- Inputs -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Input:
    """q ``[K, R, D]``, the query rows of each KV head, which all see every token; k, v ``[K, T, D]``."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def named_input(name: str, tokens: int | None = None) -> Input:
    """The inputs that accuracy is claimed on; ``tokens`` other than their own size for a quick look."""
    if name == "real":
        data = np.load(ROOT / "tests" / "data" / "smollm2_kv.npz")
        k, v = (data[x].astype(np.float32).swapaxes(0, 1) for x in ("k", "v"))  # [3, 256, 64]
        return Input(data["q"].astype(np.float32).reshape(8, 3, 3, 64).swapaxes(0, 1).reshape(3, 24, 64), k, v)
    rng = np.random.default_rng(7)
    heads, tokens = 1 if name == "flat" else 2, tokens or (131072 if name == "flat" else 32768)
    k, v = (rng.standard_normal((heads, tokens, 128), np.float32) for _ in range(2))
    q = rng.standard_normal((heads, 4, 128), np.float32)
    if name == "outlier":
        q[:, 1] *= 8
        k[..., 17] *= 60
    elif name == "sink":
        q = q[:, :1] + 0.2 * q  # the heads that share a KV head look alike
        direction = q[:, 0] / np.square(q[:, 0]).sum(-1, keepdims=True)
        k[:, 0] = 12 * math.sqrt(128) * direction
        v *= 0.02
    elif name == "flat":
        q *= 0.02
        v -= v.mean(axis=1, keepdims=True)
    else:
        assert name == "randn", name
    return Input(q, k, v)


@dataclasses.dataclass(frozen=True)
class Operand:
    """Keys or values of all KV heads, as the cache holds them."""

    quant: Quant
    codes: np.ndarray  # [K, T, D]
    pages: np.ndarray  # the same, packed: u8 [P, K, 64, bytes]
    pairs: np.ndarray  # scale and offset, f16 [P, K, ..., 2] as stored
    dense: np.ndarray  # scale * code + offset, f64 [K, T, D]

    @property
    def group(self) -> int:
        return self.quant.group or self.codes.shape[-1]

    def params(self, head: int) -> np.ndarray:
        """Scales and offsets, f32 ``[2, T, D / group]`` per token, ``[2, T / group, D]`` per channel."""
        pairs = self.pairs[:, head]
        return np.moveaxis(pairs.reshape(-1, *pairs.shape[2:]), -1, 0).astype(np.float32)


def quantize(given: Input, text: str) -> tuple[Operand, Operand]:
    """Keys and values of a cache that holds the tokens."""
    fmt = KVFormat.parse(text)
    heads, tokens, dim = given.k.shape
    with jax.default_device(jax.devices("cpu")[0]):
        cache = KVCache.create(fmt, batch=1, max_length=tokens, num_layers=1, num_kv_heads=heads, head_dim=dim)
        cache = cache.append(*(jnp.asarray(x.swapaxes(0, 1)[None]) for x in (given.k, given.v)))

        def operand(name: layout.Operand, quant: Quant) -> Operand:
            pages = getattr(cache, name)
            data, pairs = np.asarray(pages.codes[0, 0]), np.asarray(pages.params[0, 0])
            codes = np.asarray(layout.unpack(pages.codes[0, 0], name, quant.bits, dim))
            codes = codes.swapaxes(0, 1).reshape(heads, tokens, dim)
            found = Operand(quant, codes, data, pairs, codes)
            axis = 0 if quant.per == "channel" else 1
            params = [np.repeat(found.params(h), found.group, axis + 1).astype(np.float64) for h in range(heads)]
            return dataclasses.replace(
                found, dense=np.stack([p[0] * c + p[1] for p, c in zip(params, codes, strict=True)])
            )

        return operand("key", fmt.key), operand("value", fmt.value)


def reference(q: np.ndarray, keys: Operand, values: Operand) -> np.ndarray:
    """Attention in float64 over what the codes stand for, ``[K, R, D]``."""
    scores = q.astype(np.float64) @ keys.dense.swapaxes(1, 2) / math.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ values.dense


def relative_l2(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


# --- The kernel's arithmetic, in numpy --------------------------------------------------------------------------------


def split(x: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 parts ``[parts, ...]``, as f32, and the inverse of the power of two that scaled each row (last axis)."""
    exponent = np.frexp(np.abs(x).max(-1, keepdims=True))[1] - 8  # the largest comes to [128, 256)
    rest, found = np.ldexp(x, -exponent), []
    for _ in range(parts):
        found.append(rest.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
        rest = (rest - found[-1]) * np.float32(16)
    return np.stack(found), np.ldexp(np.float32(1), exponent)


def join(parts: np.ndarray) -> np.ndarray:
    """``parts[0] + parts[1] / 16 + parts[2] / 256``."""
    total = np.zeros_like(parts[0])
    for i in reversed(range(len(parts))):
        total = total + parts[i] * np.float32(16.0**-i)
    return total


def exact_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``a [..., M, K]`` times ``b [..., N, K]``, one accumulator an element, rounded once."""
    return (a.astype(np.float64) @ b.astype(np.float64).swapaxes(-1, -2)).astype(np.float32)


def tensor_core_product(a: np.ndarray, b: np.ndarray, block: int = 32, fraction: int = 25) -> np.ndarray:
    """The same as a tensor core sums: of each block of products and the sum so far, what lies ``fraction`` bits below
    the largest term's leading one is cut off, and the new sum is cut to f32 (arXiv 2511.10909)."""
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (a, b))
    out = np.empty((*lead, a.shape[-2], b.shape[-2]), np.float32)
    for index in np.ndindex(*lead):
        total = np.zeros(out.shape[-2:])
        for start in range(0, a.shape[-1], block):
            x, y = (m[index][:, start : start + block].astype(np.float64) for m in (a, b))
            terms = np.concatenate([x[:, None] * y[None], total[..., None]], -1)
            step = np.ldexp(1.0, np.frexp(np.abs(terms).max(-1))[1] - 1 - fraction)
            total = np.trunc(terms / step[..., None]).sum(-1) * step
            mantissa, exponent = np.frexp(total)
            total = np.ldexp(np.trunc(mantissa * 2.0**24), exponent - 24)
        out[index] = total
    return out


def emulate(
    q: np.ndarray,
    keys: Operand,
    values: Operand,
    parts: tuple[int, int],
    *,
    product=exact_product,
    by_tile: bool = True,
) -> np.ndarray:
    """The kernel's output for every KV head, ``[K, R, D]``; not ``by_tile``, weights have one scale for all tokens."""
    return np.stack([_emulate_head(q[h], keys, values, h, parts, product, by_tile) for h in range(len(q))])


def _emulate_head(q, keys, values, head, parts, product, by_tile):  # type: ignore[no-untyped-def]
    scores = _scores(q * np.float32(math.log2(math.e) / math.sqrt(q.shape[-1])), keys, head, parts[0], product)
    tiles = scores.reshape(len(q), -1, TILE).swapaxes(0, 1)  # [tiles, R, 128]
    top = (
        tiles.max(-1, keepdims=True)
        if by_tile
        else np.broadcast_to(tiles.max((0, 2), keepdims=True), (*tiles.shape[:2], 1))
    )
    weights = np.exp2(tiles - top)
    sums = _sums(weights, values, head, parts[1], product, by_tile)  # [tiles, R, D]
    share = np.exp2(top - top.max(0))
    return (share * sums).sum(0) / (share * weights.sum(-1, keepdims=True)).sum(0)


def _scores(q, keys, head, parts, product):  # type: ignore[no-untyped-def]
    """``[R, T]``."""
    codes, (scale, offset) = keys.codes[head].astype(np.float32), keys.params(head)
    tokens, dim = codes.shape
    if keys.quant.per == "channel":  # a query of its own for each group of tokens
        columns, down = split(q * scale[:, None], parts)  # [parts, groups, R, D]
        dots = product(columns, codes.reshape(-1, keys.group, dim)[None])
        scores = join(dots) * down + (q * offset[:, None]).sum(-1, keepdims=True)
        return scores.swapaxes(0, 1).reshape(len(q), tokens)
    columns, down = split(q, parts)
    scores = np.zeros((len(q), tokens), np.float32)
    for g in range(dim // keys.group):
        here = slice(g * keys.group, (g + 1) * keys.group)
        dots = product(columns[..., here], codes[:, here].reshape(-1, 1, TILE, keys.group))
        dots = np.moveaxis(dots, 0, -2).reshape(parts, len(q), tokens)
        scores += (
            join(dots) * down * scale[:, g] + join(columns[..., here]).sum(-1, keepdims=True) * down * offset[:, g]
        )
    return scores


def _sums(weights, values, head, parts, product, by_tile):  # type: ignore[no-untyped-def]
    """``[tiles, R, D]``."""
    codes, (scale, offset) = values.codes[head].astype(np.float32), values.params(head)
    codes = codes.reshape(len(weights), TILE, -1)
    dim = codes.shape[-1]
    sums = np.zeros((*weights.shape[:2], dim), np.float32)

    def columns(x):  # type: ignore[no-untyped-def]
        if by_tile:
            return split(x, parts)
        found, down = split(x.swapaxes(0, 1).reshape(x.shape[1], -1), parts)
        return found.reshape(parts, x.shape[1], -1, TILE).swapaxes(1, 2), down

    if values.quant.per == "channel":  # an accumulator of its own for each group of tokens
        per_tile = TILE // values.group
        found, down = columns(weights)
        for g in range(per_tile):
            here = slice(g * values.group, (g + 1) * values.group)
            dots = product(found[..., here], codes[:, here].swapaxes(1, 2)[None])
            total = weights[..., here].sum(-1, keepdims=True)
            sums += join(dots) * down * scale[g::per_tile, None] + total * offset[g::per_tile, None]
        return sums
    scale, offset = (x.reshape(len(weights), 1, TILE, -1) for x in (scale, offset))
    for g in range(dim // values.group):
        here = slice(g * values.group, (g + 1) * values.group)
        found, down = columns(weights * scale[..., g])
        dots = product(found, codes[..., here].swapaxes(1, 2)[None])
        sums[..., here] = join(dots) * down + (weights * offset[..., g]).sum(-1, keepdims=True)
    return sums


# --- The same on this machine's GPU -----------------------------------------------------------------------------------


class Side(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("bits", "per_channel", "group", "parts")]


class Sizes(ctypes.Structure):
    """As in blackwell_numerics.cu."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("heads", "rows", "tokens", "dim")),
        ("key", Side),
        ("value", Side),
    ]


def build(path: Path) -> ctypes.CDLL:
    """Compiles blackwell_numerics.cu for the GPU that is here, to ``path``."""
    flags = ["-std=c++17", "-O3", "-arch=native", "--expt-relaxed-constexpr", "-shared", "-Xcompiler", "-fPIC"]
    source = ROOT / "benchmarks" / "blackwell_numerics.cu"
    subprocess.run(["nvcc", *flags, "-cudart", "static", f"-I{ROOT / 'cuda'}", source, "-o", path], check=True)
    return load(path)


def load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.blackwell_conversion_mismatches.restype = ctypes.c_int64
    return library


def measure(library: ctypes.CDLL, q: np.ndarray, keys: Operand, values: Operand, parts: tuple[int, int]) -> np.ndarray:
    """``emulate`` by the GPU's tensor cores."""
    heads, rows, dim = q.shape
    sides = [
        Side(x.quant.bits, x.quant.per == "channel", x.group, n) for x, n in zip((keys, values), parts, strict=True)
    ]
    sizes = Sizes(heads, rows, keys.codes.shape[1], dim, *sides)
    out = np.empty(q.shape, np.float32)
    arrays = [q * np.float32(math.log2(math.e) / math.sqrt(dim)), keys.pages, keys.pairs, values.pages, values.pairs]
    arrays = [*map(np.ascontiguousarray, arrays), out]
    error = library.blackwell_attention(ctypes.byref(sizes), *(ctypes.c_void_p(x.ctypes.data) for x in arrays))
    if error != 0:
        raise RuntimeError(f"blackwell_numerics.cu: CUDA error {error}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=INPUTS)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--tokens", type=int, help="of every input but real, a multiple of 128")
    parser.add_argument("--tensor-core", action="store_true", help="emulate with a tensor core's sums: minutes")
    parser.add_argument("--measure", action="store_true", help="on this machine's GPU")
    parser.add_argument("--library", type=Path, help="blackwell_numerics.cu, compiled before")
    parser.add_argument("--no-emulation", action="store_true")
    args = parser.parse_args()

    ways: dict[str, Callable[..., np.ndarray]] = {}
    if not args.no_emulation:
        ways["emulated"] = functools.partial(
            emulate, product=tensor_core_product if args.tensor_core else exact_product
        )
        ways["running"] = functools.partial(ways["emulated"], by_tile=False)
    with tempfile.TemporaryDirectory() as folder:
        if args.measure:
            library = load(args.library) if args.library else build(Path(folder) / "blackwell_numerics.so")
            print(f"f32 patterns that the device converts otherwise: {library.blackwell_conversion_mismatches()}")
            ways["measured"] = functools.partial(measure, library)
        print("input    format        way      ", *(f"q{a} p{b}  " for a, b in PARTS))
        for name in args.inputs:
            given = named_input(name, args.tokens)
            for text in args.formats:
                keys, values = quantize(given, text)
                expected = reference(given.q, keys, values)
                for way, attend in ways.items():
                    errors = [relative_l2(attend(given.q, keys, values, parts), expected) for parts in PARTS]
                    print(f"{name:8} {text:13} {way:9}", *(f"{error:.1e}" for error in errors), flush=True)


if __name__ == "__main__":
    main()
