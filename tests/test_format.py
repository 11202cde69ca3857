"""``Quant`` and ``KVFormat``: normalised, hashable, printed as a string that reads back; errors name the field."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_foscar import KVFormat, Quant

quants = st.one_of(
    st.just(Quant(16)),
    st.builds(Quant, st.sampled_from([2, 4]), st.just("token"), st.sampled_from([None, 32, 64, 128])),
    st.builds(Quant, st.sampled_from([2, 4]), st.just("channel"), st.sampled_from([32, 64])),
)
formats = st.builds(
    KVFormat,
    quants,
    quants,
    page_size=st.integers(1, 8).map(lambda n: 64 * n),
    sink_tokens=st.integers(0, 200),
    recent_tokens=st.integers(0, 1000),
    max_new=st.integers(1, 64),
    param_dtype=st.sampled_from(["float16", "float32", jnp.float16, np.float32, np.dtype("float16")]),
)


@given(formats)
def test_parse_reads_what_str_printed(fmt):
    assert KVFormat.parse(str(fmt)) == fmt
    assert hash(KVFormat.parse(str(fmt))) == hash(fmt)
    assert KVFormat.parse(str(fmt).partition("@")[0]) == fmt


@given(formats, formats)
def test_the_string_is_an_identity(one, other):
    assert (str(one) == str(other)) == (one == other)


@pytest.mark.parametrize(
    ("text", "fmt"),
    [
        ("k4c64,v4t64", KVFormat(Quant(4, "channel", 64), Quant(4, "token", 64))),
        (" k2t,v16 ", KVFormat(Quant(2), Quant(16))),
        ("v2c32,k4t128@1", KVFormat(Quant(4, "token", 128), Quant(2, "channel", 32))),
        (
            "k4t,v4t,page128,sink4,recent96,new16,f32",
            KVFormat(
                Quant(4), Quant(4), page_size=128, sink_tokens=4, recent_tokens=96, max_new=16, param_dtype="float32"
            ),
        ),
    ],
)
def test_parse_examples(text, fmt):
    assert KVFormat.parse(text) == fmt


def test_str_names_the_layout_version():
    assert str(KVFormat.parse("k4c64,v4t64")) == "k4c64,v4t64@1"


@pytest.mark.parametrize("other", [jnp.float16, np.float16, "float16", np.dtype("float16"), "f2"])
def test_dtypes_are_normalised(other):
    """``jnp.float16`` and ``np.dtype("float16")`` are equal but hash differently: kept raw, they would recompile."""
    one, two = (KVFormat(Quant(4), Quant(4), param_dtype=d) for d in (np.float16, other))
    assert one == two
    assert hash(one) == hash(two)


def test_integers_are_normalised():
    one, two = Quant(4, "channel", 64), Quant(np.int64(4), "channel", np.int32(64))
    assert one == two
    assert hash(one) == hash(two)
    assert type(two.bits) is type(two.group) is int
    fmt = KVFormat(one, two, page_size=np.int64(128), sink_tokens=np.uint8(4))
    assert type(fmt.page_size) is type(fmt.sink_tokens) is int


def test_immutable():
    with pytest.raises(AttributeError):
        Quant(4).bits = 2
    with pytest.raises(AttributeError):
        KVFormat(Quant(4), Quant(4)).page_size = 128


@pytest.mark.parametrize(
    ("text", "group", "ring"),
    [
        ("k4t,v4t", 1, 0),
        ("k16,v16", 1, 0),
        ("k4t,v4t,sink4", 1, 8),
        ("k4t,v4t,recent20", 1, 28),
        ("k4c64,v4t", 64, 128),
        ("k4c32,v4t", 32, 64),
        ("k4c32,v2c64", 64, 128),
        ("k4c64,v4c32,recent100,new16", 64, 192),
    ],
)
def test_token_group_and_ring(text, group, ring):
    """The ring is ``R + G - 1 + max_new`` rounded up to a group, and there is none where nothing stays exact."""
    fmt = KVFormat.parse(text)
    assert (fmt.token_group, fmt.ring, fmt.keeps_exact) == (group, ring, ring > 0)


Q = Quant(4)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Quant(3), ValueError, r"^bits must be 2, 4 or 16 .*, got 3$"),
        (lambda: Quant(8), ValueError, r"^bits must be 2, 4 or 16"),
        (lambda: Quant(0), ValueError, r"^bits must be at least 1, got 0$"),
        (lambda: Quant("4"), TypeError, r"^bits must be an int, got '4'"),
        (lambda: Quant(4.0), TypeError, r"^bits must be an int, got 4.0"),
        (lambda: Quant(4, "row"), ValueError, r"^per must be 'token' or 'channel', got 'row'$"),
        (lambda: Quant(4, "token", 16), ValueError, r"^group must be 32, 64, 128 or None .*per='token', got 16$"),
        (lambda: Quant(4, "token", 0), ValueError, r"^group must be at least 1, got 0$"),
        (lambda: Quant(4, "channel"), ValueError, r"^group must be 32 or 64 tokens where per='channel', got None$"),
        (lambda: Quant(4, "channel", 128), ValueError, r"^group must be 32 or 64 tokens .*got 128$"),
        (lambda: Quant(16, "channel", 64), ValueError, r"^bits=16 is not quantized: leave per and group out"),
        (lambda: Quant(16, "token", 64), ValueError, r"^bits=16 is not quantized: leave per and group out"),
        (lambda: KVFormat("k4t", Q), TypeError, r"^key must be a Quant, got 'k4t'$"),
        (lambda: KVFormat(Q, 4), TypeError, r"^value must be a Quant, got 4$"),
        (lambda: KVFormat(Q, Q, page_size=96), ValueError, r"^page_size must be a multiple of 64 tokens, got 96$"),
        (lambda: KVFormat(Q, Q, page_size=0), ValueError, r"^page_size must be at least 1, got 0$"),
        (lambda: KVFormat(Q, Q, sink_tokens=-1), ValueError, r"^sink_tokens must be at least 0, got -1$"),
        (lambda: KVFormat(Q, Q, recent_tokens=1.5), TypeError, r"^recent_tokens must be an int, got 1.5"),
        (lambda: KVFormat(Q, Q, max_new=0), ValueError, r"^max_new must be at least 1, got 0$"),
        (
            lambda: KVFormat(Q, Q, param_dtype="bfloat16"),
            ValueError,
            r"^param_dtype must be float16 or float32, got 'bfl",
        ),
        (lambda: KVFormat(Q, Q, param_dtype="half"[:2]), ValueError, r"^param_dtype must be float16 or float32"),
        (lambda: KVFormat.parse(4), TypeError, r"^a format string is needed, such as 'k4c64,v4t64', got 4$"),
        (lambda: KVFormat.parse("int4"), ValueError, r"^format 'int4': 'int4' is not understood; an example is"),
        (lambda: KVFormat.parse("k4t"), ValueError, r"must name both operands"),
        (lambda: KVFormat.parse("k4t,k4t"), ValueError, r"names k twice"),
        (lambda: KVFormat.parse("k4t,v4t,sink"), ValueError, r"'sink' is not understood"),
        (lambda: KVFormat.parse("k4t,v4t,bf16"), ValueError, r"'bf16' is not understood"),
        (lambda: KVFormat.parse("k4t,v4t@9"), ValueError, r"has layout version 9; this jax_foscar reads 1$"),
        (lambda: KVFormat.parse("k3t,v4t"), ValueError, r"^bits must be 2, 4 or 16"),
        (lambda: KVFormat.parse("k4t,v4c"), ValueError, r"^group must be 32 or 64 tokens"),
    ],
)
def test_errors_name_the_argument(make, error, message):
    with pytest.raises(error, match=message) as info:
        make()
    assert "\n" not in str(info.value)
