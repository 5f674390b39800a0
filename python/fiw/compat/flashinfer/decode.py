"""One query token a request (or a few, in speculative decoding) over a paged cache, or over plain K and V."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import numpy as np
import torch

from fiw.compat.flashinfer._engines import ReadByEngines, fixed_buffer
from fiw.compat.flashinfer._graph import FixedBuffers, GraphRuns, PlanShape
from fiw.compat.flashinfer._paged import PagedPlan, page_table, planned
from fiw.compat.flashinfer._terms import (
    DTypeLike,
    PagedKv,
    Scale,
    Variant,
    check_backend,
    checked_kv_layout,
    not_covered,
    refuse,
    resolve_dtypes,
    split_tokens,
    workspace_of,
)
from fiw.compat.flashinfer.page import get_seq_lens
from fiw.compat.flashinfer.prefill import single_prefill_with_kv_cache

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "get_seq_lens",  # engines import it from here
    "single_decode_with_kv_cache",
]


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one token, q [num_qo_heads, head_dim], over k and v [kv_len, num_kv_heads, head_dim] (NHD).

    Returns out [num_qo_heads, head_dim], and the base-2 LSE [num_qo_heads] on request. With pos_encoding_mode
    "ROPE_LLAMA", each call rotates a copy of k. `use_tensor_cores` is a hint without effect here.
    """
    scale = (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale) * (1.0 if q_scale is None else q_scale)
    out, lse = single_prefill_with_kv_cache(
        q.unsqueeze(0),
        k,
        v,
        kv_layout=kv_layout,
        pos_encoding_mode=pos_encoding_mode,
        sm_scale=scale,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        return_lse=True,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return (out[0], lse[0]) if return_lse else out[0]


class BatchDecodeWithPagedKVCacheWrapper(ReadByEngines):
    """Decode attention for a batch over a paged cache: plan() once a step, run() once a layer.

    `float_workspace_buffer` names a workspace and its device; nothing is written to it. Wrappers with the same buffer
    share plans, and take one thread at a time. `use_tensor_cores` is a hint without effect here.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_backend(backend)
        refuse(jit_args=jit_args, jit_kwargs=jit_kwargs)
        self.device = float_workspace_buffer.device
        self._buffer = float_workspace_buffer
        self._kv_layout = checked_kv_layout(kv_layout)
        self._use_cuda_graph = use_cuda_graph
        self._use_tensor_cores = use_tensor_cores
        self._plan: PagedPlan | None = None
        self._batch_size = 0
        self._fixed: FixedBuffers | None = None
        self._graph_runs: GraphRuns | None = None
        if use_cuda_graph:
            required = {
                "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
                "paged_kv_indices_buffer": paged_kv_indices_buffer,
                "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
            }
            self._fixed = FixedBuffers(required, {})
            self._fixed.check_length("paged_kv_indptr_buffer", "paged_kv_last_page_len_buffer", 1)
            self._graph_runs = GraphRuns(
                len(self._fixed["paged_kv_last_page_len_buffer"]), len(self._fixed["paged_kv_indices_buffer"])
            )

    _paged_kv_indptr_buf = fixed_buffer("paged_kv_indptr_buffer")
    _paged_kv_indices_buf = fixed_buffer("paged_kv_indices_buffer")
    _paged_kv_last_page_len_buf = fixed_buffer("paged_kv_last_page_len_buffer")

    def _options(self) -> Variant:
        return planned(self._plan).variant

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """From the next plan() on, plans are those of the new float buffer's workspace."""
        self._buffer = float_workspace_buffer

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: DTypeLike | None = "float16",
        kv_data_type: DTypeLike | None = None,
        o_data_type: DTypeLike | None = None,
        data_type: DTypeLike | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Plans the batch of `indptr` [batch + 1], `indices` [indptr[-1]] and `last_page_len` [batch].

        Equal contents find the plan that the workspace has. `block_tables` repeat `indices` and are not read;
        `seq_lens`, if given, must be the lengths that the table says.

        With pos_encoding_mode "ROPE_LLAMA", each run() rotates a copy of the batch's pages (with use_cuda_graph=True,
        of as many as `paged_kv_indices_buffer` holds): a pass over K and V that rotating before the append saves.
        """
        refuse(use_token_head_sf=use_token_head_sf)
        if window_right != 0:
            raise not_covered(f"window_right {window_right}, only 0")
        if q_len_per_req < 1:
            raise ValueError(f"q_len_per_req is {q_len_per_req}, expected at least 1")
        if is_causal is not None and is_causal != (q_len_per_req > 1):
            raise not_covered(f"is_causal {is_causal} with q_len_per_req {q_len_per_req}")
        variant = Variant.of(pos_encoding_mode, True, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        dtypes = resolve_dtypes(
            data_type if q_data_type is None else q_data_type,
            data_type if kv_data_type is None else kv_data_type,
            o_data_type,
        )
        batch_size = len(last_page_len)
        table = page_table(indptr, indices, last_page_len, page_size, seq_lens)
        if q_len_per_req > 1 and batch_size and min(table.kv_lens) < q_len_per_req:
            raise ValueError(f"a request has {min(table.kv_lens)} tokens, expected q_len_per_req = {q_len_per_req}")
        copies = {}
        if self._fixed is not None:
            copies = self._fixed.check(
                {"paged_kv_indptr_buffer": indptr, "paged_kv_last_page_len_buffer": last_page_len},
                {"paged_kv_indices_buffer": indices},
            )
        workspace = workspace_of(self._buffer, split_tokens(fixed_split_size, disable_split_kv, page_size))
        plan = PagedPlan(
            PlanShape(
                workspace,
                page_size,
                (num_qo_heads, num_kv_heads),
                (head_dim, head_dim),
                dtypes,
                window=q_len_per_req,
                masked=False,
            ),
            table,
            np.arange(batch_size + 1, dtype=np.int32) * q_len_per_req,
            variant,
            self.device,
            verify=q_len_per_req > 1,
            graph_runs=self._graph_runs,
        )
        if self._fixed is not None:
            self._fixed.fill(copies, non_blocking)
        self._plan = plan
        self._batch_size = batch_size

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
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: PagedKv | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of q [batch * q_len_per_req, num_qo_heads, head_dim]; returns out of its shape, and the base-2 LSE
        float32 [rows, num_qo_heads] on request. `enable_pdl` is a hint without effect here.
        """
        refuse(
            arguments_of_custom_kernels=args or None,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            kv_cache_sf=kv_cache_sf,
        )
        plan = planned(self._plan)
        if q_len_per_req is not None and q.shape[0] != self._batch_size * q_len_per_req:
            expected = f"{self._batch_size} * q_len_per_req = {self._batch_size * q_len_per_req}"
            raise ValueError(f"q has {q.shape[0]} rows, expected {expected}")
        return plan.run(
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
        )

    run_return_lse = partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedKv,
        pos_encoding_mode: str = "NONE",
        q_scale: Scale | None = None,
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
            pos_encoding_mode, True, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """BatchDecodeWithPagedKVCacheWrapper with a fixed batch size, whose plan() also fills the caller's buffers."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: DTypeLike | None = None,
    kv_data_type: DTypeLike | None = None,
    data_type: DTypeLike | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """plan(), for engines that put `partial(fast_decode_plan, wrapper)` in its place.

    `global_override_indptr_cpu` is `indptr` on the host, which saves waiting for the device to read it.
    """
    BatchDecodeWithPagedKVCacheWrapper.plan(
        self,
        indptr if global_override_indptr_cpu is None else global_override_indptr_cpu,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        q_data_type=q_data_type,
        kv_data_type=kv_data_type,
        data_type=data_type,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        non_blocking=non_blocking,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )
