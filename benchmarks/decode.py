"""One decode step of attention: our kernels against their peers, in one run on one device, CPU or GPU.

    python benchmarks/decode.py                                          # the shape "cpu"
    python benchmarks/decode.py --shapes batch128 single --formats k4t,v4t k2t,v2t --csv h200.csv --plot h200.png
    python benchmarks/decode.py --batch 8 --length 16384 --formats k4c64,v4t64

A shape is a name from shapes.py, or flags. Ours attends over random codes whose outputs are checked against the jnp
reference before anything is timed; inputs are larger than L2; the combine of split rows is included. GB/s counts the
bytes a call must read (codes and parameters, or 16- and 8-bit values), and on a GPU they are also given as a share of
what a plain read kernel reaches in the same run. Peers that are not installed, or refuse a shape, are left out by name.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers in PyTorch share the GPU's memory

import jax

import jax_contenders
from jax_foscar import KVFormat
from shapes import SHAPES, Shape

HERE = Path(__file__).parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="shapes by name")
    for field, what in (
        ("batch", "rows"),
        ("length", "tokens a row, of the longest where ragged"),
        ("heads", "query heads"),
        ("kv-heads", "KV heads"),
        ("head-dim", "channels a head"),
    ):
        parser.add_argument(f"--{field}", type=int, help=f"{what}; one shape, from 'cpu' where a flag is left out")
    parser.add_argument("--lengths", choices=["even", "ragged", "one-long"], help="lengths of the rows")
    parser.add_argument(
        "--formats", nargs="+", type=KVFormat.parse, metavar="FORMAT", default=[KVFormat.parse("k4t,v4t")]
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the queries; bfloat16 on a GPU")
    parser.add_argument("--no-peers", action="store_true", help="time ours alone")
    parser.add_argument("--oscar", type=python_file, help="OSCAR's triton_ops/decode_attention.py, another peer")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--csv", type=Path, help="also write the rows there")
    parser.add_argument("--plot", type=Path, help="also draw them: share of the read rate, speed-up over a peer")
    args = parser.parse_args()
    if args.oscar and (args.no_peers or jax.default_backend() != "gpu"):
        parser.error("--oscar is a peer that needs a GPU, and is not timed with --no-peers")
    return args


def python_file(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".py" or not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is no Python file")
    return path


def chosen_shapes(args: argparse.Namespace) -> dict[str, Shape]:
    flags = {name: getattr(args, name) for name in ("batch", "length", "heads", "kv_heads", "head_dim", "lengths")}
    flags = {name: value for name, value in flags.items() if value is not None}
    if args.shapes and flags:
        raise SystemExit("decode.py: give --shapes, or the flags of one shape, not both")
    if flags:
        return {"flags": Shape(**{**vars(SHAPES["cpu"]), **flags})}
    return {name: SHAPES[name] for name in args.shapes or ["cpu"]}


def read_rate() -> float | None:
    """GB/s of a plain read kernel, or None where there is no GPU or no nvcc."""
    if jax.default_backend() != "gpu" or shutil.which("nvcc") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "read_rate.so"
        command = ["nvcc", "-O3", "-std=c++17", "-arch=native", "-Xcompiler", "-fPIC", "-shared", "-o", library]
        subprocess.run([*command, HERE / "read_rate.cu"], check=True)
        function = ctypes.CDLL(str(library)).read_rate
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_size_t]
        rate: float = function(8 << 30)
    return rate if rate > 0 else None


def measured(row: dict[str, object]) -> dict[str, object]:
    """The row, which stderr tells at once: the table comes last."""
    print(f"{row['shape']} {row['contender']}: {row['us']:.1f} us", file=sys.stderr)
    return row


def peer_rows(name: str, shape: Shape, repeats: int, oscar: Path | None) -> list[dict[str, object]]:
    """What a user has otherwise; peers that fail say why on stderr and are left out."""
    elements = int(shape.row_lengths().sum(dtype="int64")) * shape.kv_heads * shape.head_dim * 2
    contenders: dict[str, tuple[float, object]] = {}
    if jax.default_backend() == "gpu":
        for label, implementation in (("cuDNN bf16 (jax.nn)", "cudnn"), ("XLA bf16 (jax.nn)", "xla")):
            contenders[label] = 2, lambda i=implementation: jax_contenders.jax_nn(shape, "bfloat16", i, repeats)
        contenders["Pallas bf16"] = 2, lambda: jax_contenders.pallas(shape, repeats)
        try:
            import torch_peers
        except ImportError as missing:
            print(f"peers in PyTorch are left out: {missing}", file=sys.stderr)
        else:
            for label, (size, call) in torch_peers.peers(shape, oscar).items():
                contenders[label] = size, lambda c=call: c(repeats)
    else:
        for dtype, size in (("bfloat16", 2), ("float32", 4)):
            contenders[f"jax.nn {dtype}"] = size, lambda d=dtype: jax_contenders.jax_nn(shape, d, "xla", repeats)
    rows = []
    for label, (size, call) in contenders.items():
        try:
            row = {"shape": name, "contender": label, "us": call(), "bytes": int(elements * size)}
        except Exception as refusal:  # a peer's own exceptions are its own
            reason = (str(refusal).splitlines() or [""])[0][:150]
            print(f"{label} is left out at {name}: {type(refusal).__name__}: {reason}", file=sys.stderr)
        else:
            rows.append(measured(row))
    return rows


def our_rows(name: str, shape: Shape, args: argparse.Namespace) -> list[dict[str, object]]:
    dtype = args.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    implementations = {"": None} if jax.default_backend() == "gpu" else {"": None, " jnp": "xla"}
    rows = []
    for fmt in args.formats:
        for label, implementation in implementations.items():
            us, nbytes, error = jax_contenders.ours(shape, fmt, dtype, implementation, args.repeats)
            row = {"shape": name, "contender": f"{fmt}{label}", "us": us, "bytes": nbytes, "error": error}
            rows.append(measured(row))
    return rows


def table(rows: list[dict[str, object]], rate: float | None) -> list[dict[str, str]]:
    """The rows as text, with speed-ups over every peer of the same shape, and over our own jnp path where it ran."""
    peers = list(dict.fromkeys(str(r["contender"]) for r in rows if "error" not in r))
    time_of = {(r["shape"], r["contender"]): float(r["us"]) for r in rows}
    lines = []
    for r in rows:
        speed = float(r["bytes"]) / float(r["us"]) / 1e3
        line = {
            "shape": str(r["shape"]),
            "contender": str(r["contender"]),
            "us": f"{r['us']:.1f}",
            "GB/s": f"{speed:.1f}",
        }
        line["% of read"] = f"{100 * speed / rate:.1f}" if rate else ""
        line["rel L2"] = f"{r['error']:.1e}" if "error" in r else ""
        for peer in peers:
            other = time_of.get((r["shape"], peer))
            line[f"x {peer}"] = f"{other / float(r['us']):.2f}" if other and "error" in r else ""
        if own := time_of.get((r["shape"], f"{r['contender']} jnp")):
            line["x our jnp"] = f"{own / float(r['us']):.2f}"
        lines.append(line)
    columns = dict.fromkeys(column for line in lines for column in line)
    return [{column: line.get(column, "") for column in columns} for line in lines]


def draw(lines: list[dict[str, str]], path: Path) -> None:
    """Two panels, over the shapes: share of the read rate, and speed-up over FlashInfer, or else the first peer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ours = [line for line in lines if line["rel L2"]]
    shapes = list(dict.fromkeys(line["shape"] for line in ours))
    formats = list(dict.fromkeys(line["contender"] for line in ours))
    peers = [column for column in lines[0] if column.startswith("x ")]
    speed_up = next((column for column in peers if "FlashInfer" in column), next(iter(peers), None))
    panels = [c for c in ("% of read", speed_up) if c and any(line[c] for line in ours)] or ["GB/s"]
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(1.6 * len(shapes) + 3, 3.2 * len(panels)), squeeze=False)
    for axis, column in zip(axes[:, 0], panels, strict=True):
        for i, name in enumerate(formats):
            values = {line["shape"]: line[column] for line in ours if line["contender"] == name}
            heights = [float(values.get(shape) or 0) for shape in shapes]
            axis.bar(
                [x + i / (len(formats) + 1) for x in range(len(shapes))], heights, 1 / (len(formats) + 1), label=name
            )
        axis.set_xticks([x + (len(formats) - 1) / 2 / (len(formats) + 1) for x in range(len(shapes))], shapes)
        axis.set_ylabel(f"speed-up over{column[1:]}" if column.startswith("x ") else column)
        axis.grid(axis="y", alpha=0.3)
    axes[0, 0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    args = parse_arguments()
    shapes = chosen_shapes(args)
    device = jax.devices()[0]
    driver = ""
    if device.platform == "gpu" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = f", driver {subprocess.run(query, capture_output=True, text=True).stdout.split()[0]}"
    rate = read_rate()
    print(
        f"{device.device_kind}{driver}, jax {jax.__version__}, Python {platform.python_version()}, {platform.machine()}"
    )
    print("python benchmarks/decode.py", *sys.argv[1:])
    if rate:
        print(f"plain read: {rate:.0f} GB/s")
    rows: list[dict[str, object]] = []
    for name, shape in shapes.items():
        if not args.no_peers:
            rows += peer_rows(name, shape, args.repeats, args.oscar)
        rows += our_rows(name, shape, args)
    lines = table(rows, rate)
    widths = {column: max(len(column), *(len(line[column]) for line in lines)) for column in lines[0]}
    for line in [{column: column for column in widths}, *lines]:
        print("  ".join(f"{line[column]:>{width}}" for column, width in widths.items()))
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(widths))
            writer.writeheader()
            writer.writerows(lines)
    if args.plot:
        draw(lines, args.plot)


if __name__ == "__main__":
    main()
