"""Other libraries' caches, dumps and checkpoints, there and back; attention over a converted cache against the other
library's own formula, written here in numpy."""

import dataclasses
import io
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from jax_foscar import KVCache, KVFormat, Quant, convert, decode_attention
from jax_foscar.convert import Layer, OscarBuffers, QArray, Tokens

FORMATS = [
    ("k4t32,v2t", 64, 96),
    ("k2t,v4t64,f32", 64, 128),
    ("k4c32,v4t", 80, 80),
    ("k2c64,v4c32,page128", 96, 64),
    ("k4t,v16,sink4,recent20", 64, 64),
    ("k16,v2c32,sink40,recent20", 64, 64),
    ("k4c32,v2t32,sink40,recent20,f32", 128, 128),
]
formats = pytest.mark.parametrize(("text", "dim", "value_dim"), FORMATS)
LAYERS, HEADS, CAPACITY = 2, 2, 256


write, dequantize, attend = jax.jit(KVCache.write), jax.jit(KVCache.dequantize), jax.jit(decode_attention)


def empty(text, batch=1, dim=64, value_dim=64):
    return KVCache.create(
        KVFormat.parse(text),
        batch=batch,
        max_length=CAPACITY,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=dim,
        value_head_dim=value_dim,
    )


def written(text, lengths=(150, 64, 1, 0), dim=64, value_dim=64):
    """A cache that ``write`` filled, with a constant group in the first token."""
    rows = support.random_rows(lengths, layers=LAYERS, heads=HEADS, dim=dim, value_dim=value_dim)
    rows.k[:, :, :, 0], rows.v[:, :, :, 0] = 0.3, -2
    cache = empty(text, len(lengths), dim, value_dim).advance(jnp.asarray(lengths))
    for layer in range(LAYERS):
        cache = write(cache, *(jnp.asarray(x[:, layer]).swapaxes(1, 2) for x in (rows.k, rows.v)), layer=layer)
    return cache


def rebuilt(cache, layers, format=None):
    """The cache of converted layers."""
    return convert.from_quantized(format or cache.format, layers, np.asarray(cache.length), max_length=cache.capacity)


def every(convert_layer, cache):
    return [convert_layer(cache, layer) for layer in range(cache.num_layers)]


def values(cache, layer):
    """Keys and values ``[B, T, K, D]`` that the plain arrays stand for, in float32."""
    out = []
    for tokens, quant in zip(convert.to_quantized(cache, layer), (cache.format.key, cache.format.value), strict=True):
        x = tokens.exact
        if tokens.codes is not None:
            params = np.stack([tokens.scale, tokens.offset], -1).swapaxes(1, 2)
            codes = support.dequantize(tokens.codes.swapaxes(1, 2), params, quant, np.float32).swapaxes(1, 2)
            x = codes if x is None else np.where(tokens.is_exact[..., None, None], x.astype(np.float32), codes)
        there = np.arange(x.shape[1]) < np.asarray(cache.length)[:, None]
        out.append(np.where(there[..., None, None], x.astype(np.float32), 0))
    return out


def assert_same_values(actual, expected):
    """The same now, and after the next step: what is exact is there, too."""
    support.assert_same_bits(every(values, actual), every(values, expected))
    new = [
        jnp.asarray(support.random_rows((5,) * expected.batch, heads=HEADS, dim=dim, seed=dim).k[:, 0].swapaxes(1, 2))
        for dim in (expected.head_dim, expected.value_head_dim)
    ]
    stepped = [write(cache.advance(5), *new, layer=1) for cache in (actual, expected)]
    support.assert_same_bits(*(values(cache, 1) for cache in stepped))


def attention(q, k, v, lengths):
    """float64 attention of ``q [B, N, D]`` over ``[B, T, K, D]``."""
    out = np.empty((*q.shape[:2], v.shape[-1]))
    for b, n in enumerate(lengths):
        for h in range(q.shape[1]):
            keys, values = (x[b, :n, h // (q.shape[1] // x.shape[2])].astype(np.float64) for x in (k, v))
            logits = keys @ q[b, h].astype(np.float64) / np.sqrt(q.shape[2])
            weights = np.exp(logits - logits.max())
            out[b, h] = weights @ values / weights.sum()
    return out


def check_attention(cache, layer, k, v):
    """Over one layer of the cache, it is that over these tokens; the format's exact ones are bfloat16."""
    n = np.asarray(cache.length)
    if cache.format.keeps_exact:
        held = np.array([support.quantized_length(int(x), cache.format) for x in n])
        is_exact = (np.arange(k.shape[1]) >= held[:, None])[..., None, None]
        k, v = (np.where(is_exact, x.astype(support.BF16).astype(np.float64), x) for x in (k, v))
    q = support.queries((cache.batch, 2 * HEADS, cache.head_dim))
    expected = attention(np.asarray(q), k, v, n)
    assert support.relative_l2(np.asarray(attend(q, cache, layer=layer), np.float64), expected) < 2e-6


# --- Plain arrays -----------------------------------------------------------------------------------------------------


@formats
def test_a_written_cache_survives(text, dim, value_dim):
    """Through plain arrays and back nothing changes, whatever the format."""
    cache = written(text, dim=dim, value_dim=value_dim)
    layers = every(convert.to_quantized, cache)
    again = rebuilt(cache, layers)
    support.assert_same_bits(every(convert.to_quantized, again), layers)
    assert_same_values(again, cache)


@pytest.mark.parametrize(("text", "dim", "value_dim"), FORMATS[::2])
def test_plain_arrays_say_what_the_cache_holds(text, dim, value_dim):
    """``scale * code + offset``, or the exact token, is what ``dequantize`` gives; from shuffled, poisoned pages."""
    rows = support.random_rows((150, 64, 1, 0), layers=LAYERS, heads=HEADS, dim=dim, value_dim=value_dim)
    cache = support.make_cache(KVFormat.parse(text), rows, capacity=CAPACITY, pools=2, poison=True)
    for x, y in zip(values(cache, 1), dequantize(cache, 1), strict=True):
        np.testing.assert_allclose(x, np.asarray(y)[:, : x.shape[1]], rtol=1e-6, atol=1e-6)


# --- KIVI -------------------------------------------------------------------------------------------------------------


def kivi_pack(codes, bits):
    """As KIVI's ``pack_tensor``, along the last axis."""
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] * bits // 32), np.int64)
    for j in range(codes.shape[-1]):
        words[..., j // (32 // bits)] |= codes[..., j].astype(np.int64) << (bits * (j % (32 // bits)))
    return words.astype(np.uint32).view(np.int32)


def kivi_unpack(words, bits):
    """As KIVI's ``unpack_tensor``."""
    j = np.arange(words.shape[-1] * 32 // bits)
    return (words[..., j // (32 // bits)] >> (j % (32 // bits) * bits)) & (0xFF >> (8 - bits))


def kivi_cache(n, bits, group, residual, dim, seed=0):
    """``past_key_value`` after a prompt of n tokens."""
    rng = np.random.default_rng(seed)
    n_k, n_v = n - n % residual, max(n - residual, 0)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float16)

    def codes(*shape):
        return kivi_pack(rng.integers(0, 2**bits, shape), bits)

    shape = (2, HEADS)
    key = (None, draw(*shape, n, dim), None, None)
    value = (None, draw(*shape, n, dim), None, None)
    if n_k:
        scale, mn = (draw(*shape, dim, n_k // group) for _ in range(2))
        exact = draw(*shape, n % residual, dim) if n % residual else None
        key = (codes(*shape, dim, n_k), exact, np.abs(scale), mn)
    if n_v:
        scale, mn = (draw(*shape, n_v, dim // group) for _ in range(2))
        value = (codes(*shape, n_v, dim), draw(*shape, residual, dim), np.abs(scale), mn)
    return (*key, *value, n)


def kivi_tokens(past, bits):
    """Keys and values ``[B, n, nh, D]`` by KIVI's formula, ``code * scale + mn``, in float64."""
    out = []
    for (codes, exact, scale, mn), axes in ((past[:4], (0, 3, 1, 2)), (past[4:8], (0, 2, 1, 3))):
        parts = []
        if codes is not None:
            data = kivi_unpack(codes, bits).astype(np.float64)
            grouped = data.reshape(*scale.shape, -1)
            parts.append((grouped * scale[..., None] + mn[..., None]).reshape(data.shape).transpose(axes))
        if exact is not None:
            parts.append(exact.astype(np.float64).swapaxes(1, 2))
        out.append(np.concatenate(parts, axis=1))
    return out


@pytest.mark.parametrize(
    ("n", "bits", "group", "residual", "dim"),
    [(150, 2, 32, 32, 64), (300, 4, 32, 128, 128), (128, 2, 64, 64, 128), (20, 2, 32, 32, 64)],
)
def test_kivi(n, bits, group, residual, dim):
    """What KIVI holds after a prompt, with its own windows: codes and parameters to the bit, and its attention."""
    fmt = KVFormat.parse(f"k{bits}c{group},v{bits}t{group},recent{residual}")
    pasts = [kivi_cache(n, bits, group, residual, dim, seed) for seed in range(2)]
    cache = convert.from_quantized(fmt, [convert.from_kivi(fmt, past) for past in pasts], [n, n], max_length=n + 64)
    held = support.quantized_length(n, fmt)
    for layer, past in enumerate(pasts):
        check_attention(cache, layer, *kivi_tokens(past, bits))
        back = convert.to_kivi(cache, layer)
        assert back[8] == n
        if held:
            np.testing.assert_array_equal(back[0], past[0][..., : held * bits // 32])
            np.testing.assert_array_equal(back[4], past[4][:, :, :held])
            for i in (2, 3):
                support.assert_same_bits(back[i], past[i][..., : held // group])
                support.assert_same_bits(back[4 + i], past[4 + i][:, :, :held])
        if past[1] is not None:
            kept = past[1].shape[2]
            support.assert_same_bits(back[1][:, :, -kept:], past[1].astype(support.BF16).astype(np.float32))


@pytest.mark.parametrize(("text", "n"), [("k2c32,v4t32", 150), ("k4c64,v2t64,recent70,f32", 128), ("k4c32,v4t32", 5)])
def test_to_kivi_and_back(text, n):
    """A cache of ours survives KIVI's layout, and KIVI's formula gives its values."""
    cache = written(text, (n, n))
    pasts = every(convert.to_kivi, cache)
    assert_same_values(rebuilt(cache, [convert.from_kivi(cache.format, past) for past in pasts]), cache)
    if cache.format.key.bits == cache.format.value.bits:
        for x, y in zip(kivi_tokens(pasts[1], cache.format.key.bits), values(cache, 1), strict=True):
            np.testing.assert_allclose(y[:, :n], x, rtol=1e-6, atol=1e-6)


# --- OSCAR ------------------------------------------------------------------------------------------------------------


def oscar_tokens(data, params, bits):
    """A pool's values by OSCAR's formula, ``(code - zero) * scale``, in float64."""
    fields = [(data >> (bits * f)) & (2**bits - 1) for f in range(8 // bits)]
    codes = np.concatenate(fields, axis=-1).astype(np.float64)
    scale, zero = params[..., 0::2].astype(np.float64), params[..., 1::2].astype(np.float64)
    group = codes.shape[-1] // scale.shape[-1]
    return (codes - zero.repeat(group, -1)) * scale.repeat(group, -1)


@pytest.mark.parametrize(("bits", "group", "dim"), [(2, None, 128), (2, 32, 128), (4, None, 64), (2, None, 80)])
def test_oscar(bits, group, dim):
    """Rows scattered over a pool: codes and scales to the bit, zeros to the last places, and OSCAR's attention."""
    rng, lengths, slots = np.random.default_rng(0), np.array([70, 0, 33]), 120
    fmt = KVFormat(Quant(bits, group=group), Quant(bits, group=group), param_dtype="float32")
    indptr, indices = np.concatenate([[0], np.cumsum(lengths)]), rng.permutation(slots)[: lengths.sum()]

    def pool():
        data = rng.integers(0, 256, (slots, HEADS, dim * bits // 8), dtype=np.uint8)
        params = rng.uniform(0.1, 2, (slots, HEADS, 2 * dim // (group or dim))).astype(np.float32)
        params[..., 1::2] *= 3
        return data, params

    (k, k_params), (v, v_params) = pool(), pool()
    given = OscarBuffers(k, v, k_params, v_params, indptr, indices)
    cache = convert.from_quantized(fmt, [convert.from_oscar(fmt, given)], np.diff(indptr), max_length=128)
    dense = [np.zeros((3, 70, HEADS, dim)) for _ in range(2)]
    for b in range(3):
        row = indices[indptr[b] : indptr[b + 1]]
        dense[0][b, : len(row)], dense[1][b, : len(row)] = (
            oscar_tokens(x[row], p[row], bits) for x, p in ((k, k_params), (v, v_params))
        )
    for x, y in zip(dense, values(cache, 0), strict=True):
        np.testing.assert_allclose(np.asarray(y)[:, :70], x, rtol=1e-6, atol=1e-6)
    occupied = np.flatnonzero(lengths)
    q = support.queries((3, 2 * HEADS, dim))
    out = np.asarray(attend(q, cache), np.float64)[occupied]
    expected = attention(np.asarray(q)[occupied], dense[0][occupied], dense[1][occupied], lengths[occupied])
    assert support.relative_l2(out, expected) < 2e-6
    back = convert.to_oscar(cache)
    np.testing.assert_array_equal(back.kv_indptr, indptr)
    for ours, theirs, p, q in ((back[0], k, back[2], k_params), (back[1], v, back[3], v_params)):
        np.testing.assert_array_equal(ours[back.kv_indices], theirs[indices])
        np.testing.assert_array_equal(p[..., 0::2], q[indices][..., 0::2])
        np.testing.assert_allclose(p[..., 1::2], q[indices][..., 1::2], rtol=3e-7)


@pytest.mark.parametrize("text", ["k2t,v4t32", "k4t64,v2t32"])
def test_to_oscar_and_back(text):
    """float16 parameters survive float32 zeros to the bit; constant groups keep their values."""
    cache = written(text)
    buffers = every(convert.to_oscar, cache)
    assert_same_values(rebuilt(cache, [convert.from_oscar(cache.format, x) for x in buffers]), cache)
    theirs = oscar_tokens(buffers[1].k_buffer, buffers[1].k_scales_zeros, cache.format.key.bits)
    ours = np.concatenate([x[:n] for x, n in zip(values(cache, 1)[0], cache.length, strict=True)])
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# --- qwix -------------------------------------------------------------------------------------------------------------


def qarray_values(array):
    """qwix's formula, ``(qvalue - zero_point) * scale``, with its broadcasting, in float64."""
    qvalue, scale = np.asarray(array.qvalue).astype(np.float64), np.asarray(array.scale).astype(np.float64)
    zero = 0 * scale if array.zero_point is None else np.asarray(array.zero_point).astype(np.float64)
    for axis in range(qvalue.ndim):
        scale, zero = (np.repeat(x, qvalue.shape[axis] // x.shape[axis], axis) for x in (scale, zero))
    return (qvalue - zero) * scale


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("text", "dtype", "symmetric"),
    [
        ("k4t32,v4t,f32", "int4", False),
        ("k4c32,v4t64,f32", "int8", True),
        ("k2c64,v2t32,f32", "uint8", False),
        ("k2t,v2c32,f32", "int8", False),
    ],
)
def test_qarray(text, dtype, symmetric, scale_dtype):
    """Integer zero points, signed and unsigned codes: nothing is lost, and attention is qwix's."""
    rng, fmt, dim, n = np.random.default_rng(0), KVFormat.parse(text), 64, 192

    def draw(quant):
        low = 0 if dtype == "uint8" else -(2 ** (quant.bits - 1))
        shape = (
            (2, n, HEADS, dim // (quant.group or dim)) if quant.per == "token" else (2, n // quant.group, HEADS, dim)
        )
        scale = jnp.asarray(rng.uniform(0.05, 1, shape), scale_dtype)
        codes = jnp.asarray(rng.integers(low, low + 2**quant.bits, (2, n, HEADS, dim)), dtype)
        zero = None if symmetric else jnp.asarray(rng.integers(low, low + 2**quant.bits, shape), dtype)
        return types.SimpleNamespace(qvalue=codes, scale=scale, zero_point=zero)

    key, value = draw(fmt.key), draw(fmt.value)
    layer = Layer(convert.from_qarray(fmt.key, key), convert.from_qarray(fmt.value, value))
    cache = convert.from_quantized(fmt, [layer], [n, n - 40], max_length=256)
    check_attention(cache, 0, qarray_values(key), qarray_values(value))
    for ours, theirs in zip(convert.to_qarray(cache), (key, value), strict=True):
        held = support.quantized_length(n, fmt)
        offset = 0 if dtype == "uint8" else 2 ** (fmt.key.bits - 1)
        np.testing.assert_array_equal(ours.qvalue[0, :held], np.asarray(theirs.qvalue).astype(int)[0, :held] + offset)
        np.testing.assert_allclose(qarray_values(ours)[0, :held], qarray_values(theirs)[0, :held], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("text", "dim", "value_dim"), [f for f in FORMATS if "16" not in f[0]])
def test_to_qarray_and_back(text, dim, value_dim):
    """A cache of ours survives; exact tokens travel beside."""
    cache = written(text, dim=dim, value_dim=value_dim)
    quants = (cache.format.key, cache.format.value)
    layers = [
        Layer(*(convert.from_qarray(quant, x) for quant, x in zip(quants, pair, strict=True)))
        for pair in every(convert.to_qarray, cache)
    ]
    again = rebuilt(cache, layers)
    if cache.format.param_dtype == np.float16:
        assert_same_values(again, cache)
    else:  # a float32 offset may lose its last place
        for x, y in zip(values(again, 1), values(cache, 1), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=2e-6)


# --- Dumps and checkpoints --------------------------------------------------------------------------------------------


@formats
def test_numpy(text, dim, value_dim):
    """Through a file without pickle, to the bit."""
    cache, file = written(text, dim=dim, value_dim=value_dim), io.BytesIO()
    np.savez(file, **convert.to_numpy(cache))
    file.seek(0)
    again = convert.from_numpy(np.load(file), cache.format)
    assert jax.tree.structure(again) == jax.tree.structure(cache)
    support.assert_same_bits(again, cache)


@pytest.mark.parametrize("pools", [1, 2])
def test_numpy_of_a_paged_cache(pools):
    """Pools, tables and all."""
    fmt = KVFormat.parse("k4c32,v4t")
    cache = support.make_cache(fmt, support.random_rows((100, 64)), capacity=128, pools=pools)
    support.assert_same_bits(convert.from_numpy(convert.to_numpy(cache)), cache)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A cache that docs/convert.md's recipe saved, and the recipe's ``restore``; all of the page's code has run."""
    folder, names = tmp_path_factory.mktemp("orbax"), {}
    text = (pathlib.Path(__file__).parents[1] / "docs/convert.md").read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # where the page writes its dump
        exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), names)
    cache = written("k4c32,v4t")
    names["save"](folder / "step", cache)
    return cache, lambda target: names["restore"](folder / "step", target)


def test_orbax(checkpoint):
    """Restored into a cache of shapes, to the bit."""
    cache, restore = checkpoint
    again = restore(jax.eval_shape(lambda: cache))
    assert jax.tree.structure(again) == jax.tree.structure(cache)
    support.assert_same_bits(again, cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"format": KVFormat.parse("k4c32,v4t,recent1")},
            r"saved format is 'k4c32,v4t@1', the cache's is 'k4c32,v4t,rec",
        ),
        ({"head_dim": 80}, r"saved head_dim is 64, the cache's is 80: restore into"),
    ],
)
def test_orbax_refuses_another_format(checkpoint, change, message):
    """Of equal shapes, which Orbax itself would let pass."""
    cache, restore = checkpoint
    with pytest.raises(ValueError, match=f"^{message}"):
        restore(dataclasses.replace(jax.eval_shape(lambda: cache), **change))


# --- Errors -----------------------------------------------------------------------------------------------------------

FMT = KVFormat.parse("k4c32,v2t32")
PLAIN = KVFormat.parse("k4t,v4t")


def tokens(quant, n=64, dim=64, **changes):
    shape = (1, n, 1, dim // quant.group) if quant.per == "token" else (1, n // quant.group, 1, dim)
    made = Tokens(np.zeros((1, n, 1, dim), np.uint8), np.ones(shape, np.float32), np.zeros(shape, np.float32))
    return made._replace(**changes)


def build(length=64, fmt=FMT, max_length=128, key=None, **changes):
    layer = Layer(key or tokens(FMT.key), tokens(FMT.value, **changes))
    return convert.from_quantized(fmt, [layer], [length], max_length=max_length)


def one(value, fill=1.0, shape=(1, 64, 1, 2)):
    array = np.full(shape, fill, np.float32)
    array[0, 3] = value
    return array


EXACT = {"exact": np.zeros((1, 64, 1, 64)), "is_exact": np.arange(64)[None] >= 20}
PAST = kivi_cache(64, 2, 32, 32, 64)
POOL, POOL_PARAMS = np.zeros((3, 2, 16), np.uint8), np.ones((3, 2, 2), np.float32)
OSCAR = OscarBuffers(POOL, POOL, POOL_PARAMS, POOL_PARAMS, np.array([0, 3]), np.arange(3))
DUMP = convert.to_numpy(empty("k4c32,v4t"))

CASES = {
    "no layers": (lambda: convert.from_quantized(FMT, [], [], max_length=64), r"layers must hold one Layer"),
    "length": (lambda: build(65), r"lengths must be 1 ints in \[0, 64\], got \[65\]: layers bring 64 tokens"),
    "float length": (lambda: build(1.5), r"lengths must be 1 ints"),
    "max_length": (lambda: build(max_length=32), r"lengths must be 1 ints in \[0, 32\], got \[64\].*max_length is 32"),
    "rank": (lambda: build(codes=np.zeros(3, np.uint8)), r"layers\[0\].value must have codes .*got shape \[3\]"),
    "code": (
        lambda: build(codes=np.full((1, 64, 1, 64), 4)),
        r"layers\[0\].value.codes must be in \[0, 3\], got 4: the format has 2 bits",
    ),
    "signed code": (lambda: build(codes=np.full((1, 64, 1, 64), -1)), r"layers\[0\].value.codes must be in .*signed"),
    "negative scale": (
        lambda: build(scale=one(-2)),
        r"layers\[0\].value.scale must not be negative, got -2.0: mirror that group's codes to 3 - code",
    ),
    "NaN": (lambda: build(offset=one(np.nan)), r"layers\[0\].value.offset must be finite in float16, got nan: such"),
    "inf": (lambda: build(scale=one(np.inf)), r"layers\[0\].value.scale must be finite in float16, got inf: such"),
    "overflow": (lambda: build(offset=one(1e5)), r"layers\[0\].value.offset must be finite .*100000.0: use float32"),
    "group": (
        lambda: build(scale=np.ones((1, 64, 1, 1))),
        r"layers\[0\].value.scale must have shape \[1, 64, 1, 2\], got \[1, 64, 1, 1\]: '.*' has groups of 32 channels",
    ),
    "token group": (
        lambda: build(key=tokens(FMT.key, scale=np.ones((1, 1, 1, 64)))),
        r"layers\[0\].key.scale must have shape \[1, 2, 1, 64\], .* has groups of 32 tokens",
    ),
    "tokens": (lambda: build(8, key=tokens(FMT.key, 48)), r"layers\[0\].key.codes must have a multiple of group=32"),
    "exact": (
        lambda: build(**EXACT),
        r"layers\[0\].value brings token 20 of row 0 exact, of 64, and .*quantized: .* recent_tokens=44 or more",
    ),
    "no mask": (lambda: build(exact=EXACT["exact"]), r"layers\[0\].value must have both exact and is_exact"),
    "no codes": (
        lambda: build(fmt=PLAIN, key=tokens(FMT.key, codes=None, **EXACT)),
        r"layers\[0\].key must have codes, scale and offset: 'k4t,v4t@1' has 4 bits there",
    ),
    "16 bits": (lambda: build(fmt=KVFormat.parse("k16,v4t")), r"layers\[0\].key must have exact tokens and no codes"),
    "layer": (lambda: convert.to_quantized(empty("k4t,v4t"), 2), r"layer must be in \[0, 2\), got 2"),
    "no page": (
        lambda: convert.to_quantized(dataclasses.replace(build(), page_table=jnp.full((1, 2), -1))),
        r"cache has a row whose page_table names no page",
    ),
    "kivi format": (lambda: convert.from_kivi(PLAIN, PAST), r"format must have keys per channel.*'k2c32,v2t32,rec"),
    "kivi sinks": (lambda: convert.from_kivi(KVFormat.parse("k2c32,v2t32,sink4"), PAST), r"format must have .*no sink"),
    "kivi items": (lambda: convert.from_kivi(FMT, PAST[:8]), r"past_key_value must be KIVI's tuple of 9, got 8 items"),
    "kivi group": (
        lambda: convert.from_kivi(KVFormat.parse("k2c64,v2t64"), PAST),
        r"past_key_value\[2\] must have shape \[2, 2, 64, 1\], got \[2, 2, 64, 2\]: the format has 2 bits in groups",
    ),
    "kivi bits": (lambda: convert.from_kivi(KVFormat.parse("k4c32,v2t32"), PAST), r"past_key_value\[2\] must have "),
    "kivi no scale": (
        lambda: convert.from_kivi(KVFormat.parse("k2c32,v2t32"), (*PAST[:2], None, *PAST[3:])),
        r"past_key_value\[2\] must have shape \[2, 2, 64, 2\], got \[\]",
    ),
    "kivi dtype": (
        lambda: convert.from_kivi(FMT, (PAST[0].astype(float), *PAST[1:])),
        r"past_key_value\[0\] must be int32 of rank 4, got float64",
    ),
    "kivi length": (
        lambda: convert.from_kivi(KVFormat.parse("k2c32,v2t32"), (*PAST[:8], 65)),
        r"past_key_value must have 65 keys, which its last item tells, got 64 \+ 0",
    ),
    "kivi nothing": (
        lambda: convert.from_kivi(FMT, (None,) * 8 + (0,)),
        r"past_key_value must have key codes or exact keys, got neither",
    ),
    "kivi ragged": (
        lambda: convert.to_kivi(empty("k2c32,v2t32", 2).advance(jnp.arange(2))),
        r"cache must have rows of one length for KIVI, got \[0, 1\]: convert rows apart",
    ),
    "kivi groups": (
        lambda: convert.to_kivi(empty("k2c32,v2t")),
        r"format must have key and value groups of one size for KIVI, got 'k2c32,v2t@1': to_quantized",
    ),
    "oscar format": (lambda: convert.from_oscar(FMT, OSCAR), r"format must have keys and values of 2 or 4 bits"),
    "oscar bits": (lambda: convert.from_oscar(KVFormat.parse("k2t32,v2t"), OSCAR), r"k_scales_zeros must have shape"),
    "oscar exact": (
        lambda: convert.to_oscar(empty("k2t,v2t,recent1")),
        r"format must keep no exact tokens for OSCAR's pool, got 'k2t,v2t,recent1@1': to_quantized returns them",
    ),
    "oscar indices": (
        lambda: convert.from_oscar(KVFormat.parse("k2t,v2t"), OSCAR._replace(kv_indices=np.array([0, 1, 3]))),
        r"kv_indices must be in \[0, 3\), the pool's slots, got 0 to 3",
    ),
    "oscar indptr": (
        lambda: convert.from_oscar(KVFormat.parse("k2t,v2t"), OSCAR._replace(kv_indptr=np.array([0, 4]))),
        r"kv_indptr must rise from 0 to at most 3, got \[0, 4\]",
    ),
    "oscar dtype": (
        lambda: convert.from_oscar(KVFormat.parse("k2t,v2t"), OSCAR._replace(k_buffer=np.zeros((3, 2, 16)))),
        r"k_buffer must be uint8 of rank 3, got float64",
    ),
    "qarray quant": (lambda: convert.from_qarray(Quant(16), None), r"quant must be a Quant of 2 or 4 bits, got Quant"),
    "qarray zero": (
        lambda: convert.from_qarray(FMT.key, QArray(np.zeros(2, np.int8), np.ones((1, 2)), np.ones(1))),
        r"zero_point must have shape \[1, 2\], got \[1\]: it has the shape of scale",
    ),
    "qarray 16 bits": (lambda: convert.to_qarray(empty("k16,v4t")), r"format must have 2 or 4 bits for a QArray"),
    "dump": (
        lambda: convert.from_numpy({"format": DUMP["format"]}),
        r"arrays must be what to_numpy returned, and lack",
    ),
    "dump format": (lambda: convert.from_numpy(DUMP, PLAIN), r"arrays hold format 'k4c32,v4t@1', not 'k4t,v4t@1'"),
    "dump version": (lambda: convert.from_numpy({**DUMP, "format": "k4c32,v4t@0"}), r"format .* has layout version 0"),
    "dump of other bits": (
        lambda: convert.from_numpy({**DUMP, "format": "k2c32,v4t"}),
        r"arrays\['key.codes'\] must be uint8 .* for 'k2c32,v4t@1', got uint8",
    ),
    "dump array": (
        lambda: convert.from_numpy({k: v for k, v in DUMP.items() if k != "exact_key"}),
        r"arrays\['exact_key'\] must be uint16 .*, got nothing",
    ),
    "dump rank": (lambda: convert.from_numpy({**DUMP, "page_table": np.zeros(3)}), r"arrays must have key.codes of "),
}


@pytest.mark.parametrize("name", CASES)
def test_misuse(name):
    """One sentence names the argument, what it got, and what would do."""
    call, message = CASES[name]
    with pytest.raises(ValueError, match=f"^{message}") as info:
        call()
    assert "\n" not in info.value.args[0]


def test_codes_must_be_integers():
    """Not floats that happen to be whole."""
    with pytest.raises(TypeError, match=r"^layers\[0\].value.codes must be integers, one a byte, got float64"):
        build(codes=np.zeros((1, 64, 1, 64)))


def test_a_lost_row():
    """A cache that lost tokens is not converted."""
    with pytest.raises(OverflowError, match="lost tokens"):
        convert.to_quantized(dataclasses.replace(build(), overflowed=jnp.ones(1, bool)))


def test_what_no_token_uses_is_not_looked_at():
    """Codes, parameters and exact tokens past a row's length may be anything."""
    poison = {"codes": np.full((1, 64, 1, 64), 200), "scale": one(-np.inf), "offset": one(np.nan)}
    cache = build(0, **poison)
    assert not np.asarray(values(cache, 0)).any()
