"""Instruction demand of the tcgen05 kernel of cuda/blackwell, a part of instructions.py's tables."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator

from sass import ROOT, SPILLS, Graph, Instruction, Origins, compile_and_disassemble

PUBLISHED = [("INT4 as E4M3 (Blackwell)", 0.38), ("INT2 as E2M1 (Blackwell)", 0.19)]
E2M1_MASK = "0x33333333"
FOUR_BIT_MASK = "0xf0f0f0f"


@dataclasses.dataclass
class Kernel:
    """One kernel of cuda/blackwell."""

    dim: int
    rows: int  # query rows
    size: int  # instructions
    mmas: int
    spills: int
    # Operand -> ALU operations and elements, of all its builders in the kernel.
    operands: dict[str, tuple[int, int]]

    def __str__(self) -> str:
        return f"D={self.dim} rows={self.rows}"

    def cost(self, operand: str) -> float:
        operations, elements = self.operands[operand]
        return operations / elements


def built_operands(block: list[Instruction]) -> Iterator[tuple[str, int, int]]:
    """Operands that a basic block builds: name, ALU operations, elements."""
    origins = Origins(block)
    operations: dict[str, set[int]] = {}
    elements: Counter[str] = Counter()
    for instruction in block:
        first = instruction.registers(instruction.operands[-1])[:1] if instruction.kind in ("STTM", "STS") else []
        if first:
            # A register of 16x256b has four columns of eight lanes.
            count = 4 * int(instruction.name.split(".x")[1]) if instruction.kind == "STTM" else 1
            codes = 4 if instruction.kind == "STTM" else 8
            built = origins.alu(origins.of(first[0], count))
            masks = {operand for source in built for operand in block[source].operands if operand.startswith("0x")}
            if codes == 4 or E2M1_MASK in masks:  # else some other store
                four_bit = "INT4, E4M3" if FOUR_BIT_MASK in masks else "INT2 values, E4M3"
                name = "INT2 keys, E2M1" if codes == 8 else four_bit
                operations.setdefault(name, set()).update(built)
                elements[name] += codes * count
        origins.pass_next()
    for name, built in operations.items():
        yield name, len(built), elements[name]


def kernels() -> list[Kernel]:
    source = ROOT / "cuda" / "blackwell" / "decode_tcgen05.cu"
    functions = compile_and_disassemble(source, "-gencode=arch=compute_100f,code=sm_100f")
    found = []
    for name, function in functions.items():
        match = re.search(r"decode_tcgen05ILi(\d+)ELi(\d+)E", name)
        if match is None:
            continue
        graph = Graph(function)
        operands: dict[str, tuple[int, int]] = {}
        for block in graph.blocks:
            for operand, operations, elements in built_operands(block):
                before = operands.get(operand, (0, 0))
                operands[operand] = before[0] + operations, before[1] + elements
        everything = set(range(len(graph.blocks)))
        size = sum(len(block) for block in graph.blocks)
        mmas, spills = graph.count(everything, {"UTCQMMA"}), graph.count(everything, SPILLS)
        found.append(Kernel(int(match[1]), int(match[2]), size, mmas, spills, operands))
    return sorted(found, key=lambda kernel: (kernel.dim, kernel.rows))


def print_kernels() -> None:
    print("The tcgen05 kernel (sm_100f): ALU operations an element that build operands; whole kernel: instructions,")
    print("UTCQMMA, local-memory accesses\n")
    names = ("INT4, E4M3", "INT2 keys, E2M1", "INT2 values, E4M3")
    print(f"{'':16}" + "".join(f"{name:>20}" for name in names) + f"{'size':>9}{'UTCQMMA':>9}{'spills':>8}")
    for kernel in kernels():
        cells = "".join(f"{kernel.cost(name):20.4f}" for name in names)
        print(f"{kernel!s:16}{cells}{kernel.size:9}{kernel.mmas:9}{kernel.spills:8}")
    for text, number in PUBLISHED:
        print(f"published: {text:28}{number:.2f}")
