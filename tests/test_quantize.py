"""``quantize`` is exact about its own rounding, and says what it does at the edges of its parameters' range."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jax_foscar import Quant, dequantize, quantize

PARAM_DTYPES = ("float16", "float32")
QUANTS = [
    Quant(2),
    Quant(4, "token", 32),
    Quant(2, "channel", 32),
    Quant(4, "channel", 64),
]
SHAPE = (64, 64)  # [T, D] of almost every test, so that little is compiled
quantize_jit = jax.jit(quantize, static_argnames=("quant", "param_dtype"))
dequantize_jit = jax.jit(dequantize, static_argnames="quant")


def run(x, quant, param_dtype="float16", **options):
    """Codes, params and the values that come back, as numpy."""
    codes, params = quantize_jit(jnp.asarray(x), quant=quant, param_dtype=param_dtype, **options)
    assert codes.dtype == jnp.uint8
    assert codes.shape == x.shape
    assert params.dtype == param_dtype
    return np.asarray(codes), np.asarray(params), np.asarray(dequantize_jit(codes, params, quant=quant))


def per_value(params, quant, index, shape=SHAPE):
    """The scale (0) or offset (1) of every value, float64 of ``shape``."""
    axis, group = (-1, quant.group_size(shape[-1])) if quant.per == "token" else (-2, quant.group)
    return np.repeat(params[..., index].astype(np.float64), group, axis=axis)


def normal(shape=SHAPE, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("param_dtype", PARAM_DTYPES)
@pytest.mark.parametrize("quant", QUANTS, ids=str)
def test_against_numpy(quant, param_dtype):
    """Parameters are the rounded minimum and step, codes the nearest under the rounded ones."""
    x = normal() * np.random.default_rng(1).uniform(0.1, 5, SHAPE[1]).astype(np.float32) + 3
    codes, params, back = run(x, quant, param_dtype)
    expected_codes, expected = support.quantize(x, quant, param_dtype)
    assert params.shape == expected.shape
    np.testing.assert_array_equal(params[..., 1], expected[..., 1])
    eps = float(np.finfo(param_dtype).eps)  # XLA may fuse, or divide by multiplying
    np.testing.assert_allclose(params[..., 0], expected[..., 0], rtol=1.01 * eps, atol=1e-7 * np.abs(x).max())
    off = codes.astype(int) - expected_codes
    assert np.abs(off).max() <= 1
    assert (off != 0).mean() < 1e-3
    np.testing.assert_allclose(back, support.dequantize(codes, params, quant), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("quant", QUANTS, ids=str)
def test_codes_are_nearest_under_rounded_params(quant):
    """With an offset that float16 rounds by several steps, codes chosen against the unrounded one would be off."""
    x = 1000.3 + 0.5 * normal()
    codes, params, back = run(x, quant)
    scale, offset = per_value(params, quant, 0), per_value(params, quant, 1)
    levels = offset + scale * np.arange(2**quant.bits).reshape(-1, 1, 1)
    nearest = np.abs(levels - x).min(axis=0)
    np.testing.assert_allclose(np.abs(back.astype(np.float64) - x), nearest, atol=2e-4)
    assert codes.max() == quant.levels


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(np.float32, SHAPE, elements=st.floats(-1e4, 1e4, width=32), fill=st.floats(-100, 100, width=32)),
    st.sampled_from(QUANTS),
    st.sampled_from(PARAM_DTYPES),
)
def test_error_is_half_a_step(x, quant, param_dtype):
    """|x - back| <= half the stored step, plus what rounding scale and offset costs at the ends of the range."""
    _, params, back = run(x, quant, param_dtype)
    scale, offset = per_value(params, quant, 0), per_value(params, quant, 1)
    info = np.finfo(param_dtype)
    eps, tiny = float(info.eps), float(info.smallest_subnormal)
    rounding = eps * (np.abs(offset) + quant.levels * scale) + (quant.levels + 1) * tiny
    bound = (
        scale / 2 + rounding + 4e-7 * np.maximum(np.abs(x), np.abs(back)) + 6e-38
    )  # quarters that are subnormal are flushed
    excess = np.abs(x.astype(np.float64) - back) - bound
    worst = np.unravel_index(excess.argmax(), SHAPE)
    assert excess.max() <= 0, (worst, x[worst], back[worst], scale[worst], offset[worst])


@pytest.mark.parametrize("param_dtype", PARAM_DTYPES)
@pytest.mark.parametrize("quant", QUANTS, ids=str)
def test_constant_groups(quant, param_dtype):
    """No division by zero: scale 0, codes 0, and the stored offset comes back."""
    for value in (0.0, -3.0, 0.1, 1e-30):
        codes, params, back = run(np.full(SHAPE, value, np.float32), quant, param_dtype)
        assert (codes == 0).all()
        assert (params[..., 0] == 0).all()
        np.testing.assert_array_equal(back, np.dtype(param_dtype).type(value).astype(np.float32))


@pytest.mark.parametrize("quant", QUANTS, ids=str)
def test_wide_values_saturate_float16(quant):
    """Parameters past 65504 are clipped, never infinite; float32 parameters hold them."""
    x = 1e6 + 1e5 * normal()
    _, params, back = run(x, quant, "float16")
    assert np.isfinite(params.astype(np.float32)).all()
    assert (params[..., 1] == 65504).all()
    assert np.isfinite(back).all()
    _, params, _ = run(-x, quant, "float16")
    assert (params[..., 1] == -65504).all()
    for wide in (x, -x):
        _, params, back = run(wide, quant, "float32")
        assert (np.abs(back - wide) <= per_value(params, quant, 0) / 2 + 1).all()


@pytest.mark.parametrize("quant", QUANTS, ids=str)
def test_tiny_ranges_cost_no_more_than_documented(quant):
    """A range below what a float16 step resolves becomes (nearly) constant: at most ``2**bits * 2**-25``."""
    for size in (1e-6, 1e-7, 1e-9):
        x = size * np.random.default_rng(0).uniform(0, 1, SHAPE).astype(np.float32)
        _, params, back = run(x, quant, "float16")
        assert np.isfinite(params.astype(np.float32)).all()
        error = np.abs(back.astype(np.float64) - x)
        step = per_value(params, quant, 0)
        assert (error <= step / 2 + 2**quant.bits * 2.0**-25).all()
        assert size > 1e-8 or (step == 0).all()
        _, params, back = run(x, quant, "float32")
        assert (np.abs(back - x) <= per_value(params, quant, 0) / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-10, 1e10, 1e30])
@pytest.mark.parametrize("quant", QUANTS, ids=str)
def test_float32_params_over_the_whole_range(quant, magnitude):
    x = normal() * np.float32(magnitude)
    codes, params, back = run(x, quant, "float32")
    assert codes.min() == 0
    assert codes.max() == quant.levels
    step = per_value(params, quant, 0)
    assert (np.abs(back.astype(np.float64) - x) <= step / 2 * (1 + 1e-5)).all()


def test_ranges_beyond_float32_do_not_overflow():
    x = np.zeros(SHAPE, np.float32)
    x[:, 0], x[:, 1] = -3e38, 3e38
    codes, params, _ = run(x, Quant(4), "float32")
    assert np.isfinite(params).all()
    scale, offset = np.moveaxis(params.astype(np.float64), -1, 0)
    np.testing.assert_allclose((scale * codes + offset)[:, :2], x[:, :2], rtol=1e-5)
    assert (codes[:, 1] == 15).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("quant", QUANTS, ids=str)
def test_what_is_not_finite_stays_in_its_group(quant, bad):
    """Per token it is one token's group of channels, per channel one channel's group of tokens; that comes back NaN."""
    x = normal()
    clean = run(x, quant)
    dirty = x.copy()
    dirty[37, 41] = bad
    codes, params, back = run(dirty, quant)
    damaged = np.zeros(SHAPE, bool)
    if quant.per == "token":
        first = 41 // quant.group_size(64) * quant.group_size(64)
        damaged[37, first : first + quant.group_size(64)] = True
    else:
        first = 37 // quant.group * quant.group
        damaged[first : first + quant.group, 41] = True
    np.testing.assert_array_equal(np.isnan(back), damaged)
    np.testing.assert_array_equal(codes[~damaged], clean[0][~damaged])
    np.testing.assert_array_equal(back[~damaged], clean[2][~damaged])
    assert (codes[damaged] == 0).all()
    assert np.isnan(params.astype(np.float32)).sum() == 2, "one group's scale and offset"


@pytest.mark.parametrize("quant", [Quant(4, "channel", 32), Quant(2, "channel", 64)], ids=str)
def test_where_limits_the_range(quant):
    """Tokens that ``where`` leaves out, whatever they hold, do not touch a group's parameters; a group of none is 0."""
    x = normal()
    keep = np.arange(64)[:, None] >= 5
    _, expected = support.quantize(x, quant, keep=keep[:, 0])
    wild = x.copy()
    wild[:5] = [[1e30], [-1e30], [np.nan], [np.inf], [-np.inf]]
    for tokens in (x, wild):
        _, params, _ = run(tokens, quant, where=jnp.asarray(keep))
        np.testing.assert_allclose(params.astype(np.float32), expected, rtol=2e-3)
    _, params, _ = run(wild, quant, where=jnp.zeros((64, 1), bool))
    assert (params == 0).all()


@pytest.mark.parametrize("dtype", support.DTYPES)
def test_input_dtypes(dtype):
    """Half-precision tokens are quantized as the same tokens in float32."""
    x = jnp.asarray(normal(), dtype)
    half, full = (quantize_jit(tokens, quant=QUANTS[1]) for tokens in (x, x.astype(jnp.float32)))
    support.assert_same_bits(half, full)


@pytest.mark.parametrize("quant", QUANTS, ids=str)
def test_leading_axes_are_independent(quant):
    x = normal((3, 2, *SHAPE))
    codes, params = quantize_jit(x, quant=quant)
    one = quantize_jit(x[1, 1], quant=quant)
    support.assert_same_bits((codes[1, 1], params[1, 1]), one)


X, C = jnp.zeros((64, 96)), jnp.zeros((64, 64), jnp.uint8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quantize(X, Quant(4, "token", 64)), ValueError, r"^x has 96 channels, .* not a multiple of group=64$"),
        (
            lambda: quantize(X[:48], Quant(4, "channel", 32)),
            ValueError,
            r"^x has 48 tokens, .* not a multiple of group=32$",
        ),
        (lambda: quantize(X, Quant(16)), ValueError, r"^quant must be a Quant of 2 or 4 bits, got Quant\(bits=16"),
        (lambda: quantize(X, 4), ValueError, r"^quant must be a Quant of 2 or 4 bits, got 4$"),
        (lambda: quantize(X.astype(jnp.int32), Quant(4)), TypeError, r"^x must be floating, got int32$"),
        (lambda: quantize(X[0], Quant(4)), ValueError, r"^x must be \[\.\.\., tokens, channels\], got shape \(96,\)$"),
        (lambda: dequantize(C.astype(jnp.int8), X, Quant(4)), TypeError, r"^codes must be uint8, got int8$"),
        (lambda: dequantize(C, X, Quant(4)), ValueError, r"^params must have shape \(64, 1, 2\) for codes of shape"),
        (lambda: dequantize(C, X, Quant(4, "channel", 32)), ValueError, r"^params must have shape \(2, 64, 2\)"),
        (lambda: dequantize(C, X, Quant(16)), ValueError, r"^quant must be a Quant of 2 or 4 bits"),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_works_under_vmap_and_scan():
    x = normal((3, *SHAPE))
    quant = QUANTS[2]
    expected = quantize_jit(x, quant=quant)
    support.assert_same_bits(jax.vmap(functools.partial(quantize_jit, quant=quant))(x), expected)
    _, scanned = jax.jit(lambda x: jax.lax.scan(lambda c, x: (c, quantize(x, quant)), 0, x))(x)
    support.assert_same_bits(scanned, expected)
