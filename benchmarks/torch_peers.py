"""Peers that live in PyTorch: FlashInfer, TensorRT-LLM's XQA as FlashInfer ships it, and OSCAR's Triton kernel.

Each returns a function that gives microseconds a call: the median of replays of a CUDA graph of several calls, over
caches that together are larger than L2.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch

from shapes import Shape

PAGE = 64
COLD_BYTES = 1 << 30


def replay(calls: list[Callable[[], object]], repeats: int) -> float:
    """Microseconds a call of a CUDA graph that makes all of them, one after another."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for i in range(repeats + 2):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return statistics.median(times)


def paged(shape: Shape, element_bytes: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Lengths and pages a row, their sum, and how many caches make the calls cold."""
    lengths = torch.tensor(shape.row_lengths(), device="cuda")
    pages = (lengths + PAGE - 1) // PAGE
    total = int(pages.sum())
    nbytes = total * PAGE * shape.kv_heads * shape.head_dim * 2 * element_bytes
    return lengths, pages, total, -(-COLD_BYTES // nbytes)


def row_starts(counts: torch.Tensor) -> torch.Tensor:
    """Where each row begins in a list of all, and where the last one ends."""
    return torch.cat([torch.zeros(1, dtype=counts.dtype, device="cuda"), counts.cumsum(0)]).int()


def flashinfer_bf16(shape: Shape, repeats: int) -> float:
    import flashinfer

    lengths, pages, total, copies = paged(shape, 2)
    size = (total, 2, PAGE, shape.kv_heads, shape.head_dim)
    caches = [torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(copies)]
    q = torch.randn(shape.batch, shape.heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        row_starts(pages), torch.arange(total, dtype=torch.int32, device="cuda"), ((lengths - 1) % PAGE + 1).int(),
        shape.heads, shape.kv_heads, shape.head_dim, PAGE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return replay([lambda kv=kv: wrapper.run(q, kv) for kv in caches], repeats)


def xqa(shape: Shape, repeats: int, dtype: torch.dtype) -> float:
    from flashinfer.xqa import xqa as run

    lengths, pages, total, copies = paged(shape, torch.empty((), dtype=dtype).element_size())
    size = (total, shape.kv_heads, PAGE, shape.head_dim)
    caches = [
        tuple(torch.randn(size, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(2)) for _ in range(copies)
    ]
    q = torch.randn(shape.batch, 1, shape.heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    width = int(pages.max())
    first = pages.cumsum(0) - pages
    table = (first[:, None] + torch.arange(width, device="cuda")).clamp(max=total - 1).int()
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")
    semaphores = torch.zeros(8 << 20, dtype=torch.uint32, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    counts = lengths.to(torch.uint32)[:, None]

    def call(k: torch.Tensor, v: torch.Tensor) -> None:
        run(q, k, v, table, counts, out, workspace, semaphores, shape.kv_heads, PAGE, kv_layout="HND", sm_count=sms)

    return replay([lambda kv=kv: call(*kv) for kv in caches], repeats)


@functools.cache
def load_oscar(path: Path) -> types.ModuleType:
    """OSCAR's ``decode_attention.py``; SGLang, from which it wants next to nothing, need not be installed."""
    utils, environ = types.ModuleType("sglang.srt.utils"), types.ModuleType("sglang.srt.environ")
    utils.is_hip = lambda: False
    environ.envs = None
    stubs = {"sglang": types.ModuleType("sglang"), "sglang.srt": types.ModuleType("sglang.srt")}
    stubs |= {module.__name__: module for module in (utils, environ)}
    added = {name: module for name, module in stubs.items() if sys.modules.setdefault(name, module) is module}
    spec = importlib.util.spec_from_file_location("oscar_decode_attention", path)
    assert spec is not None  # decode.py takes Python files alone
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        for name in added:
            del sys.modules[name]
    return module


def oscar_token_bytes(shape: Shape) -> int:
    """Of one KV head's keys or values: codes, a scale and a zero point in f32."""
    return shape.head_dim // 4 + 8


def oscar(shape: Shape, repeats: int, path: Path) -> float:
    """Of 1, 8 and 32 splits a row the fastest."""
    decode = load_oscar(path).decode_attention_fwd_quantized
    lengths = torch.tensor(shape.row_lengths(), device="cuda")
    total, size = int(lengths.sum()), (shape.batch, shape.heads)
    copies = -(-COLD_BYTES // (total * shape.kv_heads * 2 * oscar_token_bytes(shape)))

    def buffers() -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(256, (total, shape.kv_heads, shape.head_dim // 4), dtype=torch.uint8, device="cuda")
        return codes, torch.rand(total, shape.kv_heads, 2, device="cuda") + 0.5

    caches = [(*buffers(), *buffers()) for _ in range(copies)]
    q = torch.randn(*size, shape.head_dim, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    tokens = row_starts(lengths), torch.arange(total, device="cuda")
    times = []
    for splits in 1, 8, 32:
        logits, lse = (torch.empty(*size, splits, *rest, device="cuda") for rest in ((shape.head_dim,), ()))
        counts = torch.full((shape.batch,), splits, dtype=torch.int32, device="cuda")
        rest = out, *tokens, logits, lse, counts, splits, shape.head_dim**-0.5, "int2"
        calls = [functools.partial(decode, q, k, v, k_pairs, v_pairs, *rest) for k, k_pairs, v, v_pairs in caches]
        times.append(replay(calls, repeats))
    return min(times)


def peers(shape: Shape, oscar_path: Path | None) -> dict[str, tuple[float, Callable[[int], float]]]:
    """Bytes a cached value, and microseconds from a number of repeats, by name; those that are there."""
    found: dict[str, tuple[float, Callable[[int], float]]] = {}
    if importlib.util.find_spec("flashinfer") is not None:
        found["FlashInfer bf16"] = 2, functools.partial(flashinfer_bf16, shape)
        found["XQA fp8"] = 1, lambda repeats: xqa(shape, repeats, torch.float8_e4m3fn)
        found["XQA bf16"] = 2, lambda repeats: xqa(shape, repeats, torch.bfloat16)
    if oscar_path is not None:
        nbytes = oscar_token_bytes(shape) / shape.head_dim
        found["OSCAR INT2"] = nbytes, lambda repeats: oscar(shape, repeats, oscar_path)
    return found
