"""The instruction budget, held from SASS without a GPU (benchmarks/instructions.py counts, and prints the tables)."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import instructions
import sass
import tcgen05_instructions
from jax_foscar import native

# ALU operations per KV element.  One LOP3 masks four u8 codes; keys pay a shift a word besides, which keeps the power
# of two on a code at 4 or less: 1/16 for 2-bit words of 16 codes, 1/8 for 4-bit words of 8.
BUDGET = {
    "int4_keys_u8": 0.375,
    "int2_keys_u8": 0.3125,
    "int4_values_u8": 0.25,
    "int2_values_u8": 0.25,
    "int4_values_f16": 0.625,
    "int2_values_f16": 0.5625,
}
# Local-memory accesses a tile, of the loops that have any: at 2 bits eight rows a warp beat four without spills.
SPILLS = {
    "k4t64,v4t64 D=128 rows=8": 1,
    "k2t64,v2t64 D=128 rows=8": 1,
    "k2c64,v2t64 D=128 rows=8": 53,
    "k4t64,v4t64 D=128 rows=16": 2,
    "k2t64,v2t64 D=128 rows=16": 1,
    "k2c64,v2t64 D=128 rows=16": 58,
}
# Instructions a tile that still keep up with an H200's memory (docs/kernel-notes.md, "Roofline arithmetic"); of 2-bit
# keys per channel, which do not, what was reached.
TILE_BUDGET = {"k2t,v2t D=128 rows=4": 600, "k4t,v4t D=128 rows=4": 1360, "k2c64,v2t64 D=128 rows=4": 780}


def need(*tools):
    for tool in tools:
        if sass.find_tool(tool) is None:
            pytest.skip(f"{tool} is neither on PATH nor installed")


@pytest.fixture(scope="module")
def forms():
    need("nvcc", "nvdisasm")
    return {
        name: instructions.alu(unit).total() / elements
        for name, (elements, unit) in instructions.operand_forms("sm_90").items()
    }


@pytest.fixture(scope="module")
def module():
    need("cuobjdump", "nvdisasm")
    path = instructions.find_module()
    if path is None:
        pytest.skip("jax_foscar has no CUDA module here")
    return path


@pytest.mark.parametrize("form", BUDGET)
def test_operand_budget(forms, form):
    assert forms[form] <= BUDGET[form]


@pytest.mark.parametrize("form", ["int4_values_bf16", "int2_values_bf16"])
def test_comparison_is_fair(forms, form):
    """The published form costs the published 1.00, less the one shift in a word that nobody needs."""
    assert 0.87 <= forms[form] <= 1.0


def test_forms_in_a_loop():
    """operand_speed.cu, which runs two forms side by side, still compiles and still shows the difference."""
    need("nvcc", "nvdisasm")
    costs = {name: operand for name, (_, _, operand) in instructions.speed_loops("sm_90").items()}
    for bits in 2, 4:
        assert costs[f"attend_int{bits}_u8"] <= 0.36 * costs[f"attend_int{bits}_bf16"]


def test_code_for_every_architecture(module):
    assert not instructions.missing_code(module, instructions.module_architectures(module))


def test_tcgen05_in_the_module(module):
    """The wheel that says it has the kernel has it, beside the portable code for the same GPUs."""
    if not native.module("cuda").has_tcgen05:
        pytest.skip("the module is not built for sm_100")
    assert instructions.has_tcgen05_code(module)
    assert "sm_100" in instructions.code_in(module)[0]


def test_main_loops(module):
    """Of the kernels for one kind of keys and values: hardly a spill, and operands as cheap as the forms alone."""
    archs, _ = instructions.code_in(module)
    if not any(arch.startswith("sm_90") for arch in archs):
        pytest.skip(f"the module has no code for sm_90, only for {', '.join(sorted(archs))}")
    loops = [loop for loop in instructions.main_loops(module, "sm_90") if loop.kernel.one_kind]
    assert loops
    assert {str(loop.kernel): loop.spills for loop in loops if loop.spills > SPILLS.get(str(loop.kernel), 0)} == {}
    for loop in loops:
        assert loop.counts is not None, f"{loop.kernel}: its MMAs do not add up to a tile's elements"
        (key,), (value,) = loop.kernel.keys, loop.kernel.values
        key_form = "values_f16" if "c" in key else "keys_u8"  # an f16 operand costs the same whatever it stands for
        assert loop.operand["K"] <= BUDGET[f"int{key[0]}_{key_form}"], loop.kernel
        assert loop.operand["V"] <= BUDGET[f"int{value[0]}_values_u8"], loop.kernel
    totals = {str(loop.kernel): loop.counts.total() for loop in loops}
    for kernel, budget in TILE_BUDGET.items():
        assert totals[kernel] <= budget, kernel


@pytest.fixture(scope="module")
def tcgen05_kernels():
    need("nvcc", "nvdisasm")
    return tcgen05_instructions.kernels()


def test_tcgen05_operands(tcgen05_kernels):
    """The published kernel's counts, or fewer."""
    assert [(kernel.dim, kernel.rows) for kernel in tcgen05_kernels] == [(64, 4), (64, 8), (128, 4), (128, 8)]
    for kernel in tcgen05_kernels:
        assert kernel.cost("INT4, E4M3") <= 0.38
        assert kernel.cost("INT2 keys, E2M1") <= 0.19
        assert kernel.cost("INT2 values, E4M3") <= 0.32
        # A lane's codes of a tile: keys, values (half as many lanes have any where a head has 64 channels), and values
        # of 2 bits twice, for warps of the low and of the high fields.
        codes = {name: elements for name, (_, elements) in kernel.operands.items()}
        assert codes == {
            "INT4, E4M3": kernel.dim + 128,
            "INT2 keys, E2M1": kernel.dim,
            "INT2 values, E4M3": 2 * 128,
        }


def test_tcgen05_instructions(tcgen05_kernels):
    for kernel in tcgen05_kernels:
        assert kernel.mmas > 0
        assert kernel.spills == 0
