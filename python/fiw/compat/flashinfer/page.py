"""Writing new keys and values into a paged cache."""

from __future__ import annotations

import torch

from fiw.compat.flashinfer._terms import PagedKv, checked_kv_layout, unpack_paged_kv_cache


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tokens of each request, [batch]. As in FlashInfer, one without pages counts its `kv_last_page_len`."""
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The request and the position in it of each of `nnz` new rows, int32 [nnz] each.

    The rows append_indptr[r] .. append_indptr[r + 1) are the last ones that `seq_lens[r]` counts; rows that no request
    has get request -1 and position 0. Written to `batch_indices` and `positions` where those are given.
    """
    device = append_indptr.device
    outputs = []
    for name, given in (("batch_indices", batch_indices), ("positions", positions)):
        if given is None:
            given = torch.empty(nnz, dtype=torch.int32, device=device)
        elif given.shape != (nnz,) or given.dtype != torch.int32 or given.device != device:
            found = f"{tuple(given.shape)} of {given.dtype} on {given.device}"
            raise ValueError(f"{name} is {found}, expected ({nnz},) of torch.int32 on {device}")
        outputs.append(given)
    rows = torch.arange(nnz, dtype=append_indptr.dtype, device=device)
    requests = torch.searchsorted(append_indptr, rows, right=True) - 1
    batch = len(append_indptr) - 1
    owned = (requests >= 0) & (requests < batch)
    if batch == 0:
        outputs[0].fill_(-1)
        outputs[1].zero_()
        return outputs[0], outputs[1]
    of = requests.clamp(0, batch - 1)
    outputs[0].copy_(torch.where(owned, requests, -1))
    outputs[1].copy_(torch.where(owned, rows + seq_lens.to(device)[of] - append_indptr[of + 1], 0))
    return outputs[0], outputs[1]


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: PagedKv,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes row i of `append_key` and `append_value` [nnz, num_kv_heads, head_dim] to position `positions[i]` of
    request `batch_indices[i]`, in any order; rows of request -1 are skipped.

    The pages must be in the table already; `kv_last_page_len` is not read, as positions say all.
    """
    kv_layout = checked_kv_layout(kv_layout)
    device = append_key.device
    requests, tokens = batch_indices.to(device).long(), positions.to(device).long()
    kept = (requests >= 0).nonzero().squeeze(1)
    requests, tokens = requests[kept], tokens[kept]
    for cache, rows in zip(unpack_paged_kv_cache(paged_kv_cache, kv_layout), (append_key, append_value), strict=True):
        by_token = cache if kv_layout == "NHD" else cache.transpose(1, 2)
        page_size = by_token.shape[1]
        pages = kv_indices.to(device)[kv_indptr.to(device).long()[requests] + tokens // page_size].long()
        values = rows[kept].to(cache.dtype)
        if cache.dtype.itemsize == 1:  # index_put_ takes no fp8
            by_token, values = by_token.view(torch.uint8), values.view(torch.uint8)
        by_token[pages, tokens % page_size] = values
