"""Decode attention over a 2/4-bit KV cache, inside jitted JAX programs."""

from . import convert, reference
from . import native as _native
from .allocator import OutOfPages, PageAllocator
from .attention import decode_attention, merge_states
from .cache import KVCache, Pages
from .config import show_config
from .format import KVFormat, Quant
from .primitive import export_checks
from .quantize import dequantize, quantize

__all__ = [
    "KVCache",
    "KVFormat",
    "OutOfPages",
    "PageAllocator",
    "Pages",
    "Quant",
    "convert",
    "decode_attention",
    "dequantize",
    "export_checks",
    "merge_states",
    "quantize",
    "reference",
    "show_config",
]

# Registered at import, so that programs that were exported or compiled ahead find their targets.
for _platform in _native.PLATFORMS:
    _native.module(_platform)
