"""The live table of serve.py."""

import shutil
import sys
from typing import Any

from tokenizers import Tokenizer


class SlotTable:
    """Who is in which slot: rewritten in place in a terminal, a snapshot now and then elsewhere."""

    EVERY = 20  # steps between snapshots

    def __init__(self, server: Any, tokenizer: Tokenizer) -> None:
        self.server, self.tokenizer = server, tokenizer
        self.lines = 0

    def show(self) -> None:
        live = sys.stdout.isatty()
        if live or self.server.steps % self.EVERY == 1:
            width = shutil.get_terminal_size().columns - 1
            lines = [line[:width] for line in self.render(width)]
            up = f"\033[{self.lines}A" if live and self.lines else ""
            print(up + "\n".join(line + "\033[K" * live for line in lines), end="\n" if live else "\n\n", flush=True)
            self.lines = len(lines)

    def render(self, width: int) -> list[str]:
        server = self.server
        lines = [
            f"step {server.steps}: {len(server.waiting)} waiting; "
            f"{server.pages_in_use} of {server.allocator.num_pages} pages in use [{self.page_map()}]",
            "slot request  cached  new  pages         text",
        ]
        for slot, r in enumerate(server.slots):
            if r is None:
                lines.append(f"{slot:4}       -")
            else:
                shared = len(server.shared)
                text = one_line(self.tokenizer.decode(r.new))
                pages = f"{shared} + {len(r.pages) - shared} own" if shared else f"{len(r.pages)} own"
                cached = r.filled + max(len(r.new) - 1, 0)
                lines.append(f"{slot:4} {r.number:7} {cached:7} {len(r.new):4}  {pages:<12}  {text[-(width - 42) :]}")
        return lines

    def page_map(self) -> str:
        """A character a page: the slot that owns it, `=` the system prompt's, `.` free."""
        owners = ["."] * self.server.allocator.num_pages
        for slot, request in self.server.active:
            for page in request.pages:
                owners[page] = f"{slot % 10}"
        for page in self.server.prefix_pages:
            owners[page] = "="
        return "".join(owners)


def one_line(text: str) -> str:
    return " ".join(text.split())
