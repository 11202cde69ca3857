"""The bytes inside a page: one statement in Python, one in C++, and what the kernels rely on."""

import jax.numpy as jnp
import numpy as np
import pytest
import support
from support import BF16, HEAD_DIMS

from jax_foscar import layout, native

CODES = [(operand, bits, dim) for operand in ("key", "value") for bits in (2, 4) for dim in HEAD_DIMS]
PADDED = {64: 64, 80: 96, 96: 96, 128: 128, 192: 192, 256: 256}


def addresses(operand: str, bits: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Byte and shift of every code of a tile, padding channels included, ``[64, padded]``."""
    t, channel = np.mgrid[:64, : PADDED[dim]]
    return (layout.key_address if operand == "key" else layout.value_address)(bits, dim, t, channel)


@pytest.mark.parametrize(("operand", "bits", "dim"), CODES)
def test_bijection(operand, bits, dim):
    """Each field of each byte of a tile holds exactly one code."""
    byte, shift = addresses(operand, bits, dim)
    places = byte * 8 + shift
    assert (shift % bits == 0).all()
    assert sorted(places.ravel()) == list(range(0, 64 * PADDED[dim] * bits, bits))


@pytest.mark.parametrize(("operand", "bits", "dim"), CODES)
def test_token_owns_its_bytes(operand, bits, dim):
    """Writing one token touches no byte of another, and every token has as many."""
    byte, _ = addresses(operand, bits, dim)
    owned = [set(row) for row in byte]
    assert {len(bytes_) for bytes_ in owned} == {layout.token_bytes(bits, dim)}
    assert len(set().union(*owned)) == sum(map(len, owned))


@pytest.mark.parametrize(("operand", "bits", "dim"), CODES)
def test_lane_loads(operand, bits, dim):
    """A lane's load is whole: 16 bytes (8 in a 2-bit value tail) that hold only the tokens its mma fragment needs."""
    byte, _ = addresses(operand, bits, dim)
    token = np.full(64 * layout.token_bytes(bits, dim), -1)
    for t, row in enumerate(byte):
        token[row] = t
    main = PADDED[dim] * bits // 128 * 16 * 64  # bytes before the tail
    assert main % 512 == 0
    if operand == "key":
        # Lane 4 (t % 8) + c: four 4-byte words, each of one token.
        words = token[:main].reshape(-1, 32, 4, 4)
        assert (words == words[..., :1]).all()
        assert (words[..., 0] % 8 == np.arange(32)[:, None] // 4).all()
        tail = token[main:].reshape(-1, 32, 8, 2)
        assert (tail == np.arange(32)[:, None, None] // 4 + 8 * np.arange(8)[:, None]).all()
    else:
        # Lane 4 (r % 8) + c: words of tokens 2c, 8 + 2c, 2c + 1, 9 + 2c, twice 16 tokens.
        c = np.arange(32) % 4
        quad = np.stack([2 * c, 8 + 2 * c, 2 * c + 1, 9 + 2 * c], -1)  # [32, 4]
        words = token[:main].reshape(2, -1, 32, 2, 2, 4)  # 32-token half, row block, lane, 16-token half, r / 8
        half = np.arange(2).reshape(2, 1, 1, 1, 1, 1) * 32 + np.arange(2).reshape(1, 1, 1, 2, 1, 1) * 16
        assert (words == quad.reshape(1, 1, 32, 1, 1, 4) + half).all()
        if tail := token[main:].size:
            words = token[-tail:].reshape(2, 32, 2, 4)
            assert (words == quad[:, None] + 32 * np.arange(2).reshape(2, 1, 1, 1) + 16 * np.arange(2)[:, None]).all()


@pytest.mark.parametrize(("operand", "bits", "dim"), CODES)
def test_group_stays_in_an_accumulation(operand, bits, dim):
    """32 neighbouring channels (the smallest group) fill whole fields of whole bytes: they share bytes with a multiple
    of 32 channels of one block, so a mask of the block's words is all of a group and nothing else."""
    byte, shift = addresses(operand, bits, dim)
    for first in range(0, PADDED[dim], 32):
        group = slice(first, first + 32)
        fields = {s: byte[0, group][shift[0, group] == s] for s in set(shift[0, group])}
        sizes = {len(set(bytes_)) for bytes_ in fields.values()}
        assert len(sizes) == 1, "every field of the group spans as many bytes"
        assert sizes.pop() * len(fields) == 32
        owners = [set(bytes_) for bytes_ in fields.values()]
        assert all(o == owners[0] for o in owners), "the group's fields lie in the same bytes"


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize(("operand", "bits", "dim"), CODES)
def test_pack_is_the_formula(operand, bits, dim, page):
    """``pack`` puts each code where the formulas say, padding is 0, and ``unpack`` reads it back."""
    codes = np.random.default_rng(dim).integers(0, 2**bits, (2, page, dim), dtype=np.uint8)
    data = np.asarray(layout.pack(jnp.asarray(codes), operand, bits))
    assert data.shape == (2, page, layout.token_bytes(bits, dim)) == (2, page, PADDED[dim] * bits // 8)
    np.testing.assert_array_equal(data, support.pack(codes, operand, bits))
    np.testing.assert_array_equal(layout.unpack(jnp.asarray(data), operand, bits, dim), codes)


@pytest.mark.parametrize("operand", ["key", "value"])
def test_sixteen_bits_are_row_major_bfloat16(operand):
    values = np.random.default_rng(0).standard_normal((2, 128, 80)).astype(BF16)
    data = layout.pack(jnp.asarray(values), operand, 16)
    assert data.shape == (2, 128, 160)
    assert np.asarray(data).tobytes() == values.tobytes()
    np.testing.assert_array_equal(layout.unpack(data, operand, 16, 80), values)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("operand", ["key", "value"])
def test_cpp_states_the_same_formulas(operand, dim):
    """``cuda/page_format.h``, compiled, gives the addresses of ``layout.py`` in pages of one and of two tiles."""
    cpp = getattr(native.module("cpu"), f"{operand}_address")
    for bits in (2, 4):
        byte, shift = support._addresses(operand, bits, dim, 128)
        for t, channel in np.ndindex(128, dim):
            assert cpp(bits, dim, t, channel) == (byte[t, channel], shift[t, channel]), (bits, t, channel)
    for t, channel in ((0, 0), (63, dim - 1), (64, 1), (127, dim - 1)):
        assert cpp(16, dim, t, channel) == (2 * (t * dim + channel), 0)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("operand", ["key", "value"])
def test_cpp_inverts_them_by_the_word(operand, dim):
    """What a kernel packs into a 4-byte word is what the addresses say of its bytes, padding included."""
    cpp = getattr(native.module("cpu"), f"{operand}_word")
    for bits in (2, 4):
        words = np.array([cpp(bits, dim, word) for word in range(16 * layout.token_bytes(bits, dim))])
        byte, shift = (layout.key_address if operand == "key" else layout.value_address)(
            bits, dim, *np.moveaxis(words, -1, 0)
        )
        index = np.arange(words[..., 0].size).reshape(byte.shape)  # [word, byte * field]
        np.testing.assert_array_equal(byte, index * bits // 8)
        np.testing.assert_array_equal(shift, index * bits % 8)
