"""Progress on stderr: a line that rewrites itself in a terminal, a line a stage elsewhere."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")


class Progress:
    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self.stage = ""

    def show(self, stage: str, detail: str = "") -> None:
        if self.live:
            print(f"\r\033[K{stage} {detail}".rstrip(), end="", file=sys.stderr, flush=True)
        elif stage != self.stage:
            print(f"{stage} ...", file=sys.stderr, flush=True)
        self.stage = stage

    def clear(self) -> None:
        if self.live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        self.stage = ""

    def wait(self, stage: str, work: Callable[[], T]) -> T:
        """Runs `work` in a thread of its own and counts the seconds meanwhile; waits for arrays that it returns."""
        result: list[T] = []
        error: list[BaseException] = []

        def run() -> None:
            try:
                result.append(jax.block_until_ready(work()))
            except BaseException as e:  # raised again where the caller sees it
                error.append(e)

        start = time.perf_counter()
        thread = threading.Thread(target=run, daemon=True)  # a daemon, so that Ctrl-C does not wait for it
        thread.start()
        while thread.is_alive():
            elapsed = time.perf_counter() - start
            self.show(stage, f"{elapsed:.0f} s" if elapsed > 1 else "")
            thread.join(timeout=0.2)
        if error:
            raise error[0]
        return result[0]


class CompileLog:
    """Counts compilations of named functions and the seconds they took, from JAX's own events."""

    EVENTS = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")

    def __init__(self, *names: str) -> None:
        self.count = dict.fromkeys(names, 0)
        self.seconds = dict.fromkeys(names, 0.0)
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **kwargs: Any) -> None:
        name = str(kwargs.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
        kind = event.rpartition("/")[2]
        if name in self.count and kind in self.EVENTS:
            self.seconds[name] += duration
            self.count[name] += kind == "backend_compile_duration"
