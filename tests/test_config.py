"""``show_config`` and ``python -m jax_foscar`` tell what is installed and which kernel serves what."""

import os
import subprocess
import sys
from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("built", "answer", "line"),
    [
        (False, False, "not built"),
        (True, False, "compiled, not yet run on hardware; off; turned on by JAX_FOSCAR_SM100=tcgen05"),
        (True, True, "compiled, not yet run on hardware; on, by JAX_FOSCAR_SM100=tcgen05"),
        (True, ValueError("JAX_FOSCAR_SM100 is 'x'"), "JAX_FOSCAR_SM100 is 'x'"),
    ],
)
def test_sm100_kernel(built, answer, line):
    def uses_tcgen05():
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert config._sm100_kernel(SimpleNamespace(has_tcgen05=built, uses_tcgen05=uses_tcgen05)).startswith(line)


@pytest.mark.parametrize(
    ("value", "uses"), [("", "False"), ("tcgen05", "True"), ("tcgen", "'tcgen'; it must be 'tcgen05'")]
)
def test_sm100_variable(value, uses):
    """Read once, by the module; anything but its one value is an error that names it."""
    if native.module("cuda") is None:
        pytest.skip("jax_foscar has no CUDA module here")
    program = "from jax_foscar import _cuda; print(_cuda.uses_tcgen05())"
    environment = {**os.environ, "JAX_FOSCAR_SM100": value}
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, env=environment)
    assert uses in done.stdout + done.stderr
