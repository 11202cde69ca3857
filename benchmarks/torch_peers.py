"""Peers that live in PyTorch: FlashInfer, and TensorRT-LLM's XQA as FlashInfer ships it.

Each returns a function that gives microseconds a call: the median of replays of a CUDA graph of several calls, over
caches that together are larger than L2.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

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


def flashinfer_bf16(shape: Shape, repeats: int) -> float:
    import flashinfer

    lengths, pages, total, copies = paged(shape, 2)
    size = (total, 2, PAGE, shape.kv_heads, shape.head_dim)
    caches = [torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(copies)]
    q = torch.randn(shape.batch, shape.heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
    indptr = torch.cat([torch.zeros(1, dtype=pages.dtype, device="cuda"), pages.cumsum(0)]).int()
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        indptr, torch.arange(total, dtype=torch.int32, device="cuda"), ((lengths - 1) % PAGE + 1).int(),
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


def peers() -> dict[str, Callable[[Shape, int], float]]:
    """Peers by name, with what they need imported; empty where FlashInfer is not installed."""
    try:
        import flashinfer  # noqa: F401
    except ImportError:
        return {}
    return {
        "FlashInfer bf16": flashinfer_bf16,
        "XQA fp8": lambda shape, repeats: xqa(shape, repeats, torch.float8_e4m3fn),
        "XQA bf16": lambda shape, repeats: xqa(shape, repeats, torch.bfloat16),
    }
