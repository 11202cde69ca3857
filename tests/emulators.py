"""Compiles the emulators in native/emulator, once for each state of their sources; they are called over ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

CUDA = Path(__file__).resolve().parent.parent / "cuda"
SOURCES = Path(__file__).resolve().parent / "native" / "emulator"
# Fibers jump between stacks, which the fortified longjmp takes for an error. No product joins a sum unasked.
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-attributes"]
FLAGS += ["-Werror", "-U_FORTIFY_SOURCE", "-fPIC", "-shared"]
CALL = [
    "batch", "num_queries", "num_heads", "num_kv_heads", "pools", "layers", "pages", "page_size", "table_width", "dim",
    "key_bits", "key_per_channel", "key_group", "value_bits", "value_per_channel", "value_group",
    "sink", "recent", "token_group", "ring", "causal", "window_left",
]  # fmt: skip
ARRAYS = [
    "q", "key_codes", "value_codes", "key_params", "value_params", "key_exact", "value_exact", "page_table", "length",
    "layer", "out", "lse",
]  # fmt: skip
UNBOUNDED = 2**31 - 1  # a window's side without a limit


class Arrays(ctypes.Structure):
    """Pointers of native/emulator/call.h; those not given are null."""

    _fields_ = [(name, ctypes.c_void_p) for name in ARRAYS]


def sizes_of_call(*own: str) -> type[ctypes.Structure]:
    """Those of native/emulator/call.h, then an emulator's own."""
    fields = [(name, ctypes.c_int64) for name in (*CALL, *own)]
    return type("Sizes", (ctypes.Structure,), {"_fields_": fields})


def build(source: str, *flags: str, instead: dict[str, str] | None = None) -> ctypes.CDLL:
    """A file of native/emulator with the headers of cuda/, some of them replaced by others of that folder."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on PATH")
    command = [compiler, *FLAGS, *flags, f"-I{SOURCES}"]
    texts = [file.read_bytes() for folder in (SOURCES, CUDA) for file in sorted(folder.rglob("*")) if file.is_file()]
    name = hashlib.sha256(b"".join([*texts, " ".join([*command, source]).encode()])).hexdigest()
    path = Path(tempfile.gettempdir()) / f"jax_foscar_{Path(source).stem}_{name[:16]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            headers = Path(folder) / "cuda"
            shutil.copytree(CUDA, headers)
            for header, other in (instead or {}).items():
                shutil.copy(SOURCES / other, headers / header)
            built = Path(folder) / path.name
            subprocess.run([*command, f"-I{headers}", str(SOURCES / source), "-o", str(built)], check=True)
            built.replace(path)  # at once, for other test processes
    return ctypes.CDLL(str(path))
