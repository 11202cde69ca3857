"""The static description of a cache: how keys and values are quantized and where tokens are kept."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from typing import Any, Literal

import numpy as np

LAYOUT_VERSION = 1
"""Version of the byte layout inside a page (``layout.py``); part of ``str(KVFormat)``."""

TILE_TOKENS = 64
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
_PARAM_DTYPES = {"float16": "f16", "float32": "f32"}


def _integer(name: str, value: Any, minimum: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}") from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


@dataclasses.dataclass(frozen=True)
class Quant:
    """How one operand, K or V, is quantized: ``x = scale * code + offset``.

    Attributes:
      bits: 2 or 4, or 16 for bfloat16 that is not quantized.
      per: "token": a group is ``group`` neighbouring channels of one token. "channel": a group is ``group``
        neighbouring tokens of one channel.
      group: per token 32, 64, 128 or None for the whole head; it must divide the head dim. Per channel 32 or 64 tokens.
    """

    bits: int
    per: Literal["token", "channel"] = "token"
    group: int | None = None

    def __post_init__(self) -> None:
        bits = _integer("bits", self.bits, 1)
        if bits not in (2, 4, 16):
            raise ValueError(f"bits must be 2, 4 or 16 (bfloat16, not quantized), got {bits}")
        if self.per not in ("token", "channel"):
            raise ValueError(f"per must be 'token' or 'channel', got {self.per!r}")
        group = None if self.group is None else _integer("group", self.group, 1)
        if bits == 16 and (self.per != "token" or group is not None):
            raise ValueError(f"bits=16 is not quantized: leave per and group out, got per={self.per!r}, group={group}")
        if self.per == "channel" and group not in (32, 64):
            raise ValueError(f"group must be 32 or 64 tokens where per='channel', got {group}")
        if self.per == "token" and group not in (None, 32, 64, 128):
            raise ValueError(f"group must be 32, 64, 128 or None (the whole head) where per='token', got {group}")
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "group", group)

    @property
    def quantized(self) -> bool:
        """Whether there are codes at all (2 or 4 bits)."""
        return self.bits != 16

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def token_group(self) -> int:
        """How many tokens must be there before they can be quantized."""
        return self.group if self.per == "channel" and self.group else 1

    def group_size(self, head_dim: int) -> int:
        """Values that share one scale and offset, for a head of ``head_dim`` channels."""
        return self.group or head_dim

    def check_head_dim(self, name: str, head_dim: int) -> None:
        """Raises ValueError unless this quantization can serve heads of ``head_dim`` channels."""
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"{name} must be one of {HEAD_DIMS}, got {head_dim}")
        if self.per == "token" and head_dim % self.group_size(head_dim):
            raise ValueError(
                f"group={self.group} must divide {name}={head_dim}; group=None takes the whole head as one group"
            )

    def __str__(self) -> str:
        if not self.quantized:
            return "16"
        return f"{self.bits}{self.per[0]}{self.group or ''}"


_TOKEN = re.compile(r"(?P<operand>[kv])(?P<bits>\d+)(?:(?P<per>[tc])(?P<group>\d+)?)?")
_OPTION = re.compile(r"(?P<name>page|sink|recent|new)(?P<value>\d+)")


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """The static format of a ``KVCache``: hashable, comparable, and printed as a short string that ``parse`` reads.

    Attributes:
      key: quantization of the keys.
      value: quantization of the values.
      page_size: tokens a page, a multiple of 64.
      sink_tokens: the first tokens of a row, which stay exact (bfloat16).
      recent_tokens: the least number of newest tokens that are exact.
      max_new: the most tokens one step may bring for which earlier queries still see every exact token, and that can be
        rolled back; longer steps (prefill) let queries further back than the ring read quantized tokens.
      param_dtype: dtype of scale and offset, float16 or float32.
    """

    key: Quant
    value: Quant
    page_size: int = 64
    sink_tokens: int = 0
    recent_tokens: int = 0
    max_new: int = 8
    param_dtype: Any = "float16"

    def __post_init__(self) -> None:
        for name in ("key", "value"):
            if not isinstance(getattr(self, name), Quant):
                raise TypeError(f"{name} must be a Quant, got {getattr(self, name)!r}")
        page_size = _integer("page_size", self.page_size, 1)
        if page_size % TILE_TOKENS:
            raise ValueError(f"page_size must be a multiple of {TILE_TOKENS} tokens, got {page_size}")
        try:
            param_dtype = np.dtype(self.param_dtype)
        except TypeError:
            param_dtype = None
        if param_dtype is None or param_dtype.name not in _PARAM_DTYPES:
            raise ValueError(f"param_dtype must be float16 or float32, got {self.param_dtype!r}")
        object.__setattr__(self, "page_size", page_size)
        object.__setattr__(self, "sink_tokens", _integer("sink_tokens", self.sink_tokens, 0))
        object.__setattr__(self, "recent_tokens", _integer("recent_tokens", self.recent_tokens, 0))
        object.__setattr__(self, "max_new", _integer("max_new", self.max_new, 1))
        object.__setattr__(self, "param_dtype", param_dtype)

    @property
    def token_group(self) -> int:
        """Tokens that are quantized together: the least common multiple of the token groups of K and V."""
        return math.lcm(self.key.token_group, self.value.token_group)

    @property
    def keeps_exact(self) -> bool:
        """Whether some tokens are held exactly (bfloat16) beside the pages."""
        return self.token_group > 1 or self.sink_tokens > 0 or self.recent_tokens > 0

    @property
    def absent(self) -> frozenset[str]:
        """Arrays of a cache, by operand name, that this format does not have."""
        names = {"key_params": self.key.quantized, "value_params": self.value.quantized}
        names |= {"exact_key": self.keeps_exact, "exact_value": self.keeps_exact}
        return frozenset(name for name, there in names.items() if not there)

    @property
    def ring(self) -> int:
        """Slots of the ring of newest exact tokens, a row and layer; 0 where nothing is kept exact."""
        if not self.keeps_exact:
            return 0
        needed = self.recent_tokens + self.token_group - 1 + self.max_new
        return -(-needed // self.token_group) * self.token_group

    def full_pages(self, length: int) -> int:
        """Pages of a row of ``length`` tokens that no later step writes: what forks and shared prefixes may share.

        Tokens that may yet be rolled back do not count into ``length``.
        """
        return max(_integer("length", length, 0) - self.recent_tokens, 0) // self.page_size  # groups divide pages

    def __str__(self) -> str:
        parts = [f"k{self.key}", f"v{self.value}"]
        defaults = {"page": (self.page_size, 64), "sink": (self.sink_tokens, 0), "recent": (self.recent_tokens, 0),
                    "new": (self.max_new, 8)}  # fmt: skip
        parts += [f"{name}{value}" for name, (value, default) in defaults.items() if value != default]
        if self.param_dtype != np.float16:
            parts.append(_PARAM_DTYPES[self.param_dtype.name])
        return f"{','.join(parts)}@{LAYOUT_VERSION}"

    @classmethod
    def parse(cls, text: str) -> KVFormat:
        """The format that ``str(format)`` printed.

        ``k4c64,v4t64``: keys 4 bits per channel in groups of 64 tokens, values 4 bits per token in groups of 64
        channels. A group left out is the whole head (``k4t``); ``k16`` is bfloat16. Options follow, each where it
        differs from its default: ``page128``, ``sink4``, ``recent128``, ``new16`` (``max_new``), ``f32``
        (``param_dtype``). ``@1`` names the layout version; without it the current one is meant.

        Raises:
          ValueError: the text is not such a format, or names another layout version.
        """
        if not isinstance(text, str):
            raise TypeError(f"a format string is needed, such as 'k4c64,v4t64', got {text!r}")
        body, _, version = text.strip().partition("@")
        if version and version != str(LAYOUT_VERSION):
            raise ValueError(f"format {text!r} has layout version {version}; this jax_foscar reads {LAYOUT_VERSION}")
        quants: dict[str, Quant] = {}
        options: dict[str, Any] = {}
        names = {"page": "page_size", "sink": "sink_tokens", "recent": "recent_tokens", "new": "max_new"}
        for part in body.split(","):
            if match := _TOKEN.fullmatch(part):
                per: Literal["token", "channel"] = "channel" if match["per"] == "c" else "token"
                name, item = match["operand"], Quant(int(match["bits"]), per, int(match["group"] or 0) or None)
                if name in quants:
                    raise ValueError(f"format {text!r} names {name} twice")
                quants[name] = item
            elif match := _OPTION.fullmatch(part):
                options[names[match["name"]]] = int(match["value"])
            elif part in _PARAM_DTYPES.values():
                options["param_dtype"] = {short: name for name, short in _PARAM_DTYPES.items()}[part]
            else:
                raise ValueError(f"format {text!r}: {part!r} is not understood; an example is 'k4c64,v4t64'")
        if quants.keys() != {"k", "v"}:
            raise ValueError(f"format {text!r} must name both operands, as 'k4c64,v4t64' does")
        return cls(quants["k"], quants["v"], **options)
