"""Ours and the rivals, each over the same tensors.

A contestant makes a `Call` for a `Problem`, or raises: the words of the exception stand in its cell. What depends on
the page table and the lengths alone is made by `Call.plan`, outside the timed calls, as an engine does once a step.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from comparison import library
from comparison.shapes import Shape

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_FLASHINFER_WORKSPACE_BYTES = 512 << 20


class Refused(Exception):
    """A contestant does not serve a shape."""


@dataclass
class Call:
    run: Callable[[int], Any]
    """Enqueues the call over the i-th copy of K and V, while the problem lives; the result is `Problem.out` or what is
    returned."""
    plan: Callable[[], Any] | None = None
    """Made once for all layers of a step; None: there is no such thing."""
    forget: Callable[[], Any] | None = None
    """Drops what `plan` would find again."""
    find: Callable[[], Any] | None = None
    """Finds the plan that there is."""


class Problem:
    """The tensors of a shape: q, copies of K and V in pages of random order, and a page table in the usual forms."""

    def __init__(self, shape: Shape, k_pool: torch.Tensor, v_pool: torch.Tensor, rotated_bytes: int, seed: int) -> None:
        """The pools are flat, of the shape's element type, and hold `copies_of(shape, rotated_bytes)` copies."""
        self.shape = shape
        self.copies = copies_of(shape, rotated_bytes)
        page = (shape.page_size, shape.kv_heads, shape.head_dim)
        elements = shape.pages * page[0] * page[1] * page[2]

        def views(pool: torch.Tensor) -> list[torch.Tensor]:
            return [pool[i * elements : (i + 1) * elements].view(shape.pages, *page) for i in range(self.copies)]

        self.k, self.v = views(k_pool), views(v_pool)
        generator = torch.Generator("cuda").manual_seed(seed)
        rows = (shape.rows, shape.qo_heads, shape.head_dim)
        self.q = torch.randn(rows, device="cuda", dtype=torch.bfloat16, generator=generator)
        self.out = torch.empty_like(self.q)

        kv_lens = np.array(shape.kv_lens, np.int32)
        counts = -(-kv_lens // shape.page_size)
        self.kv_lens = torch.from_numpy(kv_lens)
        self.indptr = torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
        self.indices = torch.from_numpy(np.random.default_rng(seed).permutation(shape.pages).astype(np.int32))
        self.last_page_len = torch.from_numpy(kv_lens - (counts - 1) * shape.page_size)
        self.qo_indptr = torch.arange(shape.batch + 1, dtype=torch.int32) * shape.qo_len
        self.kv_indptr = torch.from_numpy(np.concatenate(([0], np.cumsum(kv_lens))).astype(np.int32))

    @functools.cached_property
    def slots(self) -> torch.Tensor:
        """Of each token, request after request, as a row of a cache that is seen as [pages * page_size, ...]."""
        size = self.shape.page_size
        slots = []
        for r, kv_len in enumerate(self.shape.kv_lens):
            pages = self.indices[self.indptr[r] : self.indptr[r + 1]].to("cuda", torch.int64)
            slots.append((pages[:, None] * size + torch.arange(size, device="cuda")).flatten()[:kv_len])
        return torch.cat(slots)

    @functools.cached_property
    def dense(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each copy's K and V without pages, [tokens, heads, head_dim]."""
        return [
            (k.flatten(0, 1).index_select(0, self.slots), v.flatten(0, 1).index_select(0, self.slots))
            for k, v in zip(self.k, self.v, strict=True)
        ]

    @functools.cached_property
    def dense_batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """As `dense`, [batch, tokens, heads, head_dim]."""
        shape = self.shape
        if not shape.one_length:
            raise Refused("contiguous K/V of several lengths")
        if shape.kv_dtype != "bf16":
            raise Refused("bf16 q with fp8 K/V")
        size = (shape.batch, shape.kv_lens[0], shape.kv_heads, shape.head_dim)
        return [(k.view(size), v.view(size)) for k, v in self.dense]


def copies_of(shape: Shape, rotated_bytes: int) -> int:
    """Of K and V, so that calls in turn meet none of it in the L2 cache."""
    return max(1, -(-rotated_bytes // shape.cache_bytes))


def random_pool(dtype: str, elements: int, seed: int) -> torch.Tensor:
    """Normal values, made for a block and repeated."""
    block = min(elements, 100_000_007)
    generator = torch.Generator("cuda").manual_seed(seed)
    pool = torch.empty(elements, device="cuda", dtype=DTYPES[dtype])
    pool[:block] = torch.randn(block, device="cuda", dtype=torch.bfloat16, generator=generator).to(pool.dtype)
    raw = pool.view(torch.uint8) if dtype == "fp8" else pool
    while block < elements:
        more = min(block, elements - block)
        raw[block : block + more] = raw[:more]
        block += more
    return pool


class Contestant(Protocol):
    name: str

    def call(self, problem: Problem) -> Call: ...


class Ours:
    """flashinfer-workspace through its C ABI, over pages."""

    name = "fiw"

    def __init__(self, path: Path, stream: torch.cuda.Stream) -> None:
        self._workspace = library.Workspace(path, 0)
        self._stream = stream.cuda_stream

    @property
    def workspace(self) -> library.Workspace:
        return self._workspace

    def call(self, problem: Problem) -> Call:
        shape, kv_dtype = problem.shape, problem.shape.kv_dtype
        q, out = (library.Tensor(t.data_ptr(), "bf16", tuple(t.shape), 0) for t in (problem.q, problem.out))
        caches = [
            library.KvCache(*(library.Tensor(t.data_ptr(), kv_dtype, tuple(t.shape), 0) for t in (k, v)))
            for k, v in zip(problem.k, problem.v, strict=True)
        ]
        table = self._workspace.page_table(
            shape.page_size, shape.pages, *(t.numpy() for t in (problem.indptr, problem.indices, problem.last_page_len))
        )
        spec = library.StepSpec(shape.qo_heads, shape.kv_heads, shape.head_dim, "bf16", kv_dtype)
        step = self._workspace.plan(shape.kind, table, shape.qo_len, spec)

        def plan() -> None:
            table.make()
            step.make()

        def run(i: int) -> None:
            step.run(q, caches[i % len(caches)], out, self._stream)

        return Call(run, plan, self._workspace.forget_plans, step.make)


class FlashInferCore:
    """FlashInfer's decode wrapper on CUDA cores."""

    name = "fi core"

    def __init__(self, workspace: torch.Tensor) -> None:
        module = importlib.import_module("flashinfer")
        self._wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")

    def call(self, problem: Problem) -> Call:
        if problem.shape.kind != "decode":
            raise Refused("decode only")
        return _decode_over_pages(self._wrapper, problem)


class FlashInferTiles:
    """FlashInfer's tensor-core tiles: the decode wrapper's (which `auto` takes for bf16), and the prefill wrapper's."""

    name = "fi fa2"

    def __init__(self, workspace: torch.Tensor) -> None:
        module = importlib.import_module("flashinfer")
        self._decode = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend="fa2")
        self._prefill = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")

    def call(self, problem: Problem) -> Call:
        if problem.shape.kind == "decode":
            return _decode_over_pages(self._decode, problem)
        return _prefill_over_pages(self._prefill, problem)


class FlashInferHopper:
    """FlashInfer's prefill wrapper of backend fa3, over pages."""

    name = "fi fa3"

    def __init__(self, workspace: torch.Tensor) -> None:
        module = importlib.import_module("flashinfer")
        self._wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")

    def call(self, problem: Problem) -> Call:
        if problem.shape.kind == "decode":
            raise Refused("windows and prefill only")
        return _prefill_over_pages(self._wrapper, problem)


def _decode_over_pages(wrapper: Any, problem: Problem) -> Call:
    plan = functools.partial(
        wrapper.plan, problem.indptr, problem.indices, problem.last_page_len, head_dim=problem.shape.head_dim
    )
    return _over_pages(wrapper, problem, plan)


def _prefill_over_pages(wrapper: Any, problem: Problem) -> Call:
    plan = functools.partial(
        wrapper.plan,
        problem.qo_indptr,
        problem.indptr,
        problem.indices,
        problem.last_page_len,
        head_dim_qk=problem.shape.head_dim,
        causal=True,
    )
    return _over_pages(wrapper, problem, plan)


def _over_pages(wrapper: Any, problem: Problem, plan: Callable[..., Any]) -> Call:
    shape = problem.shape
    plan = functools.partial(
        plan,
        num_qo_heads=shape.qo_heads,
        num_kv_heads=shape.kv_heads,
        page_size=shape.page_size,
        q_data_type=torch.bfloat16,
        kv_data_type=DTYPES[shape.kv_dtype],
    )
    plan()
    caches = list(zip(problem.k, problem.v, strict=True))
    return Call(lambda i: wrapper.run(problem.q, caches[i % len(caches)], out=problem.out), plan)


class FlashInferRagged:
    """FlashInfer's FA3 prefill over K and V without pages."""

    name = "fi ragged"

    def __init__(self, workspace: torch.Tensor) -> None:
        module = importlib.import_module("flashinfer")
        self._wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")

    def call(self, problem: Problem) -> Call:
        shape, wrapper = problem.shape, self._wrapper
        if shape.kind != "prefill":
            raise Refused("prefill only")
        if shape.kv_dtype != "bf16":
            raise Refused("bf16 q with fp8 K/V")

        def plan() -> None:
            wrapper.plan(
                problem.qo_indptr,
                problem.kv_indptr,
                shape.qo_heads,
                shape.kv_heads,
                shape.head_dim,
                causal=True,
                q_data_type=torch.bfloat16,
            )

        plan()
        caches = problem.dense
        return Call(lambda i: wrapper.run(problem.q, *caches[i % len(caches)], out=problem.out), plan)


class FlashAttention3:
    """FlashAttention-3's forward for inference, over pages or without; what it schedules by is made in `plan`."""

    def __init__(self, name: str, *, paged: bool) -> None:
        self.name = name
        self._paged = paged
        self._module = importlib.import_module("fa3_fwd_interface")

    def call(self, problem: Problem) -> Call:
        shape = problem.shape
        if shape.kv_dtype != "bf16":
            raise Refused("bf16 q with fp8 K/V")
        kv_lens = problem.kv_lens.cuda()
        if self._paged:
            caches = list(zip(problem.k, problem.v, strict=True))
            counts = torch.diff(problem.indptr)
            pages = torch.zeros(shape.batch, int(counts.max()), dtype=torch.int32)
            for r in range(shape.batch):
                pages[r, : counts[r]] = problem.indices[problem.indptr[r] : problem.indptr[r + 1]]
            options: dict[str, Any] = {"page_table": pages.cuda()}
        else:
            caches, options = problem.dense_batches, {}
        q = problem.q.view(shape.batch, shape.qo_len, shape.qo_heads, shape.head_dim)
        causal = shape.qo_len > 1

        def plan() -> None:
            options["scheduler_metadata"] = self._module.get_scheduler_metadata(
                shape.batch,
                shape.qo_len,
                max(shape.kv_lens),
                shape.qo_heads,
                shape.kv_heads,
                shape.head_dim,
                kv_lens,
                page_size=shape.page_size if self._paged else None,
                causal=causal,
            )

        plan()

        def run(i: int) -> torch.Tensor:
            k, v = caches[i % len(caches)]
            return self._module.flash_attn_with_kvcache(q, k, v, cache_seqlens=kv_lens, causal=causal, **options)

        return Call(run, plan)


class Sdpa:
    """PyTorch's attention with one of its backends, over K and V without pages."""

    def __init__(self, name: str, backend: str) -> None:
        self.name = name
        attention = importlib.import_module("torch.nn.attention")
        self._backend = getattr(attention.SDPBackend, backend)
        self._choose = attention.sdpa_kernel
        self._lower_right = importlib.import_module("torch.nn.attention.bias").causal_lower_right

    def call(self, problem: Problem) -> Call:
        shape = problem.shape
        caches = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in problem.dense_batches]
        q = problem.q.view(shape.batch, shape.qo_len, shape.qo_heads, shape.head_dim).transpose(1, 2)
        options: dict[str, Any] = {"enable_gqa": shape.qo_heads != shape.kv_heads}
        if shape.qo_len == shape.kv_lens[0]:
            options["is_causal"] = True
        elif shape.qo_len > 1 and self._backend.name == "FLASH_ATTENTION":
            options["attn_mask"] = self._lower_right(shape.qo_len, shape.kv_lens[0])
        elif shape.qo_len > 1:  # cuDNN aligns a causal mask to the first key only
            seen = torch.ones(shape.qo_len, shape.kv_lens[0], dtype=torch.bool, device="cuda")
            options["attn_mask"] = seen.tril(shape.kv_lens[0] - shape.qo_len)

        def run(i: int) -> torch.Tensor:
            k, v = caches[i % len(caches)]
            with self._choose(self._backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

        return Call(run)


def contestants(path: Path, stream: torch.cuda.Stream) -> tuple[Ours, list[Contestant], dict[str, str]]:
    """Ours, the rivals that load, and why the others do not, by name."""
    ours = Ours(path, stream)
    workspace = torch.zeros(_FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    makers: dict[str, Callable[[], Contestant]] = {
        "fi core": lambda: FlashInferCore(workspace),
        "fi fa2": lambda: FlashInferTiles(workspace),
        "fi fa3": lambda: FlashInferHopper(workspace),
        "fi ragged": lambda: FlashInferRagged(workspace),
        "fa3 paged": lambda: FlashAttention3("fa3 paged", paged=True),
        "fa3 dense": lambda: FlashAttention3("fa3 dense", paged=False),
        "sdpa flash": lambda: Sdpa("sdpa flash", "FLASH_ATTENTION"),
        "sdpa cudnn": lambda: Sdpa("sdpa cudnn", "CUDNN_ATTENTION"),
    }
    rivals, missing = [], {}
    for name, make in makers.items():
        try:
            rivals.append(make())
        except Exception as error:  # whatever a rival's import raises is its reason
            missing[name] = reason(error)
    return ours, rivals, missing


def reason(error: Exception) -> str:
    """The first line of what an exception says, without its middle where it is long."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 180 else f"{text[:60]} ... {text[-110:]}"
