"""``show_config``: what is installed, what was built, and which kernel serves each device."""

from __future__ import annotations

import importlib.metadata
import platform
from types import ModuleType

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


def _sm100_kernel(cuda: ModuleType) -> str:
    """The opt-in kernel of compute capability 10.x."""
    if not cuda.has_tcgen05:
        return "not built"
    try:
        asked = cuda.uses_tcgen05()
    except ValueError as error:
        return str(error)
    state = "on, by" if asked else "off; turned on by"
    return f"compiled, not yet run on hardware; {state} JAX_FOSCAR_SM100=tcgen05 (compute capability 10.x)"


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
    if cuda is not None:
        lines.append(f"tcgen05 kernel: {_sm100_kernel(cuda)}")
    for device in jax.devices():
        lines.append(f"device {device} ({device.device_kind}): kernel {_kernel_for(device.platform)}")
    return "\n".join(lines)


def show_config() -> None:
    """Prints versions, the modules built and their CUDA architectures, the devices seen and the kernel for each."""
    print(config())
