"""What the wrappers over a paged cache share: one plan() call, and the steps that run() asks of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

import fiw
from fiw.compat.flashinfer._graph import MAX_WINDOW, GraphRuns, PlanShape
from fiw.compat.flashinfer._rope import RotatedPages, own_pages
from fiw.compat.flashinfer._terms import (
    BASE_2,
    LseForm,
    PagedKv,
    Scale,
    Variant,
    alibi_shift,
    alibi_slopes,
    check_not_capturing,
    check_planned,
    current_stream,
    host_int32,
    is_capturing,
    scalar,
    unpack_paged_kv_cache,
)
from fiw.kv_cache import Layout

Plan = TypeVar("Plan")

_MAX_VERIFY_WINDOW = 64


def page_table(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    page_size: int,
    seq_lens: torch.Tensor | None,
) -> fiw.PageTable:
    """FlashInfer's arrays as a table; `indices` may be longer than `indptr` says. `seq_lens`, if given, must be its."""
    starts = host_int32("indptr", indptr)
    pages = host_int32("indices", indices)
    if starts.size == 0 or starts[0] < 0 or starts[-1] > pages.size:
        raise ValueError(f"indptr is {starts}, expected batch_size + 1 places in indices, which has {pages.size}")
    pages = pages[starts[0] : starts[-1]]
    starts -= starts[0]
    # The cache is not known yet; its number of pages is checked by each run.
    num_pages = int(pages.max(initial=-1)) + 1
    table = fiw.PageTable(page_size, num_pages, starts, pages, host_int32("last_page_len", last_page_len))
    if seq_lens is not None and not np.array_equal(host_int32("seq_lens", seq_lens), table.kv_lens):
        raise ValueError(f"seq_lens is {seq_lens.tolist()}, expected the lengths of the table, {list(table.kv_lens)}")
    return table


def planned(plan: Plan | None) -> Plan:
    if plan is None:
        raise RuntimeError("plan() has not been called, expected before run()")
    return plan


class PagedPlan:
    """What plan() was told. Steps are made when asked for: one now, more when run() or forward() change an option."""

    def __init__(
        self,
        shape: PlanShape,
        table: fiw.PageTable,
        qo_indptr: np.ndarray,
        variant: Variant,
        device: torch.device,
        *,
        verify: bool = False,
        mask: fiw.PackedMask | None = None,
        graph_runs: GraphRuns | None = None,
        graph_mask: fiw.PackedMask | None = None,
    ) -> None:
        """`verify`: the queries are a window of drafts. `graph_runs`, `graph_mask`: of a wrapper with
        use_cuda_graph=True, the latter its buffers, which will hold `mask`.
        """
        self.variant = variant
        self._shape = shape
        self._table = table
        self._device = device
        self._qo_indptr = qo_indptr
        self._verify = verify
        self._mask = mask
        self._graph_runs = graph_runs
        self._graph_mask = graph_mask
        self._steps: dict[fiw.StepSpec, fiw.AttentionStep] = {}
        self._alibi_shift: torch.Tensor | None = None
        self._rotated: tuple[RotatedPages, PagedPlan] | None = None
        prepared = graph_runs is not None and graph_runs.prepare(shape, table, device)
        if variant.rope is None and not prepared:
            self._step(self._spec(variant, sinks=False))
        if variant.rope is not None or (graph_runs is not None and graph_runs.copies is not None):
            self._over_rotated_pages()

    def _spec(self, variant: Variant, sinks: bool) -> fiw.StepSpec:
        return fiw.StepSpec(
            num_qo_heads=self._shape.heads[0],
            num_kv_heads=self._shape.heads[1],
            head_dim_qk=self._shape.head_dims[0],
            head_dim_vo=self._shape.head_dims[1],
            q_dtype=self._shape.dtypes[0],
            kv_dtype=self._shape.dtypes[1],
            lse=True,
            sinks=sinks,
            alibi=variant.alibi,
            custom_mask=self._shape.masked,
            **variant.options(),
        )

    def _step(self, spec: fiw.StepSpec) -> fiw.AttentionStep:
        if spec not in self._steps:
            self._steps[spec] = self._plan(spec)
        return self._steps[spec]

    def _plan(self, spec: fiw.StepSpec) -> fiw.AttentionStep:
        workspace, window = self._shape.workspace, self._shape.window
        if window == 1 and not self._shape.masked:
            return workspace.plan_decode(self._table, spec)
        if self._verify and window <= _MAX_VERIFY_WINDOW:
            return workspace.plan_verify(window, self._table, spec)
        return workspace.plan_prefill(self._qo_indptr, self._table, spec)

    def _over_rotated_pages(self) -> tuple[RotatedPages, PagedPlan]:
        """The same batch over rotated copies, of which a plan knows nothing but that they are of the type of q."""
        if self._rotated is None:
            check_not_capturing(self._device, "the first run() with pos_encoding_mode 'ROPE_LLAMA'")
            pages, graph_runs = RotatedPages(self._device), None
            if self._graph_runs is not None:
                pages, graph_runs = self._graph_runs.over_copies(self._device)
            plan = PagedPlan(
                replace(self._shape, dtypes=(self._shape.dtypes[0], self._shape.dtypes[0])),
                own_pages(self._table),
                self._qo_indptr,
                replace(self.variant, rope=None),
                self._device,
                verify=self._verify,
                mask=self._mask,
                graph_runs=graph_runs,
                graph_mask=self._graph_mask,
            )
            pages.fill(self._table, self._qo_indptr)
            self._rotated = pages, plan
        return self._rotated

    def run(
        self, q: torch.Tensor, paged_kv_cache: PagedKv, kv_layout: Layout, **options: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`options` are those of _run()."""
        k, v = (side.detach() for side in unpack_paged_kv_cache(paged_kv_cache, kv_layout))
        rope = self.variant.rope
        if rope is None:
            return self._run(q.detach(), k, v, kv_layout, **options)
        if kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        heads, head_dims, dtypes = self._shape.heads, self._shape.head_dims, self._shape.dtypes
        check_planned("q", q, (heads[0], head_dims[0]), dtypes[0])
        for name, side, head_dim in zip(("k_cache (as NHD)", "v_cache (as NHD)"), (k, v), head_dims, strict=True):
            check_planned(name, side, (self._shape.page_size, heads[1], head_dim), dtypes[1])
        pages, plan = self._over_rotated_pages()
        plan.variant = replace(self.variant, rope=None)
        return plan._run(*pages.take(rope, q.detach(), k, v), "NHD", **options)

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layout: Layout,
        *,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_form: LseForm = BASE_2,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        variant = self.variant
        if window_left is not None:
            variant = replace(variant, window_left=max(-1, window_left))
        # Logits take k_scale and q_scale alike, and a cache's scales are no part of a plan.
        cache = fiw.KvCache(
            k,
            v,
            kv_layout,
            k_scale=scalar("q_scale", q_scale) * scalar("k_scale", k_scale),
            v_scale=scalar("v_scale", v_scale),
        )
        sinks = variant.check_sinks(sinks)
        spec = self._spec(variant, sinks is not None)
        session = self._session(q, spec, cache.num_pages, return_lse)
        if out is None:
            out = torch.empty(*q.shape[:-1], self._shape.head_dims[1], dtype=q.dtype, device=q.device)
        natural = lse_form.buffer(q, lse) if return_lse else None
        slopes = alibi_slopes(self._shape.heads[0], q.device) if variant.alibi else None
        if session is None:
            self._step(spec).run(
                q, cache, sinks=sinks, alibi_slopes=slopes, custom_mask=self._mask, out=out, lse=natural
            )
        else:
            session.begin(self._table.batch, current_stream(q.device))
            session.run(
                q,
                cache,
                out,
                # A session's kernels must be given one where a window has no causal limit.
                lse=lse_form.buffer(q, None) if natural is None and variant.window_left >= 0 else natural,
                sinks=sinks,
                alibi_slopes=slopes,
                custom_mask=self._graph_mask,
            )
        if natural is None:
            return out
        return out, lse_form.finish(natural, lse, self._shift(q.device) if variant.alibi else None)

    def _session(
        self, q: torch.Tensor, spec: fiw.StepSpec, num_pages: int, return_lse: bool
    ) -> fiw.GraphSession | None:
        """What serves a captured run(), or any of a wrapper with use_cuda_graph=True on the CPU; None: a step does."""
        if self._graph_runs is None:
            check_not_capturing(q.device, "run() without use_cuda_graph=True")
            return None
        if spec.alibi and return_lse:  # whose LSE is moved by lengths of now
            check_not_capturing(q.device, "run() with ALiBi and return_lse=True")
            return None
        session = self._graph_runs.session(self._shape, spec, num_pages, self._table, q.device)
        if session is None:
            check_not_capturing(q.device, f"run() for {self._shape}, only 1 to {MAX_WINDOW},")
            return None
        if q.device.type == "cuda" and not is_capturing(q.device):
            return None
        rows = int(self._qo_indptr[-1])
        if q.ndim != 3 or q.shape[0] != rows:  # a session serves the first rows of longer tensors
            raise ValueError(f"q is [{', '.join(map(str, q.shape))}], expected {rows} rows, as planned")
        return session

    def _shift(self, device: torch.device) -> torch.Tensor:
        if self._alibi_shift is None:
            self._alibi_shift = alibi_shift(np.diff(self._qo_indptr), self._table.kv_lens, device)
        return self._alibi_shift


def uniform_window(qo_indptr: np.ndarray) -> int:
    """The query tokens of every request, where they are as many; else 0. Of no requests: 1."""
    lens = set(np.diff(qo_indptr).tolist()) or {1}
    return lens.pop() if len(lens) == 1 else 0
