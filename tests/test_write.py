"""``write``: every implementation leaves the same bytes, those that the rule says, and nothing else changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from support import KERNELS, device_of, on

from jax_foscar import KVCache, KVFormat, Quant

CAPACITY, LAYERS = 256, 2
kernels = pytest.mark.parametrize("kernel", KERNELS)


@functools.partial(jax.jit, static_argnames="implementation")
def step(cache, counts, k, v, layer, implementation):
    return cache.advance(counts).write(k, v, layer=layer, implementation=implementation)


def write_both(kernel, cache, counts, k, v, layer=1):
    """The cache after one step of the kernel, which plain jnp on the CPU must equal to the bit."""
    results = []
    for implementation, device in ((kernel, device_of(kernel)), ("xla", jax.devices("cpu")[0])):
        operands = jax.device_put((cache, np.asarray(counts, np.int32), k, v, np.int32(layer)), device)
        results.append(step(*operands, implementation=implementation))
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(results[0]), jax.tree.leaves(results[1]), strict=True
    ):
        try:
            support.assert_same_bits(ours, theirs)
        except AssertionError as error:
            raise AssertionError(f"{jax.tree_util.keystr(path)} {error}") from None
    return results[0]


def tokens(shape, dtype, seed, padding=0):
    """Normal tokens with a mean a channel; ``padding`` more are NaN. Among them are what a quantizer may trip over."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * rng.uniform(0.3, 1.5, shape[-1]) + rng.normal(0, 0.5, shape[-1])).astype("f4")
    rare = rng.integers(0, 2000, shape)
    for value, kind in enumerate((0.0, -0.0, 1e5, -7e4, 1e-7, np.inf, -np.inf, np.nan)):
        x[rare == value] = kind
    if dtype == "float16":  # a NaN becomes a bfloat16 of other bits on a GPU, by XLA and by the instruction alike
        x[np.isnan(x)] = np.inf
    x[:, ::7, 0] = np.round(x[:, ::7, 0])  # many equal distances from the minimum: ties
    x[:, 3::11, 0, :32] = 0.25  # constant groups
    x = np.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)), constant_values=np.nan)
    with np.errstate(over="ignore"):  # 1e5 is inf in float16
        return jnp.asarray(x.astype(jnp.dtype(dtype)))


def scribbled(cache, seed=0):
    """The cache with random bytes in all large arrays, so that one that should stay shows when it does not.

    No exact token is NaN: JAX 0.10 on the CPU gives a NaN other bits where it moves bfloat16.
    """
    rng = np.random.default_rng(seed)

    def scribble(x):
        if x.ndim < 4:
            return x
        junk = rng.integers(0, 256, (*x.shape, x.dtype.itemsize), np.uint8)
        if x.dtype == jnp.bfloat16:
            junk[..., 1] &= 0xBF  # the largest bit of the exponent
        return jnp.asarray(junk.view(x.dtype)[..., 0])

    return jax.tree.map(scribble, cache)


CASES = support.pairwise(
    {
        "key": support.QUANTS,
        "value": support.QUANTS,
        "dims": [(64, 64), (128, 128), (80, 96), (192, 128), (256, 64), (96, 80)],
        "dtype": support.DTYPES,
        "options": [{}, {"sink_tokens": 4}, {"recent_tokens": 20}, {"sink_tokens": 40, "recent_tokens": 130},
                    {"max_new": 1}, {"page_size": 128, "sink_tokens": 5, "recent_tokens": 1}],
        "param_dtype": ["float16", "float32"],
    },
    allowed=lambda case: all(
        quant.per == "channel" or dim % quant.group_size(dim) == 0
        for quant, dim in zip((case["key"], case["value"]), case["dims"], strict=True)
    ),
    strength=1,
)  # fmt: skip
# The pairs of directions and groups that move the ring in ways of their own.
CASES += [
    {"key": Quant(4, "channel", key), "value": Quant(2, "channel", value), "dims": (128, 64), "dtype": dtype,
     "options": options, "param_dtype": "float16"}
    for key, value, dtype, options in (
        (32, 64, "bfloat16", {"max_new": 1}), (64, 32, "float32", {"sink_tokens": 33, "recent_tokens": 63}),
        (32, 32, "float16", {"max_new": 1, "recent_tokens": 1}),
    )
]  # fmt: skip

# What the CUDA kernel quantizes by whole tiles, in head dims of odd numbers of blocks and with several groups a block.
CASES += [
    {"key": Quant(*key), "value": Quant(*value), "dims": dims, "dtype": "bfloat16", "options": options,
     "param_dtype": "float16"}
    for key, value, dims, options in (
        ((4, "token"), (4, "token"), (192, 96), {}),
        ((4, "token", 32), (2, "token", 64), (96, 192), {"sink_tokens": 4}),
        ((2, "token", 32), (4, "token", 32), (192, 96), {}),
        ((2, "token"), (2, "token"), (256, 64), {"recent_tokens": 20}),
        ((4, "channel", 32), (4, "token"), (96, 256), {"max_new": 1}),
        ((2, "channel", 64), (4, "channel", 64), (192, 96), {"max_new": 1, "recent_tokens": 1}),
    )
]  # fmt: skip


@kernels
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['key']},{c['value']},{c['dims'][0]},{c['dtype']}")
def test_bytes(case, kernel):
    """Bulk, single and ragged steps, counts of 0, more tokens than the ring holds, rows that overflow."""
    fmt = KVFormat(case["key"], case["value"], param_dtype=case["param_dtype"], **case["options"])
    (dim, value_dim), heads = case["dims"], 2
    sizes = {"batch": 4, "max_length": CAPACITY, "num_layers": LAYERS, "num_kv_heads": heads}
    with on(kernel):
        cache = KVCache.create(fmt, **sizes, head_dim=dim, value_head_dim=value_dim)
        if 80 not in case["dims"]:  # padding is 0, and plain jnp makes it so
            cache = scribbled(cache)
        steps = [([70, 0, 31, 33], 140), (1, 1), ([1, 0, 1, 1], 1), ([3, 2, 0, 3], 3), (1, 1)]
        steps += [([0, 140, 139, 64], 140), ([3, 2, 3, 2], 3), ([140, 0, 100, 120], 140), ([1, 1, 1, 0], 1)]
        for i, (counts, width) in enumerate(steps):
            counts = np.broadcast_to(counts, 4)
            given, padding = counts.max(), width - counts.max()
            k, v = (
                tokens((4, given, heads, d), case["dtype"], seed, padding)
                for d, seed in ((dim, 2 * i), (value_dim, 2 * i + 1))
            )
            cache = write_both(kernel, cache, counts, k, v, layer=i % 4 != 1)
        assert np.asarray(cache.overflowed).any()


@kernels
@pytest.mark.parametrize("text", ["k4c64,v4t64", "k4t32,v2t", "k2c32,v2c32,sink4,recent20,new1"])
def test_long_prefill(text, kernel):
    """Thousands of tokens at once, many times the ring, onto older ones that the ring still holds."""
    with on(kernel):
        cache = KVCache.create(
            KVFormat.parse(text), batch=2, max_length=2560, num_layers=1, num_kv_heads=2, head_dim=64
        )
        for i, (counts, width) in enumerate([([40, 7], 40), ([2100, 1033], 2100), ([3, 1], 3)]):
            k, v = (tokens((2, width, 2, 64), "bfloat16", seed) for seed in (2 * i, 2 * i + 1))
            cache = write_both(kernel, cache, counts, k, v, layer=0)


@kernels
@pytest.mark.parametrize("text", ["k4t,v4t", "k4c32,v2c64,sink4"])
def test_what_cannot_be_written(text, kernel):
    """Page ids, layers and counts out of range: dropped, flagged for good, and nobody else's page is touched."""
    with on(kernel):
        cache = KVCache.create(
            KVFormat.parse(text), batch=4, max_length=CAPACITY, num_layers=LAYERS, num_kv_heads=2, head_dim=64
        )
        table = np.array([[0, 1, -1, 2**31 - 1], [0, -1, 2, 3], [-(2**31), 4, 2, 3], [3, 5, 2, 0]], np.int32)
        cache = scribbled(dataclasses.replace(cache, page_table=jnp.asarray(table)))
        k, v = (tokens((4, 70, 2, 64), "float32", seed) for seed in (0, 1))
        cache = write_both(kernel, cache, [70, 64, 64, 64], k, v)
        np.testing.assert_array_equal(cache.overflowed, [False, False, True, False])
        cache = write_both(kernel, cache, [50, 70, 0, 70], k, v)
        np.testing.assert_array_equal(cache.overflowed, [False, True, True, True])
        for layer in (-1, LAYERS, 2**31 - 1, -(2**31)):
            fresh = dataclasses.replace(cache, overflowed=jnp.zeros(4, bool))
            after = write_both(kernel, fresh, [1, 0, 70, 1], k, v, layer=layer)
            np.testing.assert_array_equal(after.overflowed, [True, False, True, True])
            support.assert_same_bits(
                (after.key, after.value, after.exact_key), (cache.key, cache.value, cache.exact_key)
            )
        after = write_both(kernel, cache, [71, 2**31 - 200, 70, 0], k, v)
        np.testing.assert_array_equal(after.overflowed, [True, True, True, True])
        wrapped = dataclasses.replace(cache, length=jnp.asarray([2**31 - 1, 3, -5, 0], jnp.int32))
        write_both(kernel, wrapped, [1, 0, 6, 2], k, v)


@kernels
@pytest.mark.parametrize("pools", [1, 2, 4])
def test_pools(pools, kernel):
    """Rows write to pages of their own pool, in any order of the table."""
    with on(kernel):
        rows = support.random_rows((70, 0, 33, 64), heads=2, dim=64, layers=LAYERS)
        cache = support.make_cache(KVFormat.parse("k4c32,v4t"), rows, capacity=CAPACITY, pools=pools)
        k, v = (tokens((4, 90, 2, 64), "float32", seed) for seed in (0, 1))
        cache = write_both(kernel, cache, [90, 31, 0, 64], k, v)
        write_both(kernel, cache, [1, 1, 1, 0], k[:, :1], v[:, :1], layer=0)


@kernels
def test_nested_vmap_is_one_call(kernel):
    """Pools, tables, positions, layers and tokens of their own on every mapped axis; plain jnp agrees."""
    with on(kernel):
        rows = [support.random_rows((70, 5), heads=2, dim=64, layers=3, seed=seed) for seed in range(4)]
        caches = [support.make_cache(KVFormat.parse("k4c32,v4t,sink4"), r, capacity=128, pools=1) for r in rows]
        stack = jax.tree.map(lambda *x: jnp.stack(x).reshape(2, 2, *x[0].shape), *caches)
        k, v = (tokens((4 * 2, 40, 2, 64), "float32", seed).reshape(2, 2, 2, 40, 2, 64) for seed in (0, 1))
        layers = jnp.asarray([[0, 1], [2, 3]])

        def one(cache, k, v, layer, implementation):
            return cache.advance(jnp.asarray([40, 33])).write(k, v, layer=layer, implementation=implementation)

        def nested(implementation):
            f = functools.partial(one, implementation=implementation)
            return jax.jit(jax.vmap(jax.vmap(f, in_axes=(0, 0, 0, 0)), in_axes=(0, 0, 0, 0)))

        text = nested(None).lower(stack, k, v, layers).as_text()
        assert text.count("custom_call @jax_foscar_write_v1") == 1
        support.assert_same_bits(
            nested(kernel)(stack, k, v, layers),
            nested("xla")(*jax.device_put((stack, k, v, layers), jax.devices("cpu")[0])),
        )
