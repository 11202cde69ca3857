"""The compiled modules: loaded once, checked against the runtime, then registered with XLA."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import jax

PLATFORMS = {"cpu": "jax_foscar._cpu", "cuda": "jax_foscar._cuda"}


def runtime_api_version() -> tuple[int, int]:
    """The XLA FFI API version of the jaxlib that runs."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
    return int(found["MAJOR"]), int(found["MINOR"])


def check_api_version(name: str, built: tuple[int, int], runtime: tuple[int, int]) -> None:
    """Raises ImportError where a module was built for a newer FFI than the runtime's.

    Registering such a module would disable the whole backend at its next use, so it is refused before.
    """
    if built[0] != runtime[0] or built > runtime:
        jaxlib = importlib.metadata.version("jaxlib")
        raise ImportError(
            f"{name} was built for XLA FFI API {built[0]}.{built[1]}, but jaxlib {jaxlib} offers "
            f"{runtime[0]}.{runtime[1]}: install a newer jaxlib, or reinstall jax_foscar from source without "
            "--no-build-isolation, which builds it for the oldest jaxlib it supports"
        )


@functools.cache
def module(platform: str) -> ModuleType | None:
    """The compiled module of "cpu" or "cuda", its targets registered; None where it was not built."""
    name = PLATFORMS[platform]
    if importlib.util.find_spec(name) is None:
        return None
    loaded = importlib.import_module(name)
    check_api_version(name, loaded.ffi_api_version, runtime_api_version())
    for target, handler in loaded.registrations().items():
        jax.ffi.register_ffi_target(target, handler, platform={"cpu": "cpu", "cuda": "CUDA"}[platform])
    return loaded


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError where ``implementation`` is no name of one, or its module was not built."""
    if implementation not in (None, "cuda", "cpu", "xla"):
        raise ValueError(f"implementation must be None, 'cuda', 'cpu' or 'xla', got {implementation!r}")
    if implementation in PLATFORMS and module(implementation) is None:
        raise ValueError(
            f"implementation={implementation!r}, but this jax_foscar was built without its {implementation} module: "
            "reinstall it where the compiler is found, or leave implementation out"
        )
