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
