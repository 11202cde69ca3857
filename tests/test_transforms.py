"""JAX's transformations: each gives what a plain loop gives, and none copies a cache that it need not copy."""

import dataclasses
import functools
import itertools
import os
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from jax.sharding import NamedSharding, PartitionSpec
from support import IMPLEMENTATIONS, KERNELS, make_cache, on, queries, random_rows

import jax_foscar
from jax_foscar import KVCache, KVFormat, Pages, decode_attention

FORMAT = "k4c32,v2t32"
CPU_KERNEL = [name for name in KERNELS if name == "cpu"]
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
kernels = pytest.mark.parametrize("kernel", KERNELS)


def close(actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)


def tokens(batch, count, layers=1, seed=9):
    """k and v ``[L, B, T, K, D]``."""
    rows = random_rows((count,) * batch, layers=layers, seed=seed)
    return tuple(jnp.asarray(x.transpose(1, 0, 3, 2, 4)) for x in (rows.k, rows.v))


# --- vmap of attention ------------------------------------------------------------------------------------------------

NAMES = ("q", "key_codes", "key_params", "value_codes", "value_params", "page_table", "length", "layer", "exact")
ROWS, POOLS, SIZE = 4, 2, 3


def with_operands(cache, **operands):
    """The cache with some of its arrays replaced, by the names of the primitive's operands."""
    given = {name: operands[name] for name in ("page_table", "length") if name in operands}
    for name in ("key", "value"):
        pages = getattr(cache, name)
        given[name] = Pages(operands.get(f"{name}_codes", pages.codes), operands.get(f"{name}_params", pages.params))
    if "exact" in operands:
        given["exact_key"], given["exact_value"] = operands["exact"]
    return dataclasses.replace(cache, **given)


@functools.cache
def operand_sets(count):
    """``count`` different values of every operand, as lists; all of them readable together."""
    fmt = KVFormat.parse(FORMAT)
    sets = []
    for i in range(count):
        lengths = np.random.default_rng(i).integers(0, 129, ROWS)
        cache = make_cache(fmt, random_rows((128,) * ROWS, layers=2, seed=i), capacity=128, pools=POOLS, seed=i)
        table = np.concatenate([np.random.default_rng((i, u)).permutation(4).reshape(2, 2) for u in range(POOLS)])
        sets.append(
            {
                "q": queries((ROWS, 1, 4, 64), seed=i),
                "key_codes": cache.key.codes,
                "key_params": cache.key.params,
                "value_codes": cache.value.codes,
                "value_params": cache.value.params,
                "page_table": jnp.asarray(table, jnp.int32),
                "length": jnp.asarray(lengths, jnp.int32),
                "layer": jnp.int32(i % 2),
                "exact": (cache.exact_key, cache.exact_value),
            }
        )
    return cache, {name: [s[name] for s in sets] for name in NAMES}


@functools.cache
def one_call(kernel):
    """``f(cache, operands)``, jitted once: the call that vmap is held against."""
    return jax.jit(functools.partial(raw_call, kernel))


def raw_call(kernel, cache, operands):
    cache = with_operands(cache, **operands)
    return decode_attention(
        operands["q"], cache, layer=operands["layer"], return_residual=True, implementation=kernel
    )  # fmt: skip


def stack(values):
    return jax.tree.map(lambda *x: jnp.stack(x), *values)


@kernels
def test_vmap_over_every_subset_of_the_operands(kernel):
    """All 511 choices of in_axes, against a loop; out_axes and in_axes other than 0 among them."""
    with on(kernel):
        cache, sets = operand_sets(SIZE)
        stacked = {name: stack(values) for name, values in sets.items()}
        for mask in range(1, 2 ** len(NAMES)):
            mapped = {name for bit, name in enumerate(NAMES) if mask >> bit & 1}
            operands = {name: stacked[name] if name in mapped else sets[name][0] for name in NAMES}
            axes = {name: 0 if name in mapped else None for name in NAMES}
            actual = jax.vmap(functools.partial(raw_call, kernel, cache), in_axes=(axes,))(operands)
            for i in range(SIZE):
                one = {name: sets[name][i if name in mapped else 0] for name in NAMES}
                close(jax.tree.map(lambda x: x[i], actual), one_call(kernel)(cache, one))  # noqa: B023


@kernels
def test_nested_vmap(kernel):
    """Pairs of subsets under vmap(vmap), every pair of single operands among them, against a double loop."""
    with on(kernel):
        cache, sets = operand_sets(4)
        groups = [("q",), NAMES[1:5], ("page_table",), ("length",), ("layer",), ("exact",)]
        rng = random.Random(0)
        pairs = [(set(a), set(b)) for a, b in itertools.product(groups, groups)]
        for _ in range(24):
            pairs.append(tuple(set(rng.sample(NAMES, rng.randint(1, len(NAMES)))) for _ in range(2)))
        for outer, inner in pairs:
            at = lambda name, i, j: 2 * (name in outer) * i + (name in inner) * j  # noqa: B023, E731

            def operand(name):
                rows = [[sets[name][at(name, i, j)] for j in range(2)] for i in range(2)]  # noqa: B023
                if name in outer and name in inner:  # noqa: B023
                    return stack([stack(row) for row in rows])
                if name in outer:  # noqa: B023
                    return stack([row[0] for row in rows])
                return stack(rows[0]) if name in inner else rows[0][0]  # noqa: B023

            f = functools.partial(raw_call, kernel, cache)
            for names in (inner, outer):
                f = jax.vmap(f, in_axes=({name: 0 if name in names else None for name in NAMES},))
            actual = f({name: operand(name) for name in NAMES})
            for i, j in itertools.product(range(2), range(2)):
                one = {name: sets[name][at(name, i, j)] for name in NAMES}
                close(jax.tree.map(lambda x: x[i, j], actual), one_call(kernel)(cache, one))  # noqa: B023


@implementations
def test_vmap_axes(implementation):
    """in_axes and out_axes other than 0, and a mapped cache as a whole."""
    with on(implementation):
        caches = [make_cache(KVFormat.parse(FORMAT), random_rows((40, 128), seed=i), capacity=128) for i in range(3)]
        q = queries((2, 4, 3, 64))
        f = jax.jit(functools.partial(decode_attention, implementation=implementation))
        actual = jax.vmap(f, in_axes=(2, 0), out_axes=1)(q, stack(caches))
        expected = jnp.stack([f(q[:, :, i], cache) for i, cache in enumerate(caches)], axis=1)
        close(actual, expected)


@kernels
@pytest.mark.parametrize("mapped", [("q",), ("q", "length"), ("q", "length", "page_table", "layer"), ("exact",)])
def test_an_unmapped_cache_is_not_copied(kernel, mapped):
    """The kernel's operands are the pools themselves, and nothing in the program is as large as their copies."""
    cache, sets = operand_sets(SIZE)
    operands = {name: stack(sets[name]) if name in mapped else sets[name][0] for name in NAMES}
    axes = {name: 0 if name in mapped else None for name in NAMES}
    f = jax.vmap(functools.partial(raw_call, None), in_axes=(None, axes))
    jaxpr = jax.make_jaxpr(f)(cache, operands)
    (call,) = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "jax_foscar_decode_attention"]
    shapes = [x.aval.shape for x in call.invars[:5]]
    assert shapes[1:] == [x.shape for x in (*jax.tree.leaves(cache.key), *jax.tree.leaves(cache.value))]
    if mapped == ("q",):
        assert shapes[0] == (ROWS, 1, SIZE * 4, 64), "the axis joins the heads: the cache is read once"
    pools = min(x.size for x in jax.tree.leaves((cache.key, cache.value)))
    exact = SIZE * cache.exact_key.size if "exact" in mapped else 0
    for eqn in equations(jaxpr.jaxpr):
        for out in eqn.outvars:
            assert out.aval.size < pools or out.aval.size <= exact, eqn


def equations(jaxpr):
    """All equations, those of inner jaxprs too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


# --- vmap of write ----------------------------------------------------------------------------------------------------


def test_vmap_of_write_with_the_cache():
    """A stack of caches is written, nested too, as each alone."""
    k, v = tokens(2, 40, layers=4)
    caches = [
        KVCache.create(KVFormat.parse(FORMAT), batch=2, max_length=128, num_layers=1, num_kv_heads=2, head_dim=64)
    ] * 4

    def step(cache, k, v):
        return cache.advance(jnp.asarray([33, 40])).write(k, v, layer=0)

    single = jax.jit(step)
    expected = [single(cache, *kv) for cache, *kv in zip(caches, k, v, strict=True)]
    support.assert_same_bits(jax.jit(jax.vmap(step))(stack(caches), k, v), stack(expected))
    # Twice, where the inner axis maps the caches alone.
    split = lambda x: x.reshape(2, 2, *x.shape[1:])  # noqa: E731
    nested = jax.jit(jax.vmap(jax.vmap(step, in_axes=(0, None, None))))(
        jax.tree.map(split, stack(caches)), k[:2], v[:2]
    )
    support.assert_same_bits(nested, stack([stack([one] * 2) for one in expected[:2]]))


@pytest.mark.parametrize("nesting", ["single", "inner", "outer"])
def test_vmap_of_write_with_mapped_tokens_alone(nesting):
    """It would make as many caches, which is refused whichever vmap does it."""
    cache = KVCache.create(KVFormat.parse(FORMAT), batch=2, max_length=128, num_layers=1, num_kv_heads=2, head_dim=64)
    k, v = (x[0] for x in tokens(2, 1))
    step = lambda cache, k, v: cache.append(k, v)  # noqa: E731
    many, twice = (lambda x, n=n: jnp.broadcast_to(x, (*(3,) * n, *x.shape)) for n in (1, 2))
    if nesting == "single":
        call = lambda: jax.vmap(step, in_axes=(None, 0, 0))(cache, many(k), many(v))  # noqa: E731
    else:
        inner = (None, 0, 0) if nesting == "inner" else (0, 0, 0)
        outer = (None, 0, 0) if nesting == "outer" else (0, 0, 0)
        f = jax.vmap(jax.vmap(step, in_axes=inner), in_axes=outer)
        call = lambda: f(jax.tree.map(many, cache), twice(k), twice(v))  # noqa: E731
    with pytest.raises(
        ValueError, match=r"^write: k, v or the positions are mapped .* map the cache too \(in_axes=0\)"
    ):
        call()


# --- Control flow -----------------------------------------------------------------------------------------------------


def layer_loop(cache, q, k, v, implementation):
    """One token through all layers, in a scan whose carry is the cache; q, k, v ``[L, B, 1, heads, D]``."""

    def block(carry, qkv):
        cache, i = carry
        q, k, v = qkv
        cache = cache.write(k, v, layer=i)
        return (cache, i + 1), decode_attention(q, cache, layer=i, implementation=implementation)

    (cache, _), out = jax.lax.scan(block, (cache.advance(1), 0), (q, k, v))
    return cache, out


@implementations
def test_scan_over_layers_in_a_loop_over_tokens(implementation):
    """Scan in scan, and scan in while_loop, equal a plain loop."""
    with on(implementation):
        layers, count = 2, 35
        empty = KVCache.create(
            KVFormat.parse(FORMAT), batch=2, max_length=128, num_layers=layers, num_kv_heads=2, head_dim=64
        )
        k, v = (jnp.moveaxis(x, 2, 0)[:, :, :, None] for x in tokens(2, count, layers))  # [T, L, B, 1, K, D]
        q = queries((count, layers, 2, 1, 4, 64))
        step = functools.partial(layer_loop, implementation=implementation)

        stepped, outs = empty, []
        jitted = jax.jit(step)
        for t in range(count):
            stepped, out = jitted(stepped, q[t], k[t], v[t])
            outs.append(out)
        for layer in range(layers):
            expected, _ = support.attention(q[-1, layer], stepped, layer=layer)
            floor = support.TOLERANCES[implementation].floor
            np.testing.assert_allclose(outs[-1][layer], expected, rtol=1e-5, atol=1e-5 + floor)

        scanned, out = jax.jit(lambda c: jax.lax.scan(lambda c, x: step(c, *x), c, (q, k, v)))(empty)
        support.assert_same_bits(scanned, stepped)
        close(out, jnp.stack(outs))

        if implementation == "xla":
            return  # the loop below differs in the kernel alone

        @jax.jit
        def loop(cache):
            def body(state):
                t, cache, _ = state
                return t + 1, *step(cache, q[t], k[t], v[t])

            return jax.lax.while_loop(lambda state: state[1].length[0] < count, body, (0, cache, outs[0] * 0))

        _, looped, out = loop(empty)
        support.assert_same_bits(looped, stepped)
        close(out, outs[-1])


@implementations
def test_cond(implementation):
    with on(implementation):
        caches = [make_cache(KVFormat.parse(FORMAT), random_rows((40, 128)), capacity=128)]
        q = queries((2, 4, 64))
        f = jax.jit(
            lambda p, q, c: jax.lax.cond(
                p, lambda: decode_attention(q, c, implementation=implementation), lambda: jnp.zeros_like(q)
            )
        )
        close(
            f(True, q, caches[0]),
            jax.jit(functools.partial(decode_attention, implementation=implementation))(q, caches[0]),
        )
        assert not np.asarray(f(False, q, caches[0])).any()


@kernels
def test_disable_jit(kernel):
    with on(kernel):
        cache, q = make_cache(KVFormat.parse("k4t,v4t"), random_rows((40, 128)), capacity=128), queries((2, 4, 64))
        expected = jax.jit(decode_attention)(q, cache)
        with jax.disable_jit():
            close(decode_attention(q, cache), expected)


def test_eval_shape():
    """Shapes and dtypes come without computing, of the cache's creation too."""
    make = lambda: KVCache.create(  # noqa: E731
        KVFormat.parse(FORMAT),
        batch=2,
        max_length=2**20,
        num_layers=80,
        num_kv_heads=8,
        head_dim=128,
        value_head_dim=64,
    )
    cache, k, v = jax.eval_shape(lambda: (make(), jnp.zeros((2, 5, 8, 128)), jnp.zeros((2, 5, 8, 64))))
    written = jax.eval_shape(lambda c, k, v: c.advance(5).write(k, v, layer=3), cache, k, v)
    assert jax.tree.leaves(written) == jax.tree.leaves(cache)
    for implementation in (None, "xla"):
        f = functools.partial(decode_attention, return_residual=True, implementation=implementation)
        out, lse = jax.eval_shape(f, jax.ShapeDtypeStruct((2, 5, 32, 128), jnp.bfloat16), cache)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 5, 32, 64), jnp.bfloat16, (2, 5, 32), jnp.float32)


# --- Derivatives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))], ids=["grad", "jvp"])
def test_derivatives_are_refused_with_advice(transform):
    cache, q = make_cache(KVFormat.parse("k4t,v4t"), random_rows((40, 128)), capacity=128), queries((2, 4, 64))
    advice = r"^decode_attention has no gradient.*jax\.nn\.dot_product_attention.*jax\.lax\.stop_gradient"
    with pytest.raises(NotImplementedError, match=advice):
        transform(lambda q: decode_attention(q, cache).sum())(q)
    (k,), (v,) = tokens(2, 1)
    with pytest.raises(NotImplementedError, match=r"^KVCache\.write has no gradient"):
        transform(lambda k: cache.append(k, v).value.params.astype(jnp.float32).sum())(k)


@implementations
def test_derivatives_of_what_stands_around_it(implementation):
    """With respect to other arguments, and through stop_gradient, derivatives are as ever."""
    with on(implementation):
        cache, q = make_cache(KVFormat.parse("k4t,v4t"), random_rows((40, 128)), capacity=128), queries((2, 4, 64))
        attend = jax.jit(functools.partial(decode_attention, implementation=implementation))

        def loss(w, q):
            return (w * attend(jax.lax.stop_gradient(q), cache)).sum()

        close(jax.grad(loss)(2.0, q), attend(q, cache).sum())
        assert not np.asarray(jax.grad(loss, argnums=1)(2.0, q)).any()
        close(jax.jvp(loss, (2.0, q), (1.0, q))[1], attend(q, cache).sum())


# --- Sharding: four CPU devices ---------------------------------------------------------------------------------------

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


def mesh(data, model, kind=jax.sharding.AxisType.Auto):
    return jax.make_mesh((data, model), ("data", "model"), (kind, kind), devices=jax.devices("cpu")[: data * model])


SHARDINGS = [(2, 2, 4), (4, 1, 4), (1, 2, 1), (2, 1, 2)]


@pytest.mark.parametrize(
    ("implementation", "data", "model", "pools"),
    [("xla", *SHARDINGS[0]), *((name, *sharding) for name in CPU_KERNEL for sharding in SHARDINGS)],
)
def test_shard_map(implementation, data, model, pools):
    """A whole decode step over batch and heads: right, without a collective, with varying axes checked."""
    with on("cpu"):
        cache = make_cache(KVFormat.parse(FORMAT), random_rows((31, 70, 0, 127)), capacity=128, pools=pools)
        (k,), (v,) = tokens(4, 1)
        q = queries((4, 1, 4, 64))
        specs, heads = cache.specs(batch="data", heads="model"), PartitionSpec("data", None, "model")

        def step(cache, q, k, v):
            cache = cache.append(k, v)
            return cache, decode_attention(q, cache, implementation=implementation)

        expected = jax.jit(step)(cache, q, k, v)
        where = mesh(data, model)
        sharded = jax.jit(
            jax.shard_map(step, mesh=where, in_specs=(specs, heads, heads, heads), out_specs=(specs, heads))
        )
        placed = jax.device_put(
            (cache, q, k, v), jax.tree.map(lambda s: NamedSharding(where, s), (specs, *(heads,) * 3))
        )
        compiled = sharded.lower(*placed).compile()
        assert not [name for name in COLLECTIVES if name in compiled.as_text()]
        new, out = compiled(*placed)
        support.assert_same_bits(jax.device_get(new), jax.device_get(expected[0]))
        close(jax.device_get(out), jax.device_get(expected[1]))


def test_specs():
    """Rows are the first axis of every array, heads the fourth of pages and the third of exact ones."""
    cache = make_cache(KVFormat.parse(FORMAT), random_rows((1, 2)), capacity=64)
    specs = cache.specs(batch="data", heads=("model", "expert"))
    assert isinstance(specs, KVCache)
    assert specs.key.codes == specs.value.params == PartitionSpec("data", None, None, ("model", "expert"))
    assert specs.exact_key == specs.exact_value == PartitionSpec("data", None, ("model", "expert"))
    assert specs.page_table == specs.length == specs.num_new == specs.overflowed == PartitionSpec("data")
    assert set(jax.tree.leaves(jax.tree.map(lambda s: s == PartitionSpec(*[None] * len(s)), cache.specs()))) == {True}


def test_a_false_claim_of_replication_is_refused():
    """Replicated queries over a sharded cache vary; out_specs that deny it are refused, by any implementation."""
    with on("cpu"):
        cache = make_cache(KVFormat.parse(FORMAT), random_rows((31, 70)), capacity=128)
        q, where = queries((1, 4, 64)), mesh(2, 1)
        for implementation in ("xla", None):
            f = functools.partial(decode_attention, implementation=implementation)
            sharded = jax.shard_map(
                f, mesh=where, in_specs=(PartitionSpec(), cache.specs(batch="data")), out_specs=PartitionSpec()
            )
            with pytest.raises(ValueError, match="replicat"):
                jax.eval_shape(sharded, q, cache)


# --- Export -----------------------------------------------------------------------------------------------------------

RELOAD = """
import sys, numpy as np, jax, jax_foscar
exported = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
arrays = np.load(sys.argv[2])
leaves = jax.tree.leaves(exported.in_avals)
args = jax.tree.unflatten(exported.in_tree, [arrays[f"x{i}"].view(leaf.dtype) for i, leaf in enumerate(leaves)])
cache, out = exported.call(*args[0], **args[1])
assert cache.format == args[0][0].format
np.save(sys.argv[3], np.asarray(out))
"""


def exported_step(batch, **options):
    cache = jax.eval_shape(lambda: make_cache(KVFormat.parse(FORMAT), random_rows((31, 70)), capacity=128))
    cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), cache)
    kv = jax.ShapeDtypeStruct((batch, 1, 2, 64), jnp.float32)
    q = jax.ShapeDtypeStruct((batch, 1, 4, 64), jnp.float32)
    checks = jax_foscar.export_checks()
    return jax.export.export(jax.jit(export_me), disabled_checks=checks, **options)(cache, q, kv, kv)


def export_me(cache, q, k, v):
    cache = cache.append(k, v)
    return cache, decode_attention(q, cache)


def export_args():
    (k,), (v,) = tokens(2, 1)
    return make_cache(KVFormat.parse(FORMAT), random_rows((31, 70)), capacity=128), queries((2, 1, 4, 64)), k, v


@pytest.mark.parametrize("kernel", CPU_KERNEL)
def test_export_and_reload(kernel, tmp_path):
    """For all platforms at once; serialized, it runs here and in a fresh process, cache and all."""
    with on(kernel):
        exported = exported_step(2, platforms=["cpu", "cuda", "tpu"])
        args = export_args()
        expected = jax.jit(export_me)(*args)
        data = exported.serialize()
        reloaded = jax.export.deserialize(data)
        new, out = reloaded.call(*args)
        support.assert_same_bits(new, expected[0])
        close(out, expected[1])
        (tmp_path / "step").write_bytes(data)
        leaves = [np.asarray(x) for x in jax.tree.leaves(args)]
        raw = [x.view(np.uint16) if x.dtype == support.BF16 else x for x in leaves]  # numpy saves no bfloat16
        np.savez(tmp_path / "args.npz", **{f"x{i}": x for i, x in enumerate(raw)})
    paths = [str(tmp_path / name) for name in ("step", "args.npz", "out.npy")]
    command = [sys.executable, "-P", "-c", RELOAD, *paths]
    environment = {**os.environ, "JAX_PLATFORMS": kernel}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    close(np.load(paths[2]), expected[1])


@pytest.mark.parametrize("kernel", CPU_KERNEL)
def test_export_with_a_symbolic_batch(kernel):
    """One artifact serves any number of rows."""
    with on(kernel):
        (batch,) = jax.export.symbolic_shape("b")
        exported = exported_step(batch, platforms=["cpu"])
        args = export_args()
        for rows in (1, 2):
            some = jax.tree.map(lambda x: x[:rows], args)  # noqa: B023
            new, out = exported.call(*some)
            expected = jax.jit(export_me)(*some)
            support.assert_same_bits(new, expected[0])
            close(out, expected[1])


def test_export_without_the_checks_is_refused_by_jax():
    """That is why ``export_checks`` exists: without it JAX does not know our target."""
    args = jax.eval_shape(export_args)
    with pytest.raises(ValueError, match="jax_foscar_decode_attention"):
        jax.export.export(jax.jit(export_me), platforms=["cuda"])(*args)


@kernels
def test_many_independent_calls_in_one_program(kernel):
    """XLA may run them at once, on the very threads that the kernel asks for help: none may wait for another."""
    with on(kernel):
        fmt = KVFormat.parse("k4t,v4t")
        sizes = {"batch": 2, "max_length": 2048, "num_layers": 32, "num_kv_heads": 4, "head_dim": 64}
        cache, q = KVCache.create(fmt, **sizes).advance(2000), queries((2, 8, 64))
        program = jax.jit(lambda q, cache: [decode_attention(q, cache, layer=i) for i in range(32)])
        for _ in range(5):
            for out in program(q, cache):
                np.testing.assert_array_equal(out, np.zeros((2, 8, 64)))
