"""What the examples' command lines have in common."""

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from jax_foscar import KVFormat
from smollm2.attention import FORMATS, parse_kv


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def number(convert: Callable[[str], float], requirement: str, holds: Callable[[float], bool]):
    """An argparse type: a number for which `holds`."""

    def parse(text: str):
        try:
            value = convert(text)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"must be {requirement}, got {text!r}")
        return value

    return parse


def kv_format(text: str) -> KVFormat | None:
    try:
        return parse_kv(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"must be f32, {', '.join(FORMATS)} or a format string: {e}") from None


positive = number(int, "an integer of at least 1", lambda n: n >= 1)
