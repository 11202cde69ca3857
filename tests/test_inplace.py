"""The jitted decode step is our call and nothing else large: no copy of the cache, no callback, one compilation."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from support import KERNELS, on, queries

from jax_foscar import KVCache, KVFormat, decode_attention, native
from jax_foscar.primitive import workspace_bytes

WRITE_TARGET, TARGET = "jax_foscar_write_v1", "jax_foscar_decode_attention_v1"
LAYERS, BATCH, CAPACITY, HEADS, DIM = 4, 2, 16384, 2, 64
FORMATS = ["k4t64,v4t64", "k2c64,v4c32,sink4,recent20"]
formats = pytest.mark.parametrize("text", FORMATS)


def step(cache, x, implementation=None):
    """A toy decoder: a scan over layers whose carry is the cache. x ``[B, 1, 4, D]``."""

    def block(carry, weight):
        x, cache, i = carry
        k = x[:, :, :HEADS] * weight
        cache = cache.write(k, -k, layer=i)
        return (x + decode_attention(x, cache, layer=i, implementation=implementation), cache, i + 1), None

    (x, cache, _), _ = jax.lax.scan(block, (x, cache.advance(1), 0), jnp.arange(1.0, LAYERS + 1))
    return cache, x / 2


def operands(text):
    sizes = {"batch": BATCH, "max_length": CAPACITY, "num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": DIM}
    cache = KVCache.create(KVFormat.parse(text), **sizes)
    return cache, queries((BATCH, 1, 4, DIM))


@formats
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_step_holds_our_calls(platform, text):
    """Lowered for either platform, with or without its device here: the same targets, each once, no host callback."""
    if platform == "cpu" and "cpu" not in KERNELS:
        pytest.fail("the cpu module was not built")
    with on("cpu"):
        lowered = jax.jit(step).trace(*operands(text)).lower(lowering_platforms=(platform,)).as_text()
    assert re.findall(r"custom_call @(\w+)", lowered) == [WRITE_TARGET, TARGET]
    assert "callback" not in lowered


def test_platforms_without_a_kernel_take_plain_jnp():
    """A program for a TPU holds no custom call of ours; the same program for all platforms holds both."""
    with on("cpu"):
        traced = jax.jit(step).trace(*operands(FORMATS[0]))
        assert "custom_call" not in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_xla_is_plain_jnp():
    with on("cpu"):
        traced = jax.jit(functools.partial(step, implementation="xla")).trace(*operands(FORMATS[0]))
        assert TARGET not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("kernel", KERNELS)
@formats
def test_one_compilation_over_200_tokens(text, kernel):
    """Lengths, positions and layers are values: the step is traced and compiled once."""
    traces = []

    def counted(cache, x):
        traces.append(x.shape)
        return step(cache, x)

    with on(kernel):
        cache, x = operands(text)
        f = jax.jit(counted, donate_argnums=0)
        for _ in range(200):
            cache, x = f(cache, x)
        assert len(traces) == 1
        assert f._cache_size() == 1
        assert cache.length.tolist() == [200] * BATCH
        cache.check()
        assert bool(jnp.isfinite(x).all())


OPS = "copy|copy-start|select|slice|dynamic-slice|concatenate|pad|transpose|convert|broadcast"
LARGE = re.compile(rf"= \(?(\w+)\[([\d,]*)\][^ ]* ({OPS})\(")
WIDTH = {"pred": 1, "u8": 1, "s8": 1, "f16": 2, "bf16": 2, "f32": 4, "s32": 4, "u32": 4}


def pointers(cache):
    """Where the large arrays lie: codes, params and exact tokens."""
    large = (cache.key, cache.value, cache.exact_key, cache.exact_value)
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(large)]


def scratch(kernel, x, cache):
    """What a kernel needs of memory whatever the cache's size: on CUDA, its workspace."""
    heads = cache.num_kv_heads
    return workspace_bytes(x.shape[0], 1, x.shape[-2], heads, cache.value_head_dim) if kernel == "cuda" else 0


@pytest.mark.parametrize("kernel", KERNELS)
@formats
def test_the_donated_cache_is_not_copied(text, kernel):
    """Nothing like a copy yields as much as a layer's codes or all exact tokens; memory is small; buffers stay put."""
    with on(kernel):
        cache, x = operands(text)
        layer = min(cache.key.codes.nbytes, cache.value.codes.nbytes) // LAYERS
        smallest = layer if cache.exact_key is None else min(layer, cache.exact_key.nbytes)
        compiled = jax.jit(step, donate_argnums=0).lower(cache, x).compile()
        copied = []
        for dtype, shape, op in LARGE.findall(compiled.as_text()):
            size = WIDTH.get(dtype, 4)
            for extent in filter(None, shape.split(",")):
                size *= int(extent)
            if size >= smallest:
                copied.append((op, dtype, shape))
        assert not copied
        memory = compiled.memory_analysis()
        if memory is not None:
            assert memory.temp_size_in_bytes < layer + scratch(kernel, x, cache)
            assert memory.alias_size_in_bytes > 0.99 * cache.nbytes
        before = pointers(cache)
        assert len(before) == (4 if text == FORMATS[0] else 6)
        new = cache
        for _ in range(3):
            new, x = compiled(new, x)
        assert pointers(new) == before
        assert all(a.is_deleted() for a in jax.tree.leaves(cache.key))


ROW_METHODS = {
    "rollback": lambda cache, row: cache.rollback(1),
    "reset_row": lambda cache, row: cache.reset_row(row, jnp.arange(3), 0),
    "copy_row": lambda cache, row: cache.copy_row(row, 1 - row),
}


@pytest.mark.parametrize("name", ROW_METHODS)
@formats
def test_rows_change_in_place(text, name):
    """Donated, no page or exact token moves; a copied row is read page by page."""
    cache, _ = operands(text)
    compiled = jax.jit(ROW_METHODS[name], donate_argnums=0).lower(cache, jnp.int32(0)).compile()
    memory = compiled.memory_analysis()
    if memory is not None:
        page = cache.key.codes.nbytes // cache.key.codes.shape[2]
        exact = 0 if cache.exact_key is None else cache.exact_key.nbytes
        assert memory.temp_size_in_bytes < (2**16 if name != "copy_row" else 2**16 + 8 * page + 2 * exact)
        assert memory.alias_size_in_bytes > 0.99 * cache.nbytes
    before = pointers(cache)
    assert pointers(compiled(cache, jnp.int32(0))) == before


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_alone_needs_no_memory_like_the_cache(kernel):
    """The kernel reads packed bytes: its program holds less than a tenth of the dequantized cache."""
    with on(kernel):
        cache, x = operands(FORMATS[0])
        compiled = jax.jit(lambda x, c: decode_attention(x, c, layer=1)).lower(x, cache).compile()
        dequantized = 2 * BATCH * CAPACITY * HEADS * DIM * 4
        assert compiled.memory_analysis().temp_size_in_bytes < dequantized / 10 + scratch(kernel, x, cache)


def test_scratch_memory_is_what_the_kernels_need():
    """primitive.py's formula is workspace.h's."""
    module = native.module("cuda")
    if module is None:
        pytest.skip("the CUDA module is not built here")
    cases = itertools.product((1, 5, 128), (1, 2, 9), (1, 4, 7), (1, 8), (64, 128, 256))
    for batch, num_queries, ratio, kv_heads, dim in cases:
        sizes = batch, num_queries, ratio * kv_heads, kv_heads, dim
        assert workspace_bytes(*sizes) == module.workspace_bytes(*sizes)


def test_attention_first_would_copy():
    """The check above notices: attend-then-write, which the documentation warns of, copies the pools."""

    def wrong(cache, x):
        def block(carry, weight):
            x, cache, i = carry
            out = decode_attention(x, cache, layer=i)
            k = x[:, :, :HEADS] * weight
            return (x + out, cache.write(k, -k, layer=i), i + 1), None

        (x, cache, _), _ = jax.lax.scan(block, (x, cache.advance(1), 0), jnp.arange(1.0, LAYERS + 1))
        return cache, x

    with on("cpu"):
        cache, x = operands(FORMATS[0])
        compiled = jax.jit(wrong, donate_argnums=0).lower(cache, x).compile()
        assert compiled.memory_analysis().temp_size_in_bytes > cache.key.codes.nbytes
