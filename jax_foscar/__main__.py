"""``python -m jax_foscar`` prints the configuration."""

from .config import show_config

show_config()
