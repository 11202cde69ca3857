"""SASS as text: the disassemblers, a parser, and the control flow of a kernel."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LANES, TILE_TOKENS = 32, 64

# Elements of the A operand that a lane holds.
MMA_ELEMENTS = {"IMMA.16832": 16, "HMMA.16816": 8}
MMAS = {"IMMA", "HMMA"}
LOADS = {"LDG", "LDS", "LD", "LDSM", "LDL", "LDC", "LDCU", "ULDC"}
COPIES = {"UBLKCP", "LDGSTS"}
SPILLS = {"LDL", "STL"}
CONTROL = {"BRA", "BSSY", "BSYNC", "BREAK", "CALL", "RET", "EXIT", "NOP", "S2R", "S2UR", "CS2R", "WARPSYNC", "ACQBULK"}
NOT_ALU = LOADS | CONTROL | COPIES | MMAS | {"STG", "STS", "ST", "STL"}

# Classes shown, in this order; the rest is summed up as "other".
CLASSES = {
    "LOP3": ("LOP3", "PLOP3", "ULOP3"),
    "SHF": ("SHF", "USHF"),
    "PRMT": ("PRMT",),
    "IMAD": ("IMAD", "VIMAD"),
    "IADD": ("IADD3", "IADD", "VIADD", "UIADD3", "LEA"),
    "SETP": ("ISETP", "FSETP", "UISETP"),
    "MOV": ("MOV", "UMOV", "SEL", "FSEL", "CS2R", "S2R", "R2UR"),
    "MMA": ("IMMA", "HMMA"),
    "FP32": ("FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2", "FMNMX", "FMNMX3"),
    "FP16": ("HADD2", "HFMA2", "HMUL2"),
    "MUFU": ("MUFU",),
    "CVT": ("I2F", "I2FP", "F2I", "F2F", "F2FP"),
    "LDS": ("LDS", "LDSM"),
    "STS": ("STS",),
    "SHFL": ("SHFL", "MOVM", "VOTE", "VOTEU", "REDUX"),
    "copy": ("UBLKCP", "LDGSTS", "SYNCS", "LDGDEPBAR", "DEPBAR"),
    "const": ("LDC", "LDCU", "ULDC"),
    "branch": ("BRA", "BSSY", "BSYNC", "BREAK", "CALL", "WARPSYNC", "YIELD", "NOP"),
}


def find_tool(name: str) -> str | None:
    """nvcc, cuobjdump or nvdisasm: on PATH, or from NVIDIA's package on PyPI."""
    if name == "nvcc" and os.environ.get("CUDACXX"):
        return os.environ["CUDACXX"]
    if found := shutil.which(name):
        return found
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files if file.name == name), None)


@functools.cache
def tool(name: str) -> str:
    found = find_tool(name)
    if found is None:
        package = "" if name == "nvcc" else f" or install the package nvidia-cuda-{name}"
        raise SystemExit(f"{name} was not found: put the CUDA toolkit on PATH{package}.")
    return found


def call(*command: str | Path, cwd: Path | None = None) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


@dataclasses.dataclass(frozen=True)
class Instruction:
    guard: str  # "@P0", "@!UP1" or ""
    name: str  # with modifiers: IMMA.16832.U8.S8
    operands: tuple[str, ...]

    @property
    def kind(self) -> str:
        return self.name.split(".")[0]

    @property
    def is_mma(self) -> bool:
        return self.kind in MMAS

    @property
    def elements(self) -> int:
        return MMA_ELEMENTS[".".join(self.name.split(".")[:2])]

    def registers(self, operand: str) -> list[int]:
        return [int(number) for number in re.findall(r"\bR(\d+)\b", operand)]

    @property
    def written(self) -> list[int]:
        """Registers of the result. Pairs and quads are named by their first."""
        if not self.operands or self.kind in ("STG", "STS", "ST", "STL"):
            return []
        first = self.registers(self.operands[0])[:1]
        if self.is_mma or ".128" in self.name:
            count = 4
        elif ".64" in self.name or "WIDE" in self.name:
            count = 2
        else:
            count = 1
        return [register + i for register in first for i in range(count)]


# A function is a list of labels (str) and instructions.
Function = list[str | Instruction]


def parse(sass: str) -> dict[str, Function]:
    """The functions of `nvdisasm -c`'s output."""
    functions: dict[str, Function] = {}
    current: Function = []
    for line in sass.splitlines():
        if match := re.match(r"\.text\.(\S+):", line):
            current = functions[match[1]] = []
        elif match := re.match(r"(\.L_\S+):", line):
            current.append(match[1])
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:\{ *)?(@\S+ +)?([A-Z][\w.]*)\s*(.*?)\s*;", line):
            operands = tuple(part.strip() for part in match[3].split(",")) if match[3] else ()
            # Ampere's padding is an addition to nowhere.
            name = "NOP" if match[2] == "UIADD3" and operands[0] == "URZ" else match[2]
            current.append(Instruction((match[1] or "").strip(), name, operands))
    return functions


def disassemble(cubin: Path) -> dict[str, Function]:
    return parse(call(tool("nvdisasm"), "-c", cubin))


def compile_and_disassemble(source: Path, *flags: str) -> dict[str, Function]:
    """The functions of a CUDA file, compiled for the one architecture that the flags name."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / f"{source.stem}.cubin"
        call(tool("nvcc"), "-cubin", "-std=c++17", "--expt-relaxed-constexpr", *flags, "-o", cubin, source)
        return disassemble(cubin)


class Graph:
    """Basic blocks of a function, its edges and natural loops."""

    def __init__(self, function: Function):
        self.blocks: list[list[Instruction]] = [[]]
        labels: dict[str, int] = {}
        for line in function:
            if isinstance(line, str):
                if self.blocks[-1]:
                    self.blocks.append([])
                labels[line] = len(self.blocks) - 1
                continue
            self.blocks[-1].append(line)
            if line.kind in ("BRA", "CALL", "EXIT", "RET", "BRX", "BREAK"):
                self.blocks.append([])
        self.next: list[list[int]] = [list(self._successors(i, labels)) for i in range(len(self.blocks))]
        self.previous: list[list[int]] = [[] for _ in self.blocks]
        for i, successors in enumerate(self.next):
            for successor in successors:
                self.previous[successor].append(i)
        self.order = self._reverse_postorder()
        self.loops = self._loops()

    def _successors(self, i: int, labels: dict[str, int]) -> Iterator[int]:
        last = self.blocks[i][-1] if self.blocks[i] else None
        # BRA.DIV leaves for a slow copy of a shuffle when a warp has diverged. A CALL returns, but one to a label may
        # be a jump.
        if last is not None and last.kind == "BRA" and ".DIV" not in last.name:
            if target := re.search(r"(\.L_\w+)", last.operands[-1]):
                yield labels[target[1]]
            if not last.guard and len(last.operands) == 1:
                return
        elif last is not None and last.kind == "CALL" and (target := re.match(r"`\((\.L_\w+)\)", last.operands[-1])):
            yield labels[target[1]]
        elif last is not None and last.kind == "BRX":
            yield from (labels[target] for target in re.findall(r"\.L_\w+", ",".join(last.operands)))
            return
        elif last is not None and last.kind in ("EXIT", "RET") and not last.guard:
            return
        if i + 1 < len(self.blocks):
            yield i + 1

    def _reverse_postorder(self) -> list[int]:
        order: list[int] = []
        seen, stack = {0}, [(0, iter(self.next[0]))]
        while stack:
            block, successors = stack[-1]
            following = next((s for s in successors if s not in seen), None)
            if following is None:
                order.append(block)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(self.next[following])))
        return order[::-1]

    def _loops(self) -> dict[int, set[int]]:
        """Head -> blocks, of the loops whose head dominates their back edges."""
        position = {block: i for i, block in enumerate(self.order)}
        dominator = {self.order[0]: self.order[0]}

        def common(a: int, b: int) -> int:
            while a != b:
                if position[a] > position[b]:
                    a = dominator[a]
                else:
                    b = dominator[b]
            return a

        changed = True
        while changed:
            changed = False
            for block in self.order[1:]:
                known = [p for p in self.previous[block] if p in dominator]
                nearest = functools.reduce(common, known)
                if dominator.get(block) != nearest:
                    dominator[block], changed = nearest, True

        loops: dict[int, set[int]] = {}
        for block in self.order:
            for head in self.next[block]:
                if position[head] <= position[block] and common(head, block) == head:
                    body = loops.setdefault(head, {head})
                    stack = [block]
                    while stack:
                        if (inside := stack.pop()) not in body and inside in position:
                            body.add(inside)
                            stack += self.previous[inside]
        return loops

    def count(self, blocks: set[int], kinds: set[str]) -> int:
        return sum(instruction.kind in kinds for block in blocks for instruction in self.blocks[block])

    def main_loop(self, mmas: set[str]) -> int | None:
        """The head of the innermost loop that copies tiles and multiplies them."""
        heads = [head for head, blocks in self.loops.items() if self.count(blocks, mmas) and self.count(blocks, COPIES)]
        return min(heads, key=lambda head: len(self.loops[head]), default=None)

    def common_path(self, head: int, mmas: set[str]) -> list[int]:
        """From the loop's head to its back edge: most MMAs, then copies, then shortest."""
        position = {block: i for i, block in enumerate(self.order)}
        blocks = sorted(self.loops[head], key=position.__getitem__)
        best: dict[int, tuple[tuple[int, ...], list[int]]] = {head: ((0, 0, 0), [])}
        ends = []
        for block in blocks:
            if block not in best:
                continue
            score, path = best[block]
            gains = [self.count({block}, kinds) for kinds in (mmas, COPIES)]
            gains.append(-len(self.blocks[block]))
            score = tuple(a + b for a, b in zip(score, gains, strict=True))
            for successor in self.next[block]:
                if successor == head:
                    ends.append((score, [*path, block]))
                elif successor in self.loops[head] and position[successor] > position[block]:
                    best[successor] = max(best.get(successor, (score, [*path, block])), (score, [*path, block]))
        return max(ends)[1]


class Origins:
    """Which instructions of a straight run made what a register holds; told of each in order."""

    def __init__(self, instructions: list[Instruction]) -> None:
        self.instructions = instructions
        self.writer: dict[int, int] = {}
        self.sources: list[list[int]] = []

    def of(self, first: int, count: int) -> tuple[int, ...]:
        """The last writers of registers from ``first`` on; -1 where it is none of the run."""
        return tuple(self.writer.get(first + j, -1) for j in range(count))

    def alu(self, made_by: tuple[int, ...]) -> set[int]:
        """The ALU operations behind some writers, back to loads."""
        built: set[int] = set()
        stack = [source for source in made_by if source >= 0]
        while stack:
            source = stack.pop()
            if source not in built and self.instructions[source].kind not in NOT_ALU:
                built.add(source)
                stack += self.sources[source]
        return built

    def pass_next(self) -> None:
        """Goes past the next instruction."""
        i = len(self.sources)
        instruction = self.instructions[i]
        written = instruction.written
        read = instruction.operands[1:] if written else instruction.operands
        numbers = [number for operand in read for number in instruction.registers(operand)]
        self.sources.append([self.writer[number] for number in numbers if number in self.writer])
        for register in written:
            self.writer[register] = i
