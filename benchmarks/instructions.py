"""Instruction demand per KV element, from SASS: no GPU needed, only nvcc, cuobjdump and nvdisasm.

    python benchmarks/instructions.py                                       # with the installed module's main loops
    python benchmarks/instructions.py --module build/.../_cuda.abi3.so --arch sm_100

An element is one K or V code. Three tables:

*Operand forms* (``operand_forms.cu``): what turns a packed load into a tensor-core operand, one straight-line kernel a
form. Each is compiled with one and with two units of work, and the difference of the two counts is what a unit costs:
addresses, prologue and constants are in both. Everything in it but loads, stores, MMAs and control counts, so no class
of instruction can escape.

*Two forms in one decode loop* (``operand_speed.cu``, which times them on a GPU): all instructions of the loop, and the
ALU operations of them that build operands.

*Main loops* of a built module: in each decode kernel, the innermost loop that both copies tiles and multiplies them. A
kernel for one kind of keys and values is counted along its common path, the cheapest one through the loop that executes
all MMAs, shared-memory reads and copies (no mask, no new maximum, no new row). A loop inside it that multiplies counts
as often as its elements ask for (so keys per channel count as in groups of 32 tokens); any other counts once, which
makes a count rough where cp.async copies in loops. What builds an operand is what a walk back from the MMAs' A
registers to their loads finds. A kernel for a list of kinds has no common path: only its size and spills are shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import tcgen05_instructions
from sass import (
    CLASSES,
    LANES,
    MMAS,
    NOT_ALU,
    ROOT,
    SPILLS,
    TILE_TOKENS,
    Function,
    Graph,
    Instruction,
    Origins,
    call,
    compile_and_disassemble,
    disassemble,
    tool,
)

# Form -> (bits, what it is). The published numbers are those of the same operand in the published kernels.
FORMS = {
    "int4_keys_u8": (4, "u8 integer, K: one shift a word"),
    "int2_keys_u8": (2, "u8 integer, K: one shift a word"),
    "int4_values_u8": (4, "u8 integer, V"),
    "int2_values_u8": (2, "u8 integer, V"),
    "int4_values_f16": (4, "f16 subnormal"),
    "int2_values_f16": (2, "f16 subnormal"),
    "int4_values_bf16": (4, "bf16 0x4300 injection"),
    "int2_values_bf16": (2, "bf16 0x4300 injection"),
}
SPEED_LOOPS = {
    "attend_int4_u8": "INT4 u8 integer",
    "attend_int4_bf16": "INT4 bf16 0x4300 injection",
    "attend_int2_u8": "INT2 u8 integer",
    "attend_int2_bf16": "INT2 bf16 0x4300 injection",
}
PUBLISHED = [
    ("bf16 injection (Hopper)", 1.00),
    *tcgen05_instructions.PUBLISHED,
]


def compile_benchmark(name: str, arch: str) -> dict[str, Function]:
    """The functions of one of the CUDA files beside this one."""
    return compile_and_disassemble(ROOT / "benchmarks" / f"{name}.cu", f"-arch={arch}", f"-I{ROOT / 'cuda'}")


# --- Operand forms ----------------------------------------------------------------------------------------------------


def operand_forms(arch: str) -> dict[str, tuple[int, Counter[str]]]:
    """Form -> elements a unit and lane, and the unit's instructions."""
    functions = compile_benchmark("operand_forms", arch)
    forms = {}
    for name, (bits, _) in FORMS.items():
        counts, elements = [], []
        for units in (1, 2):
            instructions = [line for line in functions[f"{name}_{units}"] if isinstance(line, Instruction)]
            counts.append(Counter(instruction.kind for instruction in instructions))
            elements.append(sum(instruction.elements for instruction in instructions if instruction.is_mma))
        unit = Counter({kind: counts[1][kind] - counts[0][kind] for kind in counts[1] | counts[0]})
        # Each code that was loaded is multiplied, once.
        if unit["LDG"] * 128 // bits != elements[1] - elements[0]:
            raise RuntimeError(f"{name}: {unit['LDG']} loads of 16 bytes, {elements[1] - elements[0]} elements")
        forms[name] = elements[1] - elements[0], unit
    return forms


def alu(counts: Counter[str]) -> Counter[str]:
    return Counter({kind: count for kind, count in counts.items() if count and kind not in NOT_ALU})


def print_forms(arch: str) -> None:
    print(f"ALU operations that build a tensor-core operand, per KV element ({arch})\n")
    print(f"{'operand':34}{'per element':>12}   {'of a unit'}")
    for name, (elements, unit) in operand_forms(arch).items():
        bits, text = FORMS[name]
        operations = alu(unit)
        parts = " + ".join(f"{count} {kind}" for kind, count in sorted(operations.items()))
        print(f"{f'INT{bits} {text}':36}{operations.total() / elements:10.4f}   {parts} for {elements} elements")
    for text, number in PUBLISHED:
        print(f"{f'published: {text}':36}{number:10.2f}")


# --- Main loops -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a decode kernel's mangled name says."""

    keys: tuple[str, ...]  # k4t, k4t64, k4c
    values: tuple[str, ...]
    dim: int
    rows: int  # query rows
    pair_bytes: int

    @property
    def one_kind(self) -> bool:
        return len(self.keys) == len(self.values) == 1

    @classmethod
    def of(cls, mangled: str) -> Kernel | None:
        if "10decode_mma" not in mangled or "TraitsI" not in mangled or "$" in mangled:
            return None
        match = re.search(r"TraitsI(.*)Li(\d+)ELi(\d+)ELi(\d+)EEE", mangled)
        if match is None:
            return None
        lists = match[1].split("IJ")[1:]  # parameter packs
        found = [re.findall(r"ILi(\d+)ELb(\d)ELi(\d+)E", part) for part in lists]
        names = [
            tuple(f"{bits}{'tc'[int(c)]}{group if group != '0' else ''}" for bits, c, group in part) for part in found
        ]
        # The mangling names a list that comes twice once.
        keys, values = names if len(names) == 2 else (names[0], names[0])
        return cls(keys, values, int(match[2]), int(match[3]), int(match[4]))

    def __str__(self) -> str:
        keys, values = ("any" if len(names) > 1 else names[0] for names in (self.keys, self.values))
        return f"k{keys},v{values} D={self.dim} rows={self.rows}{' f32' if self.pair_bytes == 8 else ''}"


@dataclasses.dataclass
class MainLoop:
    kernel: Kernel
    size: int  # instructions of all its paths
    spills: int  # local-memory accesses of all its paths
    # Of the common path; None for a kernel that serves a list of kinds, or whose elements do not add up.
    counts: Counter[str] | None = None
    elements: int = 0  # K and V codes, a lane
    operand: dict[str, float] = dataclasses.field(default_factory=dict)  # "K", "V": ALU operations an element


@dataclasses.dataclass(frozen=True)
class Operand:
    """One A operand of codes on a path."""

    block: int
    name: str  # "K" or "V"
    elements: int
    built: frozenset[int]  # ALU operations, by their place in the path


def trace_operands(path: list[tuple[int, Instruction]]) -> list[Operand]:
    """The A operands of codes on a path of (block, instruction): each once, however many MMAs it feeds."""
    origins = Origins([instruction for _, instruction in path])
    operands: dict[tuple[int, ...], Operand] = {}
    for block, instruction in path:
        if instruction.is_mma:
            made_by = origins.of(instruction.registers(instruction.operands[1])[0], 4)
            # Keys meet signed queries, or as halves scaled ones, values unsigned weights.
            name = "K" if instruction.kind == "HMMA" or instruction.name.endswith("U8.S8") else "V"
            # What is not masked is no code: the offsets of keys per channel.
            if all(source >= 0 and path[source][1].kind == "LOP3" for source in made_by):
                built = frozenset(origins.alu(made_by))
                operands.setdefault(made_by, Operand(block, name, instruction.elements, built))
        origins.pass_next()
    return list(operands.values())


def cost(operands: list[Operand]) -> float:
    """ALU operations an element; one that serves several operands counts once."""
    return len(frozenset().union(*(operand.built for operand in operands))) / sum(o.elements for o in operands)


def main_loop(kernel: Kernel, function: Function) -> MainLoop | None:
    graph = Graph(function)
    # Exact tokens have a loop of their own without integer MMAs, float32 queries a path with more of the others.
    head = graph.main_loop({"IMMA"})
    if head is None:
        return None
    body = graph.loops[head]
    loop = MainLoop(kernel, sum(len(graph.blocks[block]) for block in body), graph.count(body, SPILLS))
    if not kernel.one_kind:
        return loop

    blocks = graph.common_path(head, {"IMMA"})
    path = [(block, instruction) for block in blocks for instruction in graph.blocks[block]]
    operands = trace_operands(path)
    # The outermost loop inside the main loop that a block is in.
    inner: dict[int, int] = {}
    for h, inside in sorted(graph.loops.items(), key=lambda item: len(item[1])):
        if h != head and inside < body:
            inner |= dict.fromkeys(inside, h)
    expected = TILE_TOKENS * ((kernel.dim + 31) // 32 * 32) // LANES
    trips: dict[int, int] = {}
    for name in "KV":
        places: Counter[int | None] = Counter()
        for operand in operands:
            places[inner.get(operand.block)] += operand.elements if operand.name == name else 0
        places = +places
        in_loops = places.total() - places[None]
        if in_loops and (expected - places[None]) % in_loops == 0:
            trips |= {h: (expected - places[None]) // in_loops for h in places if h is not None}
        elif in_loops or places[None] != expected:
            return loop
    counts: Counter[str] = Counter()
    for block, instruction in path:
        counts[instruction.kind] += trips.get(inner.get(block, -1), 1)
    loop.counts, loop.elements = counts, 2 * expected
    loop.operand = {name: cost([operand for operand in operands if operand.name == name]) for name in "KV"}
    return loop


def main_loops(module: Path, arch: str) -> list[MainLoop]:
    """Of the module's decode kernels; `arch` without its suffix: sm_90 finds sm_90a."""
    loops = []
    with tempfile.TemporaryDirectory() as folder:
        call(tool("cuobjdump"), "-xelf", f".{arch}", module.resolve(), cwd=Path(folder))
        for cubin in sorted(Path(folder).glob("*.cubin")):
            if re.search(rf"\.{arch}[a-z]?\.cubin$", cubin.name):
                for name, function in disassemble(cubin).items():
                    kernel = Kernel.of(name)
                    loop = main_loop(kernel, function) if kernel is not None else None
                    if loop is not None:
                        loops.append(loop)
    return sorted(loops, key=lambda loop: (loop.kernel.dim, loop.kernel.rows, str(loop.kernel)))


def print_main_loops(module: Path, arch: str) -> None:
    loops = main_loops(module, arch)
    if not loops:
        sys.exit(f"{module} has no decode kernels on tensor cores for {arch}.")
    print(f"Main loops in {module.name} for {arch}: a lane's instructions a tile of 64 tokens, by class\n")
    shown = [*CLASSES, "other"]
    classes = {kind: name for name, kinds in CLASSES.items() for kind in kinds}
    header = "".join(f"{name:>7}" for name in ("a code", "K", "V", *shown, "all", "size", "spills"))
    print(f"{'kernel':30}{header}")
    for loop in loops:
        if loop.counts is None:
            cells = ["-"] * (len(shown) + 4)
        else:
            by_class: Counter[str] = Counter()
            for kind, count in loop.counts.items():
                by_class[classes.get(kind, "other")] += count
            total = loop.counts.total()
            cells = [f"{total / loop.elements:.2f}", *(f"{loop.operand[name]:.3f}" for name in "KV")]
            cells += [str(count) for count in (*(by_class[name] for name in shown), total)]
        print(f"{loop.kernel!s:30}" + "".join(f"{cell:>7}" for cell in (*cells, loop.size, loop.spills)))
    print("\na code: instructions per K or V code; K, V: ALU operations of them that build its operand;")
    print("size and spills: instructions and local-memory accesses on all paths of the loop.")


def speed_loops(arch: str) -> dict[str, tuple[Counter[str], int, float]]:
    """Kernel of operand_speed.cu -> its loop's instructions, elements a lane, ALU operations of operands an element."""
    functions = compile_benchmark("operand_speed", arch)
    loops = {}
    for name in SPEED_LOOPS:
        graph = Graph(functions[name])
        head = graph.main_loop(MMAS)
        assert head is not None
        path = [(block, instruction) for block in graph.common_path(head, MMAS) for instruction in graph.blocks[block]]
        operands = trace_operands(path)
        counts = Counter(instruction.kind for _, instruction in path)
        loops[name] = counts, sum(operand.elements for operand in operands), cost(operands)
    return loops


def print_speed_loops(arch: str) -> None:
    print(f"Two forms in one decode loop, per KV element ({arch})\n")
    print(f"{'':34}{'instructions':>14}{'operands':>10}{'MMAs a tile':>13}")
    for name, (counts, elements, operand) in speed_loops(arch).items():
        mmas = sum(counts[kind] for kind in MMAS)
        print(f"{SPEED_LOOPS[name]:34}{counts.total() / elements:14.2f}{operand:10.3f}{mmas:13}")


# --- The binary -------------------------------------------------------------------------------------------------------


def code_in(module: Path) -> tuple[set[str], set[str]]:
    """Architectures with SASS and with PTX: sm_90a, sm_120."""
    # With nothing to list, cuobjdump says so on stderr and succeeds.
    listings = (call(tool("cuobjdump"), option, module) for option in ("-lelf", "-lptx"))
    sass, ptx = (set(re.findall(r"\.(sm_\d+[a-z]?)\.(?:cubin|ptx)", listing)) for listing in listings)
    return sass, ptx


def missing_code(module: Path, architectures: str) -> list[str]:
    """What the binary lacks of CMake's list, `80-real;120-real;120-virtual`."""
    sass, ptx = code_in(module)
    missing = []
    for entry in architectures.split(";"):
        number, _, kind = entry.partition("-")
        if kind != "virtual" and f"sm_{number}" not in sass:
            missing.append(f"SASS for sm_{number}")
        if kind != "real" and f"sm_{number}" not in ptx:
            missing.append(f"PTX for sm_{number}")
    return missing


def has_tcgen05_code(module: Path) -> bool:
    """Some of the module's code is the tcgen05 kernel; cuobjdump lists sm_100f as sm_100."""
    with tempfile.TemporaryDirectory() as folder:
        call(tool("cuobjdump"), "-xelf", ".sm_100", module.resolve(), cwd=Path(folder))
        return any(b"decode_tcgen05ILi128ELi8E" in cubin.read_bytes() for cubin in Path(folder).glob("*.cubin"))


def find_module() -> Path | None:
    spec = importlib.util.find_spec("jax_foscar._cuda") if importlib.util.find_spec("jax_foscar") else None
    return Path(spec.origin) if spec is not None and spec.origin else None


def module_architectures(module: Path) -> str:
    """The list that the module was built for, by its own account; needs no GPU."""
    spec = importlib.util.spec_from_file_location("_cuda", module)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded.architectures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90", help="whose SASS to count")
    parser.add_argument("--module", type=Path, help="a built _cuda module; otherwise the installed one")
    args = parser.parse_args()
    print_forms(args.arch)
    print()
    print_speed_loops(args.arch)
    print()
    tcgen05_instructions.print_kernels()
    print()
    module = args.module or find_module()
    if module is None:
        sys.exit("jax_foscar has no CUDA module here, so there are no main loops to count; name one with --module.")
    sass, ptx = code_in(module)
    architectures = module_architectures(module)
    print(f"SASS: {', '.join(sorted(sass))}. PTX: {', '.join(sorted(ptx)) or 'none'}. Built for {architectures}.")
    if missing := missing_code(module, architectures):
        sys.exit(f"The binary lacks {', '.join(missing)}.")
    print_main_loops(module, args.arch)


if __name__ == "__main__":
    main()
