"""What the wrappers over a paged cache share: one plan() call, and the steps that run() asks of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

import fiw
from fiw.compat.flashinfer._terms import (
    BASE_2,
    LseForm,
    PagedKv,
    Scale,
    Variant,
    alibi_shift,
    alibi_slopes,
    check_not_capturing,
    host_int32,
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
        workspace: fiw.FlashInferWorkspace,
        table: fiw.PageTable,
        qo_indptr: np.ndarray,
        heads: tuple[int, int],
        head_dims: tuple[int, int],
        dtypes: tuple[torch.dtype, torch.dtype],
        variant: Variant,
        *,
        window: int = 0,
        mask: fiw.PackedMask | None = None,
    ) -> None:
        """`window`: the query tokens of every request, where plan() was told that they are as many; else 0."""
        self.variant = variant
        self._workspace = workspace
        self._table = table
        self._qo_indptr = qo_indptr
        self._heads = heads
        self._head_dims = head_dims
        self._dtypes = dtypes
        all_ones = mask is None and bool(np.all(np.diff(qo_indptr) == 1))
        self._window = 1 if all_ones else window
        self._mask = mask
        self._steps: dict[tuple[Variant, bool], fiw.AttentionStep] = {}
        self._alibi_shift: torch.Tensor | None = None
        self.step(variant, sinks=False)

    def step(self, variant: Variant, sinks: bool) -> fiw.AttentionStep:
        key = (variant, sinks)
        if key not in self._steps:
            spec = fiw.StepSpec(
                num_qo_heads=self._heads[0],
                num_kv_heads=self._heads[1],
                head_dim_qk=self._head_dims[0],
                head_dim_vo=self._head_dims[1],
                q_dtype=self._dtypes[0],
                kv_dtype=self._dtypes[1],
                lse=True,
                sinks=sinks,
                alibi=variant.alibi,
                custom_mask=self._mask is not None,
                **variant.options(),
            )
            self._steps[key] = self._plan(spec)
        return self._steps[key]

    def _plan(self, spec: fiw.StepSpec) -> fiw.AttentionStep:
        if self._window == 1:
            return self._workspace.plan_decode(self._table, spec)
        if 1 < self._window <= _MAX_VERIFY_WINDOW:
            return self._workspace.plan_verify(self._window, self._table, spec)
        return self._workspace.plan_prefill(self._qo_indptr, self._table, spec)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedKv,
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
        check_not_capturing(q.device)
        variant = self.variant
        if window_left is not None:
            variant = replace(variant, window_left=max(-1, window_left))
        k, v = (side.detach() for side in unpack_paged_kv_cache(paged_kv_cache, kv_layout))
        # Logits take k_scale and q_scale alike, and a cache's scales are no part of a plan.
        cache = fiw.KvCache(
            k,
            v,
            kv_layout,
            k_scale=scalar("q_scale", q_scale) * scalar("k_scale", k_scale),
            v_scale=scalar("v_scale", v_scale),
        )
        sinks = variant.check_sinks(sinks)
        step = self.step(variant, sinks is not None)
        if out is None:
            out = torch.empty(*q.shape[:-1], self._head_dims[1], dtype=q.dtype, device=q.device)
        natural = lse_form.buffer(q, lse) if return_lse else None
        step.run(
            q.detach(),
            cache,
            sinks=sinks,
            alibi_slopes=alibi_slopes(self._heads[0], q.device) if variant.alibi else None,
            custom_mask=self._mask,
            out=out,
            lse=natural,
        )
        if natural is None:
            return out
        return out, lse_form.finish(natural, lse, self._shift(q.device) if variant.alibi else None)

    def _shift(self, device: torch.device) -> torch.Tensor:
        if self._alibi_shift is None:
            self._alibi_shift = alibi_shift(np.diff(self._qo_indptr), self._table.kv_lens, device)
        return self._alibi_shift
