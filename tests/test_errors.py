"""Misuse is answered by one sentence that names the argument and, where there is one, the remedy."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support import KERNELS

from jax_foscar import KVCache, KVFormat, Quant, decode_attention, merge_states, native
from jax_foscar.primitive import TARGET

FMT = KVFormat.parse("k4t32,v4t32")


def create(fmt=FMT, **options):
    sizes = {"batch": 2, "max_length": 64, "num_layers": 2, "num_kv_heads": 2, "head_dim": 64} | options
    return KVCache.create(fmt, **sizes)


def create_paged(fmt=FMT, **options):
    sizes = {
        "num_pages": 4,
        "batch": 2,
        "max_length": 128,
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 64,
    } | options
    return KVCache.create_paged(fmt, **sizes)


CACHE, PAGED = create(), create_paged()
EXACT = create_paged(KVFormat.parse("k4c32,v4t,recent1,new4"))
Q, K = jnp.zeros((2, 4, 64)), jnp.zeros((2, 1, 2, 64))


def attend(q=Q, cache=CACHE, **options):
    return decode_attention(q, cache, **options)


def write(k=K, v=K, cache=CACHE, layer=0, **options):
    return cache.advance(1).write(k, v, layer=layer, **options)


def vmapped_write():
    jax.vmap(lambda k: write(k=k))(jnp.zeros((3, *K.shape)))


STACKED = jax.tree.map(lambda x: x[None], CACHE)

CASES = {
    # decode_attention
    "cache": (lambda: attend(cache=CACHE.key), TypeError, r"cache must be a KVCache, got Pages"),
    "stacked cache": (lambda: attend(cache=STACKED), ValueError, r"cache must hold codes of rank 6.*jax\.vmap"),
    "q dtype": (
        lambda: attend(Q.astype(jnp.int32)),
        TypeError,
        r"q must be an array of float32, bfloat16, float16, got int32",
    ),
    "q float8": (
        lambda: attend(Q.astype(jnp.float8_e4m3fn)),
        TypeError,
        r"q must be an array of .*, got float8_e4m3fn",
    ),
    "q list": (lambda: attend([1.0]), TypeError, r"q must be an array of .*, got list"),
    "q rank": (lambda: attend(Q[0]), ValueError, r"q must have shape \[2, N, 64\] or \[2, T, N, 64\], got \[4, 64\]"),
    "q batch": (lambda: attend(jnp.zeros((3, 4, 64))), ValueError, r"q must have shape .*, got \[3, 4, 64\]"),
    "q dim": (lambda: attend(Q[..., :32]), ValueError, r"q must have shape .*, got \[2, 4, 32\]"),
    "q heads": (
        lambda: attend(Q[:, :3]),
        ValueError,
        r"q has 3 heads, which must be a multiple of the cache's 2 KV heads",
    ),
    "no heads": (lambda: attend(Q[:, :0]), ValueError, r"q has 0 heads, which must be a multiple"),
    "scale": (
        lambda: attend(scale=jnp.float32(1)),
        TypeError,
        r"scale must be a finite Python number \(multiply q by a tr",
    ),
    "scale nan": (lambda: attend(scale=float("nan")), TypeError, r"scale must be a finite Python number"),
    "implementation": (
        lambda: attend(implementation="triton"),
        ValueError,
        r"implementation must be None, 'cuda', 'cpu' or 'xla', got 'triton'",
    ),
    "layer": (lambda: attend(layer=2), ValueError, r"layer must be in \[0, 2\), got 2"),
    "negative layer": (lambda: attend(layer=-1), ValueError, r"layer must be in \[0, 2\), got -1"),
    "layer type": (lambda: attend(layer=1.0), TypeError, r"layer must be an int or an integer scalar, got 1.0"),
    "layer shape": (lambda: attend(layer=jnp.zeros(2, int)), TypeError, r"layer must be an int or an integer scalar"),
    "is_causal": (
        lambda: attend(is_causal=jnp.bool_(True)),
        TypeError,
        r"is_causal must be True or False, not traced, got ",
    ),
    "window": (
        lambda: attend(local_window_size=(1, 2, 3)),
        ValueError,
        r"local_window_size must be an int or a pair \(left, right\), got \(1, 2, 3\)",
    ),
    "window type": (lambda: attend(local_window_size=2.5), TypeError, r"local_window_size must be an int, got 2.5"),
    "window side": (
        lambda: attend(local_window_size=(None, 0)),
        TypeError,
        r"local_window_size must be an int, got None",
    ),
    "negative window": (
        lambda: attend(local_window_size=(-1, 0)),
        ValueError,
        r"local_window_size must be at least 0, got -1",
    ),
    "soft cap": (
        lambda: attend(logits_soft_cap=jnp.float32(30)),
        TypeError,
        r"logits_soft_cap must be None or a Python number, not traced, got ",
    ),
    "soft cap zero": (
        lambda: attend(logits_soft_cap=0),
        ValueError,
        r"logits_soft_cap must be finite and above 0 \(None is no cap\), got 0",
    ),
    "soft cap nan": (
        lambda: attend(logits_soft_cap=float("nan")),
        ValueError,
        r"logits_soft_cap must be finite and above 0 .*, got nan",
    ),
    "soft cap tiny": (
        lambda: attend(logits_soft_cap=1e-60),
        ValueError,
        r"logits_soft_cap must be finite and above 0 .*, got 1e-60",
    ),
    "sinks dtype": (
        lambda: attend(sinks=jnp.zeros(4, int)),
        TypeError,
        r"sinks must be an array of float32, bfloat16, float16, got int32",
    ),
    "sinks list": (lambda: attend(sinks=[0.0] * 4), TypeError, r"sinks must be an array of .*, got list"),
    "sinks shape": (lambda: attend(sinks=jnp.zeros((2, 4))), ValueError, r"sinks must have shape \[4\], got \[2, 4\]"),
    "query_lengths dtype": (
        lambda: attend(query_lengths=jnp.ones(2)),
        TypeError,
        r"query_lengths must be an array of integer, got float32",
    ),
    "query_lengths shape": (
        lambda: attend(query_lengths=jnp.ones(3, int)),
        ValueError,
        r"query_lengths must have shape \[2\], got \[3\]",
    ),
    "tree_mask dtype": (
        lambda: attend(tree_mask=jnp.ones((1, 1))),
        TypeError,
        r"tree_mask must be an array of bool, got float32",
    ),
    "tree_mask shape": (
        lambda: attend(tree_mask=jnp.ones((4, 1, 1), bool)),
        ValueError,
        r"tree_mask must have shape \[1, 1\] or \[2, 1, 1\], got \[4, 1, 1\]",
    ),
    "tree_mask without causality": (
        lambda: attend(tree_mask=jnp.ones((1, 1), bool), is_causal=False),
        ValueError,
        r"tree_mask replaces the causal rule among the drafts: leave is_causal=True, got False",
    ),
    # write, append, advance
    "k dtype": (
        lambda: write(K.astype(jnp.int8)),
        TypeError,
        r"k must be an array of float32, bfloat16, float16, got int8",
    ),
    "v dtype": (lambda: write(v=[1]), TypeError, r"v must be an array of"),
    "k shape": (lambda: write(K[..., :32]), ValueError, r"k must have shape \[2, T, 2, 64\], got \[2, 1, 2, 32\]"),
    "v heads": (lambda: write(v=K[:, :, :1]), ValueError, r"v must have shape \[2, T, 2, 64\], got \[2, 1, 1, 64\]"),
    "k rank": (lambda: write(K[:, 0]), ValueError, r"k must have shape \[2, T, 2, 64\], got \[2, 2, 64\]"),
    "tokens": (
        lambda: write(v=jnp.zeros((2, 3, 2, 64))),
        ValueError,
        r"k and v must bring the same tokens, got T=1 and T=3",
    ),
    "write implementation": (
        lambda: write(implementation="tpu"),
        ValueError,
        r"implementation must be None, 'cuda', 'cpu' or 'xla', got 'tpu'",
    ),
    "write layer": (lambda: write(layer=5), ValueError, r"layer must be in \[0, 2\), got 5"),
    "append": (
        lambda: CACHE.append(K, K),
        ValueError,
        r"append serves .* one layer.*num_layers=2: call advance once a step, then w",
    ),
    "append k": (
        lambda: create(num_layers=1).append(Q, Q),
        ValueError,
        r"k must have shape \[B, T, K, D\], got \(2, 4, 64\)",
    ),
    "mapped k": (
        vmapped_write,
        ValueError,
        r"write: k, v or the positions are mapped by vmap, but the cache is not.*in_axes=0",
    ),
    "count": (lambda: CACHE.advance(-1), ValueError, r"count must be at least 0, got -1"),
    "count dtype": (
        lambda: CACHE.advance(jnp.zeros(2)),
        TypeError,
        r"count must be an int or an int array, got dtype float32",
    ),
    "count shape": (
        lambda: CACHE.advance(jnp.zeros(3, int)),
        ValueError,
        r"count must be a scalar or have shape \(2,\), got \(3,\)",
    ),
    "positions": (lambda: CACHE.positions(1.5), TypeError, r"num_tokens must be an int, got 1.5"),
    "dequantize layer": (lambda: CACHE.dequantize(2), ValueError, r"layer must be in \[0, 2\), got 2"),
    # create
    "format": (
        lambda: create("k4t,v4t"),
        TypeError,
        r"format must be a KVFormat \(KVFormat\.parse reads a string\), got 'k4t",
    ),
    "head_dim": (
        lambda: create(head_dim=72),
        ValueError,
        r"head_dim must be one of \(64, 80, 96, 128, 192, 256\), got 72",
    ),
    "value_head_dim": (lambda: create(value_head_dim=512), ValueError, r"value_head_dim must be one of .*, got 512"),
    "group": (
        lambda: create(KVFormat(Quant(4, "token", 64), Quant(4)), head_dim=96),
        ValueError,
        r"group=64 must divide head_dim=96; group=None takes the whole head as one group",
    ),
    "value group": (
        lambda: create(KVFormat(Quant(4), Quant(4, "token", 128)), value_head_dim=192),
        ValueError,
        r"group=128 must divide value_head_dim=192",
    ),
    "batch": (lambda: create(batch=0), ValueError, r"batch must be at least 1, got 0"),
    "max_length": (
        lambda: create(max_length=2**31),
        ValueError,
        r"max_length must be below 2\*\*31 tokens, got 2147483648",
    ),
    "num_layers": (lambda: create(num_layers=1.0), TypeError, r"num_layers must be an int, got 1.0"),
    "num_kv_heads": (lambda: create(num_kv_heads=0), ValueError, r"num_kv_heads must be at least 1, got 0"),
    # create_paged
    "num_pages": (lambda: create_paged(num_pages=0), ValueError, r"num_pages must be at least 1, got 0"),
    "num_pools": (lambda: create_paged(num_pools=1.0), TypeError, r"num_pools must be an int, got 1.0"),
    "pools": (
        lambda: create_paged(num_pools=3, batch=4),
        ValueError,
        r"batch must be a multiple of num_pools=3, got 4: pools serve rows evenly",
    ),
    "paged format": (lambda: create_paged("k4t,v4t"), TypeError, r"format must be a KVFormat"),
    # rollback, reset_row, copy_row
    "rollback": (lambda: PAGED.rollback(-1), ValueError, r"count must be at least 0, got -1"),
    "rollback dtype": (
        lambda: PAGED.rollback(jnp.ones(2)),
        TypeError,
        r"count must be an int or an int array, got dtype float32",
    ),
    "rollback shape": (
        lambda: PAGED.rollback(jnp.ones(3, int)),
        ValueError,
        r"count must be a scalar or have shape \(2,\), got \(3,\)",
    ),
    "rollback past max_new": (
        lambda: EXACT.rollback(5),
        ValueError,
        r"count must be at most format.max_new=4, got 5: older exact tokens are gone, so create .* larger",
    ),
    "stacked rollback": (lambda: STACKED.rollback(1), ValueError, r"cache must hold codes of rank 6.*jax\.vmap"),
    "row": (lambda: PAGED.reset_row(2), ValueError, r"row must be in \[0, 2\), got 2"),
    "row type": (lambda: PAGED.reset_row(jnp.zeros(1, int)), TypeError, r"row must be an int or an integer scalar"),
    "length": (lambda: PAGED.reset_row(0, length=129), ValueError, r"length must be in \[0, 129\), got 129"),
    "exact length": (
        lambda: EXACT.reset_row(0, [1, 2], length=64),
        ValueError,
        r"length=64 tokens include exact ones under 'k4c32,v4t,recent1,new4@1', which pages do not hold: .*copy_row",
    ),
    "page_ids": (lambda: PAGED.reset_row(0, [0.5]), TypeError, r"page_ids must be ints, got dtype float32"),
    "too many page_ids": (
        lambda: PAGED.reset_row(0, [0, 1, 2]),
        ValueError,
        r"page_ids must have shape \[m\], m at most the page table's 2, got \[3\]",
    ),
    "page_ids rank": (
        lambda: PAGED.copy_row(0, 1, [[0]]),
        ValueError,
        r"page_ids must have shape \[m\], .*, got \[1, 1\]",
    ),
    "src": (lambda: PAGED.copy_row(-1, 0), ValueError, r"src must be in \[0, 2\), got -1"),
    "dst": (lambda: PAGED.copy_row(0, 1.0), TypeError, r"dst must be an int or an integer scalar, got 1.0"),
    "full_pages": (lambda: FMT.full_pages(-1), ValueError, r"length must be at least 0, got -1"),
    # merge_states
    "no states": (lambda: merge_states([]), ValueError, r"states must hold at least one \(out, lse\) pair, got none"),
    "states": (
        lambda: merge_states([(Q, Q[..., 0]), (Q, Q)]),
        ValueError,
        r"states\[1\] must have shapes \(2, 4, 64\) and \(2, 4\), got \(2, 4, 64\) and \(2, 4, 64\)",
    ),
    # derivatives
    "grad": (
        lambda: jax.grad(lambda q: attend(q).sum())(Q),
        NotImplementedError,
        r"decode_attention has no gradient.*dot_product_attention.*stop_gradient",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_sentence_names_argument_and_remedy(name):
    call, error, message = CASES[name]
    with pytest.raises(error, match=f"^{message}") as info:
        call()
    assert "\n" not in info.value.args[0]


@pytest.mark.parametrize("name", ["cuda", "cpu"])
def test_a_module_that_was_not_built(name, monkeypatch):
    """Asked for by name, it is refused at once, never replaced by something else; "xla" still works."""
    monkeypatch.setattr(native, "module", lambda platform: None)
    with pytest.raises(
        ValueError, match=rf"^implementation='{name}', but .* built without its {name} module: reinstall"
    ):
        attend(implementation=name)
    assert attend(implementation="xla").shape == Q.shape


def test_the_default_needs_the_platforms_module(monkeypatch):
    """Left to choose, a program for a platform whose module is absent does not compile, and says what helps."""
    monkeypatch.setattr(native, "module", lambda platform: None)
    message = r"^this jax_foscar was built without its (cpu|cuda) module: .*reinstall.*, or pass implementation='xla'"
    with pytest.raises(RuntimeError, match=message):
        jax.jit(lambda q: attend(q, scale=0.123))(Q)
    with pytest.raises(RuntimeError, match=message):
        jax.jit(lambda k: write(k=k))(K)
    assert not jax.jit(lambda k: write(k=k, implementation="xla"))(K).overflowed.any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_of_another_platform(kernel, monkeypatch):
    """An explicit name never falls back: compiled for another platform, it is refused."""
    other = {"cpu": "cuda", "cuda": "cpu"}[kernel]
    monkeypatch.setattr(native, "module", lambda platform: object())
    with pytest.raises(
        ValueError, match=rf"^implementation='{other}' was asked for, but .* compiled for {kernel}: leave"
    ):
        jax.jit(lambda q: attend(q, implementation=other)).trace(Q).lower(lowering_platforms=(kernel,))
    with pytest.raises(ValueError, match=rf"^implementation='{kernel}' cannot run on tpu: leave implementation out"):
        jax.jit(lambda q: attend(q, implementation=kernel)).trace(Q).lower(lowering_platforms=("tpu",))


class FakeModule:
    """A compiled module of another FFI version, which must not get to register anything."""

    def __init__(self, version):
        self.ffi_api_version = version

    def registrations(self):
        pytest.fail("registered before the version was checked")


@pytest.mark.parametrize("version", [(0, 99), (1, 0)])
def test_a_module_for_a_newer_runtime(version, monkeypatch):
    """It is refused at import, before anything is registered: a failed registration would disable all of JAX."""
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(native.importlib, "import_module", lambda name: FakeModule(version))
    native_module = native.module.__wrapped__
    message = (
        rf"^jax_foscar\._cpu was built for XLA FFI API {version[0]}\.{version[1]}, but jaxlib .* install a newer jaxlib"
    )
    with pytest.raises(ImportError, match=message):
        native_module("cpu")


def test_which_versions_load():
    """A handler loads in a runtime that is at least as new, of the same major version."""
    native.check_api_version("m", (0, 3), (0, 3))
    native.check_api_version("m", (0, 3), (0, 12))
    for built, runtime in (((0, 4), (0, 3)), ((1, 0), (0, 9)), ((0, 3), (1, 0))):
        with pytest.raises(ImportError):
            native.check_api_version("m", built, runtime)
    assert native.runtime_api_version() >= (0, 3)


@pytest.mark.parametrize("what", ["q", "cache", "k"])
def test_an_explicit_mesh(what):
    """Sharded over Explicit axes outside shard_map, XLA would gather the cache for each call: refused."""
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    put = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))  # noqa: E731
    replicate = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec()))  # noqa: E731
    cache = (put if what == "cache" else replicate)(jax.device_get(CACHE))
    message = (
        rf"{what} is sharded over the explicit mesh axes \['data'\].*call it under jax\.shard_map, with cache\.specs"
    )
    with jax.set_mesh(mesh):
        if what == "k":
            with pytest.raises(ValueError, match=f"^write: {message}"):
                jax.jit(lambda c, k: write(k, k, c))(cache, put(np.asarray(K)))
        else:
            q = (put if what == "q" else replicate)(np.asarray(Q))
            with pytest.raises(ValueError, match=f"^decode_attention: {message}"):
                jax.jit(decode_attention)(q, cache)


def test_arrays_that_do_not_fit_are_refused_by_the_handler():
    """A hand-written call with buffers of the wrong size is an error, never a read out of bounds."""
    if "cpu" not in KERNELS:
        pytest.fail("the cpu module was not built")
    with jax.default_device(jax.devices("cpu")[0]):
        broken = dataclasses.replace(create(), value=dataclasses.replace(CACHE.value, codes=CACHE.value.codes[:, :1]))
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT: jax_foscar: value codes have"):
            jax.block_until_ready(
                jax.jit(lambda q, c: decode_attention(q, c, implementation="cpu"))(jnp.zeros(Q.shape), broken)
            )
    assert re.fullmatch(r"jax_foscar_\w+_v\d+", TARGET)
