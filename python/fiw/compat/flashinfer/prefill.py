"""Any number of query tokens a request, over a paged cache or over plain K and V."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, partialmethod
from typing import Any

import numpy as np
import torch

import fiw
from fiw.compat.flashinfer._engines import ReadByEngines, fixed_buffer
from fiw.compat.flashinfer._graph import FixedBuffers, GraphRuns, PlanShape
from fiw.compat.flashinfer._masks import MultiItem, packed_mask
from fiw.compat.flashinfer._paged import PagedPlan, page_table, planned, uniform_window
from fiw.compat.flashinfer._rope import rotated_rows
from fiw.compat.flashinfer._terms import (
    BASE_2,
    DTypeLike,
    LseForm,
    PagedKv,
    Scale,
    Variant,
    alibi_shift,
    alibi_slopes,
    check_backend,
    check_not_capturing,
    check_planned,
    checked_kv_layout,
    host_int32,
    is_fp8,
    refuse,
    resolve_dtypes,
    scalar,
    split_tokens,
    token_major,
    workspace_of,
    workspace_on,
)
from fiw.compat.flashinfer.quantization import packbits


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [qo_len, num_qo_heads, head_dim_qk], the last tokens of one request, over its k and v
    [kv_len, num_kv_heads, head_dim] (NHD).

    Returns out [qo_len, num_qo_heads, head_dim_vo], and the base-2 LSE [qo_len, num_qo_heads] on request.
    `custom_mask` [qo_len, kv_len], or its bits as `packbits(mask, bitorder="little")` gives them, replaces `causal`.
    With pos_encoding_mode "ROPE_LLAMA", each call rotates a copy of k. `use_fp16_qk_reduction` is a permission that is
    not used.
    """
    refuse(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, kv_cache_sf=kv_cache_sf)
    check_backend(backend)
    kv_layout = checked_kv_layout(kv_layout)
    check_not_capturing(q.device, "single_prefill_with_kv_cache() or single_decode_with_kv_cache()")
    resolve_dtypes(q.dtype, k.dtype, o_dtype)
    scale = (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale) * scalar("k_scale", k_scale)
    variant = Variant.of(pos_encoding_mode, causal, window_left, logits_soft_cap, scale, rope_scale, rope_theta)
    k, v = token_major(k, kv_layout), token_major(v, kv_layout)
    indptrs = np.array([[0, len(q)], [0, len(k)]], dtype=np.int32)
    if packed_custom_mask is None and custom_mask is not None:
        packed_custom_mask = packbits(custom_mask.reshape(-1), bitorder="little")
    mask = None
    if packed_custom_mask is not None:
        ends = torch.tensor([0, packed_custom_mask.numel()], dtype=torch.int32, device=q.device)
        mask = fiw.PackedMask(packed_custom_mask.to(q.device), ends)
    return _ragged(
        workspace_on(q.device), q, k, v, indptrs[0], indptrs[1], variant, mask, v_scale=v_scale, return_lse=return_lse
    )


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)


def _ragged(
    workspace: fiw.FlashInferWorkspace,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: np.ndarray,
    kv_indptr: np.ndarray,
    variant: Variant,
    mask: fiw.PackedMask | None,
    *,
    v_scale: Scale | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_form: LseForm = BASE_2,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over k and v [total_kv, num_kv_heads, head_dim]. fp8 ones are widened to the type of q first."""
    q, k, v = q.detach(), k.detach(), v.detach()
    if is_fp8(k.dtype):
        k, v = k.to(q.dtype), v.to(q.dtype)
    if variant.rope is not None:
        q, k = rotated_rows(variant.rope, q, k, qo_indptr, kv_indptr)
    if out is None:
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    natural = lse_form.buffer(q, lse) if return_lse else None
    workspace.ragged_prefill(
        q,
        k,
        v,
        qo_indptr,
        kv_indptr,
        alibi_slopes=alibi_slopes(q.shape[1], q.device) if variant.alibi else None,
        custom_mask=mask,
        out=out,
        lse=natural,
        **variant.options(),
    )
    if v_scale is not None:
        out *= scalar("v_scale", v_scale)
    if natural is None:
        return out
    shift = alibi_shift(np.diff(qo_indptr), np.diff(kv_indptr), q.device) if variant.alibi else None
    return out, lse_form.finish(natural, lse, shift)


class BatchPrefillWithPagedKVCacheWrapper(ReadByEngines):
    """Prefill or append attention for a batch over a paged cache: plan() once a step, run() once a layer.

    `float_workspace_buffer` names a workspace and its device; nothing is written to it. Wrappers with the same buffer
    share plans, and take one thread at a time.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        check_backend(backend)
        refuse(jit_args=jit_args, jit_kwargs=jit_kwargs, variant_owns_mask=variant_owns_mask)
        if max_total_num_rows is not None and not use_cuda_graph:
            raise ValueError(f"max_total_num_rows is {max_total_num_rows}, expected None without use_cuda_graph=True")
        self.device = float_workspace_buffer.device
        self._buffer = float_workspace_buffer
        self._kv_layout = checked_kv_layout(kv_layout)
        self._use_cuda_graph = use_cuda_graph
        self._max_total_num_rows = max_total_num_rows
        self._plan: PagedPlan | None = None
        self._fixed: FixedBuffers | None = None
        self._graph_runs: GraphRuns | None = None
        if use_cuda_graph:
            required = {
                "qo_indptr_buf": qo_indptr_buf,
                "paged_kv_indptr_buf": paged_kv_indptr_buf,
                "paged_kv_indices_buf": paged_kv_indices_buf,
                "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
            }
            self._fixed = FixedBuffers(
                required, {"custom_mask_buf": custom_mask_buf, "mask_indptr_buf": mask_indptr_buf}
            )
            self._fixed.check_length("paged_kv_indptr_buf", "qo_indptr_buf", 0)
            self._fixed.check_length("paged_kv_last_page_len_buf", "qo_indptr_buf", -1)
            self._graph_runs = GraphRuns(
                len(self._fixed["paged_kv_last_page_len_buf"]), len(self._fixed["paged_kv_indices_buf"])
            )

    _qo_indptr_buf = fixed_buffer("qo_indptr_buf")
    _paged_kv_indptr_buf = fixed_buffer("paged_kv_indptr_buf")
    _paged_kv_indices_buf = fixed_buffer("paged_kv_indices_buf")
    _paged_kv_last_page_len_buf = fixed_buffer("paged_kv_last_page_len_buf")
    _custom_mask_buf = fixed_buffer("custom_mask_buf")
    _mask_indptr_buf = fixed_buffer("mask_indptr_buf")

    def _options(self) -> Variant:
        return planned(self._plan).variant

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """From the next plan() on, plans are those of the new float buffer's workspace."""
        self._buffer = float_workspace_buffer

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DTypeLike = "float16",
        kv_data_type: DTypeLike | None = None,
        o_data_type: DTypeLike | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Plans the batch: queries by `qo_indptr` [batch + 1], pages by the three arrays of the cache.

        `custom_mask` (flat, request after request, qo_len * kv_len each) or its bits (request after request, each from
        a byte of its own on) replaces `causal`. So does multi-item scoring: `prefix_len_ptr` [batch],
        `token_pos_in_items_ptr` (request after request, `token_pos_in_items_len` each) and `max_item_len_ptr` [batch],
        of which a mask is made here. Equal contents find the plan that the workspace has. `block_tables`, the maxima
        and `seq_lens_q` repeat the other arrays and are not read; `seq_lens`, if given, must be the lengths that the
        table says.

        With pos_encoding_mode "ROPE_LLAMA", each run() rotates a copy of the batch's pages (with use_cuda_graph=True,
        of as many as `paged_kv_indices_buf` holds): a pass over K and V that rotating before the append saves.
        """
        refuse(use_token_head_sf=use_token_head_sf)
        variant = Variant.of(pos_encoding_mode, causal, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        dtypes = resolve_dtypes(q_data_type, kv_data_type, o_data_type)
        table = page_table(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, seq_lens)
        query_starts = host_int32("qo_indptr", qo_indptr)
        if query_starts.size != table.batch + 1:
            raise ValueError(f"qo_indptr has {query_starts.size} elements, expected batch_size + 1 = {table.batch + 1}")
        mask = packed_mask(
            custom_mask,
            packed_custom_mask,
            MultiItem.of(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr),
            np.diff(query_starts),
            table.kv_lens,
            self.device,
        )
        rows, copies, graph_mask = self._max_total_num_rows, {}, None
        if self._fixed is not None:
            rows = _check_rows(query_starts, rows)
            copies = self._fixed.check(
                {
                    "qo_indptr_buf": qo_indptr,
                    "paged_kv_indptr_buf": paged_kv_indptr,
                    "paged_kv_last_page_len_buf": paged_kv_last_page_len,
                }
                | ({} if mask is None else {"mask_indptr_buf": mask.indptr}),
                {"paged_kv_indices_buf": paged_kv_indices} | ({} if mask is None else {"custom_mask_buf": mask.bits}),
            )
            if mask is not None:
                graph_mask = fiw.PackedMask(self._fixed["custom_mask_buf"], self._fixed["mask_indptr_buf"])
        plan = PagedPlan(
            PlanShape(
                workspace_of(self._buffer, split_tokens(fixed_split_size, disable_split_kv, page_size)),
                page_size,
                (num_qo_heads, num_kv_heads),
                (head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo),
                dtypes,
                window=uniform_window(query_starts),
                masked=mask is not None,
            ),
            table,
            query_starts,
            variant,
            self.device,
            mask=mask,
            graph_runs=self._graph_runs,
            graph_mask=graph_mask,
        )
        if self._fixed is not None:
            self._fixed.fill(copies, non_blocking)
        self._plan, self._max_total_num_rows = plan, rows

    begin_forward = plan

    def end_forward(self) -> None:
        """FlashInfer's deprecated end of a step; does nothing, as there."""

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedKv,
        *args: Any,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: PagedKv | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of q [qo_indptr[-1], num_qo_heads, head_dim_qk]; returns out with head_dim_vo, and on request the
        LSE, float32 [rows, num_qo_heads] ("NH") or [num_qo_heads, rows] ("HN"), base 2 ("log2") or natural ("ln").
        """
        refuse(
            arguments_of_custom_kernels=args or None,
            kv_cache_sf=kv_cache_sf,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            use_fp16_softmax=use_fp16_softmax,
            uses_spcompress=uses_spcompress,
        )
        return planned(self._plan).run(
            q,
            paged_kv_cache,
            self._kv_layout,
            window_left=window_left,
            sinks=sinks,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_form=LseForm(lse_base, lse_layout),
        )

    run_return_lse = partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedKv,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """FlashInfer's deprecated run(): these options replace, for good, those of plan()."""
        plan = planned(self._plan)
        plan.variant = Variant.of(
            pos_encoding_mode, causal, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(ReadByEngines):
    """Prefill attention for a batch over K and V that lie together, request after request.

    `float_workspace_buffer` names a workspace and its device; nothing is written to it. Wrappers with the same buffer
    share plans, and take one thread at a time.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        check_backend(backend)
        refuse(jit_args=jit_args, jit_kwargs=jit_kwargs, variant_owns_mask=variant_owns_mask)
        self.device = float_workspace_buffer.device
        self._buffer = float_workspace_buffer
        self._kv_layout = checked_kv_layout(kv_layout)
        self._use_cuda_graph = use_cuda_graph
        self._max_total_num_rows: int | None = None
        self._variant: Variant | None = None
        self._fixed: FixedBuffers | None = None
        if use_cuda_graph:
            self._fixed = FixedBuffers(
                {"qo_indptr_buf": qo_indptr_buf, "kv_indptr_buf": kv_indptr_buf},
                {"custom_mask_buf": custom_mask_buf, "mask_indptr_buf": mask_indptr_buf},
            )
            self._fixed.check_length("kv_indptr_buf", "qo_indptr_buf", 0)

    _qo_indptr_buf = fixed_buffer("qo_indptr_buf")
    _kv_indptr_buf = fixed_buffer("kv_indptr_buf")
    _custom_mask_buf = fixed_buffer("custom_mask_buf")
    _mask_indptr_buf = fixed_buffer("mask_indptr_buf")

    def _options(self) -> Variant:
        return planned(self._variant)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """From the next plan() on, plans are those of the new float buffer's workspace."""
        self._buffer = float_workspace_buffer

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DTypeLike = "float16",
        kv_data_type: DTypeLike | None = None,
        o_data_type: DTypeLike | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        qo_indptr_cpu: torch.Tensor | None = None,
        kv_indptr_cpu: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Takes the batch: queries by `qo_indptr` [batch + 1], keys and values by `kv_indptr` [batch + 1].

        The plan itself is made by the first run(), and found by the next. Masks and multi-item scoring are those of the
        paged wrapper; with pos_encoding_mode "ROPE_LLAMA", each run() rotates a copy of k.
        `seq_lens`, `seq_lens_q` and the maxima repeat the other arrays and are not read.
        """
        refuse(v_indptr=v_indptr, o_indptr=o_indptr, use_token_head_sf=use_token_head_sf)
        variant = Variant.of(pos_encoding_mode, causal, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        dtypes = resolve_dtypes(q_data_type, kv_data_type, o_data_type)
        query_starts = host_int32("qo_indptr", qo_indptr if qo_indptr_cpu is None else qo_indptr_cpu)
        key_starts = host_int32("kv_indptr", kv_indptr if kv_indptr_cpu is None else kv_indptr_cpu)
        if key_starts.size != query_starts.size:
            raise ValueError(f"kv_indptr has {key_starts.size} elements, expected {query_starts.size}, as qo_indptr")
        mask = packed_mask(
            custom_mask,
            packed_custom_mask,
            MultiItem.of(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr),
            np.diff(query_starts),
            np.diff(key_starts),
            self.device,
        )
        if self._fixed is not None:
            rows = _check_rows(query_starts, self._max_total_num_rows)
            copies = self._fixed.check(
                {"qo_indptr_buf": qo_indptr, "kv_indptr_buf": kv_indptr}
                | ({} if mask is None else {"mask_indptr_buf": mask.indptr}),
                {} if mask is None else {"custom_mask_buf": mask.bits},
            )
            self._fixed.fill(copies, non_blocking)
            self._max_total_num_rows = rows
        self._workspace = workspace_of(self._buffer, split_tokens(fixed_split_size, disable_split_kv, 1))
        self._variant, self._mask, self._dtypes = variant, mask, dtypes
        self._qo_indptr, self._kv_indptr = query_starts, key_starts
        self._heads = (num_qo_heads, num_kv_heads)
        self._head_dims = (head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo)

    begin_forward = plan

    def end_forward(self) -> None:
        """FlashInfer's deprecated end of a step; does nothing, as there."""

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: PagedKv | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of q [qo_indptr[-1], num_qo_heads, head_dim_qk] over k and v [kv_indptr[-1], num_kv_heads,
        head_dim] (NHD); returns what the paged wrapper does. As in FlashInfer, `k_scale` and `v_scale` scale fp8 K and
        V only, and `q_scale` nothing but fp8 queries, which are not covered.
        """
        refuse(arguments_of_custom_kernels=args or None, o_scale=o_scale, kv_cache_sf=kv_cache_sf)
        variant = planned(self._variant)
        check_not_capturing(q.device, "run() over a ragged cache")
        k, v = token_major(k, self._kv_layout), token_major(v, self._kv_layout)
        for name, tensor, heads, dim, dtype in (
            ("q", q, self._heads[0], self._head_dims[0], self._dtypes[0]),
            ("k", k, self._heads[1], self._head_dims[0], self._dtypes[1]),
            ("v", v, self._heads[1], self._head_dims[1], self._dtypes[1]),
        ):
            check_planned(name, tensor, (heads, dim), dtype)
        scaled = is_fp8(k.dtype)
        if scaled and k_scale is not None:
            sm_scale = self._head_dims[0] ** -0.5 if variant.sm_scale is None else variant.sm_scale
            variant = replace(variant, sm_scale=sm_scale * scalar("k_scale", k_scale))
        return _ragged(
            self._workspace,
            q,
            k,
            v,
            self._qo_indptr,
            self._kv_indptr,
            variant,
            self._mask,
            v_scale=v_scale if scaled else None,
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_form=LseForm(lse_base, lse_layout),
        )

    run_return_lse = partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """FlashInfer's deprecated run(): these options replace, for good, those of plan()."""
        planned(self._variant)
        self._variant = Variant.of(
            pos_encoding_mode, causal, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)


def _check_rows(qo_indptr: np.ndarray, most: int | None) -> int:
    """The rows that later plans with use_cuda_graph=True may have: what was declared, or what the first had."""
    rows = int(qo_indptr[-1])
    if most is not None and rows > most:
        raise ValueError(f"qo_indptr[-1] is {rows}, expected at most {most}, fixed by use_cuda_graph=True")
    return rows if most is None else most
