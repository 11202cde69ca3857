"""The Blackwell kernel's synchronisation, over all interleavings: no deadlock, no buffer written while it is read.

A warp's program is what the emulator recorded of it: waits and arrivals at mbarriers, and the buffers it touches
between two of them. Programs have no branches that depend on timing, so a state is each warp's place in its program and
how far copies and products, which finish later than they are issued, have come. Every reachable state is visited. Two
accesses to a buffer, one of them a write, that are possible in the same state are an error; so is a state that nothing
leaves.

A role of several warps is modelled by two where that keeps the states few, else by one; the arrivals that a barrier
counts are then those of the modelled warps.
"""

import dataclasses
import functools
from collections import Counter

import numpy as np
import pytest
from blackwell import Act, Problem, barriers

from jax_foscar import Quant

COPIES, PRODUCTS, QUERIES, BUILDERS, SOFTMAX = (0,), (1,), (2, 3), (4, 5, 6, 7), (8, 9, 10, 11)
READS, WRITES = {Act.READ, Act.MULTIPLY_READ}, {Act.WRITE, Act.MULTIPLY_WRITE, Act.COPY}
BUFFERS = [f"stage {i}" for i in range(6)] + [
    f"{name} {slot}" for name in ("queries", "weights", "keys", "values", "scores") for slot in (0, 1)
] + ["sums"]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Step:
    """One dealing with a barrier, and what is touched between it and the next one."""

    act: Act
    barrier: int
    parity: int
    reads: frozenset[int]
    writes: frozenset[int]


def programs(trace, warps):
    """Warp -> its steps, and those of the copies or products that it issues."""
    found = {}
    for warp in warps:
        steps: list[Step] = []
        for _, act, what, value in trace[trace[:, 0] == warp].tolist():
            if act in READS:
                steps[-1] = dataclasses.replace(steps[-1], reads=steps[-1].reads | {what})
            elif act in WRITES:
                steps[-1] = dataclasses.replace(steps[-1], writes=steps[-1].writes | {what})
            else:
                steps.append(Step(Act(act), what, value, frozenset(), frozenset()))
        found[warp] = steps
    return found


class WrongError(Exception):
    """What a model was found to do."""


class Model:
    """Programs, and how many arrivals end a phase of each barrier."""

    def __init__(self, steps, arrivals):
        self.warps = sorted(steps)
        self.steps = [steps[warp] for warp in self.warps]
        self.arrivals = arrivals
        # What an issued copy or batch of products touches until it is done.
        self.batches = [self._batches(warp, program) for warp, program in zip(self.warps, self.steps, strict=True)]

    @staticmethod
    def _batches(warp, program):
        """Step -> (barrier, reads, writes) that it issues."""
        issued, reads, writes = {}, frozenset(), frozenset()
        for i, step in enumerate(program):
            if step.act == Act.EXPECT:
                issued[i] = (step.barrier, step.reads, step.writes)
            elif step.act == Act.COMMIT:
                issued[i] = (step.barrier, reads, writes)
                reads = writes = frozenset()
            if warp in PRODUCTS:
                reads, writes = reads | step.reads, writes | step.writes
        return issued

    def explore(self):
        """The number of states; raises WrongError."""
        # (places, arrivals per barrier so far, copies under way, products under way)
        names = sorted(self.arrivals)
        index = {name: i for i, name in enumerate(names)}
        start = (tuple(0 for _ in self.steps), tuple(0 for _ in names), (), ())
        seen, stack = {start}, [start]

        def arrived(counts, barrier):
            counts = list(counts)
            counts[index[barrier]] += 1
            return tuple(counts)

        while stack:
            state = stack.pop()
            places, counts, copies, products = state
            self._check_accesses(places, copies, products)
            following = []
            for i, program in enumerate(self.steps):
                if places[i] == len(program):
                    continue
                step = program[places[i]]
                phase = counts[index[step.barrier]] // self.arrivals[step.barrier]
                if step.act == Act.WAIT and phase % 2 == step.parity:
                    continue
                moved = (*places[:i], places[i] + 1, *places[i + 1 :])
                batch = self.batches[i].get(places[i])
                if step.act == Act.EXPECT:
                    following.append((moved, counts, tuple(sorted((*copies, batch), key=str)), products))
                elif step.act == Act.COMMIT:
                    following.append((moved, counts, copies, (*products, batch)))
                elif step.act == Act.ARRIVE:
                    following.append((moved, arrived(counts, step.barrier), copies, products))
                else:
                    following.append((moved, counts, copies, products))
            for i, copy in enumerate(copies):  # in any order
                following.append((places, arrived(counts, copy[0]), (*copies[:i], *copies[i + 1 :]), products))
            if products:  # in the order of issue
                following.append((places, arrived(counts, products[0][0]), copies, products[1:]))
            if not following and any(place < len(program) for place, program in zip(places, self.steps, strict=True)):
                raise WrongError("deadlock")
            for state in following:
                if state not in seen:
                    seen.add(state)
                    stack.append(state)
        return len(seen)

    def _check_accesses(self, places, copies, products):
        readers, writers = Counter(), Counter()
        for warp, program, place in zip(self.warps, self.steps, places, strict=True):
            if place > 0 and program[place - 1].act != Act.EXPECT:  # a copy is checked as such
                # Warps of a role write and read parts of their own.
                role = next(role for role in (COPIES, PRODUCTS, QUERIES, BUILDERS, SOFTMAX) if warp in role)
                readers.update({(buffer, role) for buffer in program[place - 1].reads} - set(readers))
                writers.update({(buffer, role) for buffer in program[place - 1].writes} - set(writers))
        for role, batches in (COPIES, copies), (PRODUCTS, products):
            for _, reads, writes in batches:
                readers.update({(buffer, role) for buffer in reads} - set(readers))
                writers.update({(buffer, role) for buffer in writes} - set(writers))
        for buffer, role in writers:
            for other, other_role in (*readers, *writers):
                if other == buffer and other_role != role:
                    raise WrongError(f"{BUFFERS[buffer]} is written while it is used")


@functools.cache
def trace_of(directions, lengths=(640,), stages=4):
    """Five tiles of one item, or what `lengths` says."""
    per = {"t": "token", "c": "channel"}
    rng = np.random.default_rng(0)
    tokens = (max(lengths) + 63) // 64 * 64
    q = rng.standard_normal((len(lengths), 1, 4, 64)).astype(np.float32)
    keys, values = rng.standard_normal((2, len(lengths), 1, tokens, 64)).astype(np.float32)
    key, value = (Quant(bits, per=per[d], group=64) for bits, d in zip((2, 4), directions, strict=True))
    case = Problem(key, value, q, keys, values, list(lengths))
    return case.run(blocks=1, events=100_000, stages=stages)[2]


def model(trace, keys_per_channel, warps, change=None, counts=None):
    steps = programs(trace, warps)
    if change is not None:
        steps = {warp: change(warp, program) for warp, program in steps.items()}
    used = {step.barrier for program in steps.values() for step in program}
    arrivals = {}
    for barrier, (name, needed) in barriers(keys_per_channel).items():
        if barrier not in used:
            continue
        # The modelled warps' share of the arrivals: each of them arrives once a phase.
        missing = sum(len(role) - len(set(role) & set(warps)) for role in arriving_roles(trace, barrier))
        arrivals[barrier] = needed - missing + (counts or {}).get(name, 0)
    return Model(steps, arrivals)


def arriving_roles(trace, barrier):
    """Roles whose warps arrive at a barrier."""
    arrives = trace[(trace[:, 1] == Act.ARRIVE) & (trace[:, 2] == barrier)][:, 0]
    return [role for role in (QUERIES, BUILDERS, SOFTMAX) if set(role) & set(arrives.tolist())]


ONE_EACH = [COPIES[0], PRODUCTS[0], QUERIES[0], BUILDERS[0], SOFTMAX[0]]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("directions", ["tt", "tc", "ct", "cc"])
@pytest.mark.parametrize("lengths", [(640,), (256, 130, 1)], ids=["one item", "three items"])
def test_no_deadlock_and_no_overwrite(directions, lengths, stages):
    trace = trace_of(directions, lengths, stages)
    assert model(trace, directions[0] == "c", ONE_EACH).explore() > 100


@pytest.mark.parametrize("second", [QUERIES[1], BUILDERS[1], SOFTMAX[1]])
@pytest.mark.parametrize("directions", ["tt", "cc"])
def test_warps_of_a_role_may_drift_apart(directions, second):
    trace = trace_of(directions, (384,), stages=2)
    assert model(trace, directions[0] == "c", sorted([*ONE_EACH, second])).explore() > 100


def test_warps_of_a_role_do_the_same():
    """So that one may stand for all."""
    trace = trace_of("cc")
    for role in (QUERIES, BUILDERS, SOFTMAX):
        first, *others = programs(trace, role).values()
        # Builders of channels that a head of 64 has not write no values.
        for other in others:
            assert [(s.act, s.barrier, s.parity) for s in other] == [(s.act, s.barrier, s.parity) for s in first]
            assert all(b.reads <= a.reads and b.writes <= a.writes for a, b in zip(first, other, strict=True))


def without_wait(role, name):
    def change(warp, program):
        if warp not in role:
            return program
        kept: list[Step] = []
        for step in program:
            if step.act == Act.WAIT and NAMES[step.barrier] == name and kept:
                last = kept[-1]
                kept[-1] = dataclasses.replace(last, reads=last.reads | step.reads, writes=last.writes | step.writes)
            else:
                kept.append(step)
        return kept

    return change


def without_flip(role, name):
    """The parity is never flipped."""

    def change(warp, program):
        return [
            dataclasses.replace(step, parity=0)
            if warp in role and step.act == Act.WAIT and NAMES[step.barrier] == name
            else step
            for step in program
        ]

    return change


NAMES = {}


@pytest.fixture(autouse=True, scope="module")
def _names():
    NAMES.update({barrier: name for barrier, (name, _) in barriers(True).items()})


# Every wait of every role.  (With two stages, waiting for a stage would imply some of the others.)
WAITS = [
    (COPIES, "stage free"), (PRODUCTS, "keys full"), (PRODUCTS, "queries full"),
    (PRODUCTS, "values full"), (PRODUCTS, "weights full"), (PRODUCTS, "sums free"), (QUERIES, "stage full"),
    (QUERIES, "queries free"), (BUILDERS, "stage full"), (BUILDERS, "scores full"), (BUILDERS, "sums full"),
    (SOFTMAX, "queries full"), (SOFTMAX, "stage full"), (SOFTMAX, "scores full"), (SOFTMAX, "sums full"),
]  # fmt: skip
# The softmax warps' scores rest on the same queries and stage that they wait for: nothing else can be seen by a model
# that takes a completed product for visible to all.
IMPLIED = [(SOFTMAX, "queries full"), (SOFTMAX, "stage full")]


@pytest.mark.parametrize(("role", "name"), WAITS, ids=lambda x: x if isinstance(x, str) else f"warp {x[0]}")
def test_a_missing_wait_is_noticed(role, name):
    broken = model(trace_of("cc"), True, ONE_EACH, without_wait(role, name))
    if (role, name) in IMPLIED:
        broken.explore()
        return
    with pytest.raises(WrongError):
        broken.explore()


@pytest.mark.parametrize(("role", "name"), WAITS, ids=lambda x: x if isinstance(x, str) else f"warp {x[0]}")
def test_a_missing_phase_flip_is_noticed(role, name):
    if (role, name) in IMPLIED:
        return
    broken = model(trace_of("cc"), True, ONE_EACH, without_flip(role, name))
    with pytest.raises(WrongError):
        broken.explore()


@pytest.mark.parametrize("name", sorted({name for _, name in WAITS}))
def test_a_wrong_count_is_noticed(name):
    with pytest.raises(WrongError):
        model(trace_of("cc"), True, ONE_EACH, counts={name: 1}).explore()


@pytest.mark.parametrize(("name", "second"), [("keys full", BUILDERS[1]), ("values full", BUILDERS[1]),
                                              ("queries full", QUERIES[1]), ("weights full", SOFTMAX[1]),
                                              ("sums free", SOFTMAX[1])])  # fmt: skip
def test_a_count_too_low_is_noticed(name, second):
    with pytest.raises(WrongError):
        model(trace_of("cc", (384,)), True, sorted([*ONE_EACH, second]), counts={name: -1}).explore()
