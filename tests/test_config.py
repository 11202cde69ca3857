"""``show_config`` and ``python -m jax_foscar`` tell what is installed and which kernel serves what."""

import subprocess
import sys

import jax
import pytest
import support

import jax_foscar
from jax_foscar import config, native


def test_the_cpu_module_is_there():
    """The package is built, so that no test of the kernel is left out unseen; on a GPU, its module too."""
    assert "cpu" in support.KERNELS, "build jax_foscar first (pip install .), and do not run pytest with PYTHONPATH=."
    if jax.default_backend() == "gpu":
        assert "cuda" in support.KERNELS


def test_show_config(capsys):
    jax_foscar.show_config()
    text = capsys.readouterr().out
    cpu = native.module("cpu")
    assert f"jax {jax.__version__}, jaxlib {jax.lib.__version__}" in text
    assert "runtime {}.{}".format(*native.runtime_api_version()) in text
    assert "cpu module {}.{}".format(*cpu.ffi_api_version) in text
    assert f"cpu module: built, instruction set {cpu.instruction_set()}" in text
    assert cpu.instruction_set() in ("avx512", "avx2", "baseline", "neon")
    assert "\ncuda module: " in text
    assert text.count("\ndevice ") == len(jax.devices())
    kernel = "cuda" if jax.default_backend() == "gpu" else "cpu"
    assert f": kernel {kernel}" in text


def test_python_m_jax_foscar(capsys):
    """The same text, but for the devices of a fresh process."""
    jax_foscar.show_config()
    here = capsys.readouterr().out.splitlines()
    done = subprocess.run([sys.executable, "-P", "-m", "jax_foscar"], capture_output=True, text=True, check=True)
    there = done.stdout.splitlines()
    assert [line for line in there if not line.startswith("device")] == [
        line for line in here if not line.startswith("device")
    ]


@pytest.mark.parametrize(
    ("platform", "built", "kernel"),
    [
        ("cpu", True, "cpu"),
        ("gpu", True, "cuda"),
        ("gpu", False, "none: the cuda module was not built; implementation='xla' works"),
        ("cpu", False, "none: the cpu module was not built; implementation='xla' works"),
        ("tpu", True, "xla (no kernel for this platform)"),
    ],
)
def test_which_kernel_serves(platform, built, kernel, monkeypatch):
    monkeypatch.setattr(native, "module", lambda name: object() if built else None)
    assert config._kernel_for(platform) == kernel


def test_public_names():
    """What ``__all__`` promises is there and documented."""
    for name in jax_foscar.__all__:
        assert getattr(jax_foscar, name).__doc__, name
