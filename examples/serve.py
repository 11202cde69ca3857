"""Continuous batching on SmolLM2-135M-Instruct: requests join and leave the slots of one jitted step.

    python examples/serve.py                               # nine requests, four slots, a 4-bit cache
    python examples/serve.py --slots 2 --kv int2 "Why is the sky blue?" "Name a river." "What is a prime number?"
    python examples/serve.py --check                       # are the texts those of one-at-a-time generation?

The cache has a row for each slot, and one more for the system prompt, which is prefilled once. A request starts as a
copy of that row: whole pages are shared, the rest of it is copied. It is admitted when a slot is free and all the pages
that it may come to need: nothing runs out halfway. Prompts enter a chunk at a time, between the steps that decode, so
that nobody waits long for a newcomer. No shape depends on who is there: each program is compiled once.

`--check` generates every text again with one request at a time and no shared page, *through the same programs*: a row
alone gets from the cache what it gets among others, bit for bit on the CPU, but XLA may round a matrix product of
another batch size differently. The CPU serves unless JAX_PLATFORMS says otherwise.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np

from smollm2 import explain_missing

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when JAX is imported
try:
    import jax
    import jax.numpy as jnp

    from jax_foscar import KVCache, KVFormat, PageAllocator
    from smollm2.arguments import Parser, kv_format, positive
    from smollm2.attention import create_cache, create_paged_cache, foscar_hook, parse_kv, row_hook
    from smollm2.model import Config, Params, forward, logits
    from smollm2.progress import CompileLog, Progress
    from smollm2.prompts import PROMPTS, SYSTEM
    from smollm2.slot_table import SlotTable, one_line
    from smollm2.tokenizer import stop_ids, system_turn, user_turn
    from smollm2.weights import model_path, open_model, read_params

    model_path()
except ModuleNotFoundError as missing:
    explain_missing(missing)

CHUNK = 32  # prompt tokens a step


@dataclasses.dataclass(eq=False)
class Request:
    number: int
    prompt: str
    ids: list[int]  # system prompt and user's turn
    limit: int  # most new tokens
    filled: int = 0  # tokens of `ids` that are cached
    new: list[int] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)

    def most_pages(self, fmt: KVFormat) -> int:
        return pages_of(len(self.ids) + self.limit - 1, fmt)  # the last new token is not cached


def pages_of(tokens: int, fmt: KVFormat) -> int:
    return -(-tokens // fmt.page_size)


class Programs(NamedTuple):
    """All that runs on the device, each compiled once: rows, counts and page ids are operands."""

    decode: Callable  # the next token of every row that has a count of 1
    prefill: Callable  # a chunk of one row's prompt
    copy_row: Callable  # a row becomes a copy of another
    reset_row: Callable  # a row is emptied, and given pages or none


def make_programs(params: Params, config: Config) -> Programs:
    def decode(params: Params, cache: KVCache, tokens: jax.Array, counts: jax.Array):  # both [B]
        cache = cache.advance(counts)
        hidden, cache = forward(params, config, tokens[:, None], cache.positions(1), foscar_hook, cache)
        return logits(params, hidden[:, 0]).argmax(axis=-1), cache

    def prefill(params: Params, cache: KVCache, row: jax.Array, tokens: jax.Array, count: jax.Array):  # tokens [T]
        cache = cache.advance(jnp.where(jnp.arange(cache.batch) == row, count, 0))
        positions = cache.positions(len(tokens))[row][None]  # [1, T]
        hidden, cache = forward(params, config, tokens[None], positions, row_hook(row), cache)
        return logits(params, hidden[0, count - 1]).argmax(), cache

    def copy_row(cache: KVCache, source: jax.Array, row: jax.Array, page_ids: jax.Array):
        return cache.copy_row(source, row, page_ids)

    def reset_row(cache: KVCache, row: jax.Array, page_ids: jax.Array):
        return cache.reset_row(row, page_ids)

    jit = partial(jax.jit, donate_argnames="cache")
    return Programs(partial(jit(decode), params), partial(jit(prefill), params), jit(copy_row), jit(reset_row))


class Server:
    """Slots are the first rows of the cache; the row behind them holds `prefix`, which all requests begin with."""

    def __init__(self, programs: Programs, cache: KVCache, stop: Iterable[int], prefix: list[int]) -> None:
        self.programs, self.cache, self.stop, self.prefix = programs, cache, frozenset(stop), prefix
        self.allocator = PageAllocator(cache.key.codes.shape[2])
        self.prefix_row = cache.batch - 1
        self.slots: list[Request | None] = [None] * self.prefix_row
        self.waiting: deque[Request] = deque()
        self.steps = self.peak = self.peak_unshared = 0
        self.prefix_pages = self.allocator.allocate(pages_of(len(prefix), cache.format))
        if prefix:
            self._reset(self.prefix_row, self.prefix_pages)
            for at in range(0, len(prefix), CHUNK):
                self._prefill_chunk(self.prefix_row, prefix[at : at + CHUNK])

    @property
    def shared(self) -> list[int]:
        """Whole pages of the prefix, which nobody writes again."""
        return self.prefix_pages[: self.cache.format.full_pages(len(self.prefix))]

    @property
    def pages_in_use(self) -> int:
        return self.allocator.num_pages - self.allocator.num_free

    @property
    def active(self) -> list[tuple[int, Request]]:
        return [(slot, request) for slot, request in enumerate(self.slots) if request]

    def run(self, requests: Iterable[Request], show: Callable[[], None] = lambda: None) -> None:
        """Serves until nobody is left."""
        self.waiting.extend(requests)
        while self.waiting or self.active:
            self._admit()
            self._prefill()
            self._decode()
            self.steps += 1
            show()
            for slot, request in self.active:
                if self._finished(request):
                    self.slots[slot] = None
                    self._reset(slot, [])
                    self.allocator.free(request.pages)

    def close(self) -> None:
        """Gives the prefix's pages back, too, and makes sure that nothing was lost."""
        self.allocator.free(self.prefix_pages)
        self.cache.check()
        assert self.allocator.num_free == self.allocator.num_pages

    def _admit(self) -> None:
        """In the order of arrival: a large request is not overtaken by small ones for ever."""
        while self.waiting and None in self.slots:
            request = self.waiting[0]
            own = request.most_pages(self.cache.format) - len(self.shared)
            if own > self.allocator.num_free:
                break
            request.pages = self.allocator.fork(self.shared) + self.allocator.allocate(own)
            slot = self.slots.index(None)
            self.slots[slot] = self.waiting.popleft()
            if self.prefix:
                self.cache = self.programs.copy_row(self.cache, self.prefix_row, slot, self._table_row(request.pages))
                request.filled = len(self.prefix)
            else:
                self._reset(slot, request.pages)
        self.peak = max(self.peak, self.pages_in_use)
        self.peak_unshared = max(self.peak_unshared, sum(len(request.pages) for _, request in self.active))

    def _prefill(self) -> None:
        """A chunk of the prompt of whoever came first."""
        unfilled = [(slot, request) for slot, request in self.active if request.filled < len(request.ids)]
        if unfilled:
            slot, request = min(unfilled, key=lambda item: item[1].number)
            chunk = request.ids[request.filled : request.filled + CHUNK]
            token = self._prefill_chunk(slot, chunk)
            request.filled += len(chunk)
            if request.filled == len(request.ids):
                request.new.append(token)

    def _decode(self) -> None:
        """The next token of everybody whose prompt is there."""
        ready = [(slot, r) for slot, r in self.active if r.new and not self._finished(r)]
        if ready:
            tokens, counts = np.zeros((2, self.cache.batch), np.int32)
            for slot, request in ready:
                tokens[slot], counts[slot] = request.new[-1], 1
            next_tokens, self.cache = self.programs.decode(self.cache, tokens, counts)
            next_tokens = np.asarray(next_tokens)
            for slot, request in ready:
                request.new.append(int(next_tokens[slot]))

    def _finished(self, request: Request) -> bool:
        return len(request.new) == request.limit or (bool(request.new) and request.new[-1] in self.stop)

    def _prefill_chunk(self, row: int, ids: list[int]) -> int:
        tokens = np.array(ids + [0] * (CHUNK - len(ids)), np.int32)
        token, self.cache = self.programs.prefill(self.cache, row, tokens, len(ids))
        return int(token)

    def _reset(self, row: int, pages: list[int]) -> None:
        self.cache = self.programs.reset_row(self.cache, row, self._table_row(pages))

    def _table_row(self, pages: list[int]) -> np.ndarray:
        return np.array(pages + [-1] * (self.cache.page_table.shape[1] - len(pages)), np.int32)


def parse_args() -> tuple[argparse.Namespace, Parser]:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", default=PROMPTS, help="the requests, in order; default: nine of them")
    parser.add_argument("--kv", type=kv_format, default="int4", help="as in generate.py, but for f32; default: int4")
    parser.add_argument("--slots", type=positive, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--pages",
        type=positive,
        metavar="N",
        help="pages of the pool; default: enough for the longest request and some others, fewer than slots could use",
    )
    parser.add_argument("--max-new-tokens", type=positive, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--check", action="store_true", help="compare with one-at-a-time generation; fails if it differs"
    )
    args = parser.parse_args()
    if args.kv is None:
        parser.error("--kv f32 has no pages")
    return args, parser


def main() -> None:
    args, parser = parse_args()
    fmt = dataclasses.replace(args.kv, max_new=max(CHUNK, args.kv.max_new))  # a chunk sees what single steps would
    progress, compiled = Progress(), CompileLog(*Programs._fields)
    reader, config, tokenizer = open_model(progress)

    prefix = tokenizer.encode(system_turn(SYSTEM)).ids
    prompts = [prefix + tokenizer.encode(user_turn(prompt)).ids for prompt in args.prompts]

    def requests() -> list[Request]:
        return [
            Request(i, prompt, ids, args.max_new_tokens)
            for i, (prompt, ids) in enumerate(zip(args.prompts, prompts, strict=True), start=1)
        ]

    longest = max(len(ids) for ids in prompts) + args.max_new_tokens
    if longest > config.context_length:
        parser.error(f"a request may reach {longest} tokens, more than the model's context of {config.context_length}")
    shared = fmt.full_pages(len(prefix))
    own = sorted(request.most_pages(fmt) - shared for request in requests())
    least = pages_of(len(prefix), fmt) + own[-1]
    num_pages = args.pages or least + (args.slots - 1) * own[len(own) // 2]
    if num_pages < least:
        parser.error(f"--pages must be at least {least}, for the system prompt and the longest request")

    params = read_params(reader, config, progress)
    programs = make_programs(params, config)

    def server(prefix: list[int]) -> Server:
        cache = create_paged_cache(fmt, config, num_pages=num_pages, batch=args.slots + 1, max_length=longest)
        return Server(programs, cache, stop_ids(tokenizer), prefix)

    progress.show("compiling the programs, and prefilling the system prompt")
    ours, served = server(prefix), requests()
    progress.clear()
    before, start = sum(compiled.seconds.values()), time.perf_counter()
    ours.run(served, SlotTable(ours, tokenizer).show)
    seconds = time.perf_counter() - start - (sum(compiled.seconds.values()) - before)
    ours.close()

    for request in served:
        print(f"#{request.number} {one_line(request.prompt)}\n   {one_line(tokenizer.decode(request.new))}")
    new = sum(len(request.new) for request in served)
    print(
        f"\n{len(served)} requests, {new} tokens in {ours.steps} steps, {seconds:.1f} s: {new / seconds:.1f} tokens/s"
    )
    report_cache(ours, config, longest)
    if args.check:
        alone, again = server([]), requests()
        for request in again:
            progress.show("checking", f"request {request.number} alone")
            alone.run([request])
        progress.clear()
        alone.close()
        differ = [a.number for a, b in zip(served, again, strict=True) if a.new != b.new]
        print(f"one at a time, nothing shared: {f'requests {differ} differ' if differ else 'the same texts'}")
    print("compiled " + ", ".join(f"{name} {count}x" for name, count in compiled.count.items()))
    if (args.check and differ) or max(compiled.count.values()) > 1:
        sys.exit(1)


def report_cache(server: Server, config: Config, max_length: int) -> None:
    """What sharing and paging save, in pages and bytes."""
    cache, slots = server.cache, len(server.slots)
    exact = 0 if cache.exact_key is None else cache.exact_key.nbytes + cache.exact_value.nbytes
    bf16 = jax.eval_shape(lambda: create_cache(parse_kv("bf16"), config, batch=slots, max_length=max_length)).nbytes
    copied = len(server.prefix) - len(server.shared) * cache.format.page_size
    print(
        f"system prompt: {len(server.prefix)} tokens prefilled once; "
        f"{len(server.shared)} pages shared, {copied} tokens copied for each request\n"
        f"pages: at most {server.peak} in use; {server.peak_unshared} without sharing, "
        f"{slots * cache.page_table.shape[1]} with {slots} rows as long as the longest request; "
        f"{server.allocator.num_free} of {server.allocator.num_pages} free again\n"
        f"cache {cache.format}: {cache.nbytes / 1e6:.1f} MB, {exact / 1e6:.1f} MB of it exact tokens; "
        f"{slots} such rows of bf16 would take {bf16 / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
