"""``show_config``: what is installed, what was built, and which kernel serves each device."""

from __future__ import annotations

import importlib.metadata
import platform

import jax

from . import native


def _kernel_for(device_platform: str) -> str:
    known = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}.get(device_platform)
    if known is None:
        return "xla (no kernel for this platform)"
    return (
        known
        if native.module(known) is not None
        else f"none: the {known} module was not built; implementation='xla' works"
    )


def config() -> str:
    """The text that ``show_config`` prints."""
    cpu, cuda = native.module("cpu"), native.module("cuda")
    lines = [
        f"jax_foscar {importlib.metadata.version('jax-foscar')}",
        f"jax {jax.__version__}, jaxlib {importlib.metadata.version('jaxlib')}, Python {platform.python_version()}",
        "XLA FFI API: runtime {}.{}".format(*native.runtime_api_version())
        + "".join(f", {name} module {m.ffi_api_version[0]}.{m.ffi_api_version[1]}"
                  for name, m in (("cpu", cpu), ("cuda", cuda)) if m is not None),
        f"cpu module: {'not built' if cpu is None else f'built, instruction set {cpu.instruction_set()}'}",
        f"cuda module: {'not built' if cuda is None else f'built for {cuda.architectures}'}",
    ]  # fmt: skip
    for device in jax.devices():
        lines.append(f"device {device} ({device.device_kind}): kernel {_kernel_for(device.platform)}")
    return "\n".join(lines)


def show_config() -> None:
    """Prints versions, the modules built and their CUDA architectures, the devices seen and the kernel for each."""
    print(config())
