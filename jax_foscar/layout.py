"""The bytes inside one page, as index formulas: the Python statement of ``cuda/page_format.h``.

``pack`` and ``unpack`` are the only code that indexes inside a page; docs/cache-format.md draws the layout.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .format import TILE_TOKENS

Operand = Literal["key", "value"]


def padded_dim(head_dim: int) -> int:
    """Channels that a token's codes span: the head dim rounded up to a multiple of 32."""
    return -(-head_dim // 32) * 32


def token_bytes(bits: int, head_dim: int) -> int:
    """Bytes of one token of one KV head."""
    return 2 * head_dim if bits == 16 else padded_dim(head_dim) * bits // 8


def key_address(bits: int, head_dim: int, t: np.ndarray, channel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Byte inside a tile, and lowest bit inside the byte, of the key code of token ``t`` (0..63) and ``channel``."""
    blocks, block_channels = padded_dim(head_dim) * bits // 128, 128 // bits
    blk, rest = np.divmod(channel, block_channels)
    # 2 bits: byte j, field f <-> channel 32 (f & 1) + 16 (f >> 1) + j.   4 bits: channel 16 f + j.
    field = rest // 32 + 2 * (rest % 32 // 16) if bits == 2 else rest // 16
    j, n = rest % 16, t // 8 * blocks + blk
    byte = (n // 4 * 32 + 4 * (t % 8) + j // 4) * 16 + n % 4 * 4 + j % 4
    # The 2-bit tail of 32 channels: byte j, field f <-> channel 8 f + j.
    tail_field, tail_j = np.divmod(rest, 8)
    tail_byte = blocks * 16 * TILE_TOKENS + (4 * (t % 8) + tail_j // 2) * 16 + t // 8 * 2 + tail_j % 2
    in_tail = blk == blocks
    return np.where(in_tail, tail_byte, byte), bits * np.where(in_tail, tail_field, field)


def value_address(bits: int, head_dim: int, t: np.ndarray, channel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Byte inside a tile, and lowest bit inside the byte, of the value code of token ``t`` (0..63) and ``channel``."""
    blocks, block_channels = padded_dim(head_dim) * bits // 128, 128 // bits
    rb, rest = np.divmod(channel, block_channels)
    pair = t % 2 * 2 + t % 16 // 8
    field, r = np.divmod(rest, 16)  # row r, field f <-> channel 16 f + r
    lane = 4 * (r % 8) + t % 8 // 2
    byte = ((t // 32 * blocks + rb) * 32 + lane) * 16 + (r // 8 + 2 * (t % 32 // 16)) * 4 + pair
    # The 2-bit tail of 32 channels: row r (0..7), field f <-> channel 8 f + r.
    tail_field, tail_r = np.divmod(rest, 8)
    tail_lane = 4 * tail_r + t % 8 // 2
    tail_byte = blocks * 16 * TILE_TOKENS + (t // 32 * 32 + tail_lane) * 8 + t % 32 // 16 * 4 + pair
    in_tail = rb == blocks
    return np.where(in_tail, tail_byte, byte), bits * np.where(in_tail, tail_field, field)


@functools.cache
def _tables(operand: Operand, bits: int, head_dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of a tile: byte and shift of each code ``[64 * padded]``; the code in each byte's field ``[bytes, 8/bits]``."""
    padded = padded_dim(head_dim)
    t, channel = np.divmod(np.arange(TILE_TOKENS * padded), padded)
    address = key_address if operand == "key" else value_address
    byte, shift = address(bits, head_dim, t, channel)
    source = np.full((TILE_TOKENS * token_bytes(bits, head_dim), 8 // bits), -1)
    source[byte, shift // bits] = np.arange(TILE_TOKENS * padded)
    assert (source >= 0).all(), "the layout is a bijection"
    return byte.astype(np.int32), shift.astype(np.uint8), source.astype(np.int32)


def pack(codes: Array, operand: Operand, bits: int) -> Array:
    """Codes (uint8; bfloat16 at 16 bits) ``[..., page, D]`` to page bytes, uint8 ``[..., page, token_bytes]``."""
    *lead, page, head_dim = codes.shape
    if bits == 16:
        return lax.bitcast_convert_type(codes, jnp.uint8).reshape(*lead, page, 2 * head_dim)
    padded = padded_dim(head_dim)
    _, _, source = _tables(operand, bits, head_dim)
    codes = jnp.pad(codes, [(0, 0)] * (len(lead) + 1) + [(0, padded - head_dim)])
    tiles = codes.reshape(*lead, page // TILE_TOKENS, TILE_TOKENS * padded)
    packed = jnp.zeros((*tiles.shape[:-1], source.shape[0]), jnp.uint8)
    for field in range(8 // bits):
        packed |= tiles[..., source[:, field]] << np.uint8(bits * field)
    return packed.reshape(*lead, page, token_bytes(bits, head_dim))


def unpack(data: Array, operand: Operand, bits: int, head_dim: int) -> Array:
    """The inverse of ``pack``: page bytes ``[..., page, token_bytes]`` to codes ``[..., page, D]``."""
    *lead, page, _ = data.shape
    if bits == 16:
        return lax.bitcast_convert_type(data.reshape(*lead, page, head_dim, 2), jnp.bfloat16)
    byte, shift, _ = _tables(operand, bits, head_dim)
    tiles = data.reshape(*lead, page // TILE_TOKENS, TILE_TOKENS * token_bytes(bits, head_dim))
    codes = (tiles[..., byte] >> shift) & np.uint8((1 << bits) - 1)
    return codes.reshape(*lead, page, padded_dim(head_dim))[..., :head_dim]
