"""Set before JAX starts: four CPU devices, so that sharding is tested on any machine; a GPU that workers can share."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from hypothesis import settings

from jax_foscar import native

# A source tree found before the installed package would have no modules, and half of the tests would quietly vanish.
assert native.module("cpu") is not None, "jax_foscar has no compiled module: run `make test`, or python -P -m pytest"

settings.register_profile("thorough", max_examples=1600)
settings.register_profile("gpu", max_examples=160)  # where an example takes longer
