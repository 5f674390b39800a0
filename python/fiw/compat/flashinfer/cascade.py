"""Merging of attention over disjoint sets of keys, and the wrappers that use it for shared prefixes."""

from __future__ import annotations

from typing import Any

import torch

from fiw.compat.flashinfer._terms import BASE_2, DTypeLike, PagedKv, natural, not_covered, workspace_on
from fiw.compat.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from fiw.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [rows, num_heads, head_dim] and base-2 LSE [rows, num_heads] over two sets of keys as those over both."""
    return _merge([(v_a, s_a), (v_b, s_b)])


def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None = None
) -> None:
    """Merges another state into `v` and `s`, only in the rows where `mask` [rows], if given, is true."""
    out, lse = merge_state(v, s, v_other, s_other)
    if mask is not None:
        merged = mask.to(torch.bool)
        out = torch.where(merged[:, None, None], out, v)
        lse = torch.where(merged[:, None], lse, s)
    v.copy_(out)
    s.copy_(lse)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges outputs [rows, num_states, num_heads, head_dim] and base-2 LSE [rows, num_states, num_heads]."""
    return _merge(list(zip(v.unbind(dim=1), s.unbind(dim=1), strict=True)))


def _merge(states: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [(out.detach(), natural(lse).contiguous()) for out, lse in states]
    out = torch.empty(parts[0][0].shape, dtype=parts[0][0].dtype, device=parts[0][0].device)
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    workspace_on(out.device).merge_states(parts, out=out, lse=lse)
    return out, BASE_2.finish(lse, None)


class MultiLevelCascadeAttentionWrapper:
    """Attention over a prefix tree: one level of pages for all of a batch, the next for parts of it, and so on.

    Each level is a BatchPrefillWithPagedKVCacheWrapper; their outputs are merged.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[torch.Tensor] | None = None,
    ) -> None:
        def of_level(buffers: list[torch.Tensor] | None, level: int) -> torch.Tensor | None:
            return None if buffers is None else buffers[level]

        self._use_cuda_graph = use_cuda_graph
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer,
                kv_layout,
                use_cuda_graph,
                qo_indptr_buf=of_level(qo_indptr_buf_arr, i),
                paged_kv_indptr_buf=of_level(paged_kv_indptr_buf_arr, i),
                paged_kv_indices_buf=of_level(paged_kv_indices_buf_arr, i),
                paged_kv_last_page_len_buf=of_level(paged_kv_last_page_len_buf_arr, i),
            )
            for i in range(num_levels)
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: list[torch.Tensor]
    ) -> None:
        for level, int_workspace_buffer in zip(self._levels, int_workspace_buffers, strict=True):
            level.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def plan(
        self,
        qo_indptr_arr: list[torch.Tensor],
        paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor],
        paged_kv_last_page_len: list[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """Plans each level with its arrays; `causal` is for the last one, whose keys are the queries' own."""
        if pos_encoding_mode == "ROPE_LLAMA":
            raise not_covered("pos_encoding_mode 'ROPE_LLAMA' in a cascade: each level counts positions from 0")
        arrays = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        for level, level_arrays in zip(self._levels, zip(*arrays, strict=True), strict=True):
            level.plan(
                *level_arrays,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and level is self._levels[-1],
                pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: PagedKv) -> torch.Tensor:
        """Attention of q [qo_indptr[-1], num_qo_heads, head_dim] over all levels' pages."""
        out, lse = self._levels[-1].run(q, paged_kv_cache, return_lse=True)
        for level in self._levels[:-1]:
            merge_state_in_place(out, lse, *level.run(q, paged_kv_cache, return_lse=True))
        return out

    forward = run


class _SharedPrefix:
    """K and V that all requests share lie outside of the pages, which hold the rest of each request."""

    _wrapper_class: type

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._kv_layout = kv_layout
        self._unique = self._wrapper_class(float_workspace_buffer, kv_layout)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        self._unique.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def end_forward(self) -> None:
        """FlashInfer's deprecated end of a step; does nothing, as there."""

    def _forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: PagedKv,
        sm_scale: float | None,
        **options: Any,
    ) -> torch.Tensor:
        out, lse = single_prefill_with_kv_cache(
            q, k_shared, v_shared, kv_layout=self._kv_layout, sm_scale=sm_scale, return_lse=True
        )
        unique = self._unique.forward_return_lse(q, unique_kv_cache, sm_scale=sm_scale, **options)
        merge_state_in_place(out, lse, *unique)
        return out


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Decode over a prefix that all requests share and pages of their own; deprecated in FlashInfer."""

    _wrapper_class = BatchDecodeWithPagedKVCacheWrapper

    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: DTypeLike = "float16",
    ) -> None:
        self._unique.plan(
            unique_kv_indptr,
            unique_kv_indices,
            unique_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            data_type=data_type,
        )

    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: PagedKv
    ) -> torch.Tensor:
        """q [batch, num_qo_heads, head_dim]; k_shared and v_shared [tokens, num_kv_heads, head_dim] (NHD)."""
        return self._forward(q, k_shared, v_shared, unique_kv_cache, None)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Prefill over a prefix that all requests share and pages of their own; deprecated in FlashInfer."""

    _wrapper_class = BatchPrefillWithPagedKVCacheWrapper

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        self._unique.plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
        )

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: PagedKv,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """q [qo_indptr[-1], num_qo_heads, head_dim]; k_shared and v_shared [tokens, num_kv_heads, head_dim] (NHD)."""
        return self._forward(q, k_shared, v_shared, unique_kv_cache, sm_scale, causal=causal)
