"""pos_encoding_mode "ROPE_LLAMA": rotated copies of q and K, which attention reads in their place."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

import fiw


@dataclass(frozen=True)
class Rope:
    """FlashInfer's `rope_scale` and `rope_theta`."""

    scale: float
    theta: float

    @staticmethod
    def of(rope_scale: float | None, rope_theta: float | None) -> Rope:
        values = {
            "rope_scale": 1.0 if rope_scale is None else float(rope_scale),
            "rope_theta": 1e4 if rope_theta is None else float(rope_theta),
        }
        for name, value in values.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}, expected a finite value above 0, or None")
        return Rope(*values.values())

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """A copy of x [..., num_heads, head_dim] with its tokens at `positions` [...].

        Elements i and i + head_dim / 2 turn by position / scale / theta^(2 i / head_dim).
        """
        half = x.shape[-1] // 2
        exponents = torch.arange(half, dtype=torch.float64, device=x.device) / half
        # Angles in double precision: those of far positions are large, and only their remainder counts.
        angles = positions[..., None, None] * (self.theta**-exponents / self.scale)
        cos, sin = angles.cos().to(torch.float32), angles.sin().to(torch.float32)
        first, second = x.to(torch.float32).split(half, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def positions_before(ends: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """Of the last `lens[r]` tokens before position `ends[r]` of each request r; may be negative."""
    return np.repeat(ends - lens.cumsum(), lens) + np.arange(lens.sum())


def rotated_rows(
    rope: Rope, q: torch.Tensor, k: torch.Tensor, qo_indptr: np.ndarray, kv_indptr: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of q and k [rows, heads, head_dim] of a batch without pages."""
    for x_name, x, name, indptr in (("q", q, "qo_indptr", qo_indptr), ("k", k, "kv_indptr", kv_indptr)):
        if x.ndim != 3 or x.shape[2] % 2 != 0:
            found = f"[{', '.join(map(str, x.shape))}]"
            raise ValueError(f"{x_name} is {found}, expected rows, heads and an even head_dim")
        if indptr.size == 0 or indptr[0] != 0 or (np.diff(indptr) < 0).any() or indptr[-1] != len(x):
            raise ValueError(f"{name} is {indptr}, expected 0 to {len(x)}, the rows of {x_name}, without a decrease")
    kv_lens = np.diff(kv_indptr)
    queries = positions_before(kv_lens, np.diff(qo_indptr))
    keys = positions_before(kv_lens, kv_lens)
    return (
        rope.rotate(q, torch.from_numpy(queries).to(q.device)),
        rope.rotate(k, torch.from_numpy(keys).to(k.device)),
    )


def own_pages(table: fiw.PageTable) -> fiw.PageTable:
    """The table of RotatedPages: no page is shared, and they lie in the order of the requests."""
    order = np.arange(len(table.indices), dtype=np.int32)
    return fiw.PageTable(table.page_size, len(order), table.indptr, order, table.last_page_len)


class RotatedPages:
    """Copies of the pages of a table, one after the other: each is rotated for its place in its request."""

    def __init__(self, device: torch.device, capacity: int = 0) -> None:
        """Copies are of `capacity` pages where a table has less, so that captured ones serve all that fit."""
        self._device, self._capacity = device, capacity
        self._least_cache = 0
        self._smallest_cache: int | None = None
        self._pages = self._keys = self._queries = torch.empty(0, dtype=torch.int64, device=device)

    def check(self, table: fiw.PageTable) -> None:
        """Replays read the caches that take() was given."""
        if self._smallest_cache is not None and table.num_pages > self._smallest_cache:
            found = f"page {table.num_pages - 1}"
            raise ValueError(f"paged_kv_indices has {found}, expected pages below {self._smallest_cache}, as run() had")

    def fill(self, table: fiw.PageTable, qo_indptr: np.ndarray) -> None:
        """What take() is for from now on; arrays of the sizes of before stay at their addresses."""
        rest = (0, max(self._capacity - len(table.indices), 0))
        pages = np.pad(table.indices.astype(np.int64), rest)
        first = positions_before(table.page_counts, table.page_counts) * table.page_size
        self._least_cache = int(pages.max(initial=-1)) + 1
        self._pages = self._written(self._pages, pages)
        self._keys = self._written(self._keys, np.pad(first, rest)[:, None] + np.arange(table.page_size))
        self._queries = self._written(self._queries, positions_before(table.kv_lens, np.diff(qo_indptr)))

    def _written(self, buffer: torch.Tensor, values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return buffer.copy_(tensor) if buffer.shape == tensor.shape else tensor.to(self._device)

    def take(
        self, rope: Rope, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [rows, num_qo_heads, head_dim], and the pages of k and v [num_pages, page_size, num_kv_heads, head_dim] in
        the type of q.
        """
        if len(q) != len(self._queries):
            raise ValueError(f"q has {len(q)} rows, expected {len(self._queries)}, as planned")
        cache = min(len(k), len(v))
        if cache < self._least_cache:
            raise ValueError(f"paged_kv_cache has {cache} pages, expected at least {self._least_cache}, as planned")
        self._smallest_cache = cache if self._smallest_cache is None else min(cache, self._smallest_cache)
        k, v = (self._copied(side).to(q.dtype) for side in (k, v))
        return rope.rotate(q, self._queries), rope.rotate(k, self._keys), v

    def _copied(self, side: torch.Tensor) -> torch.Tensor:
        elements = side.view(torch.uint8) if side.element_size() == 1 else side  # not every PyTorch selects fp8
        return elements.index_select(0, self._pages).view(side.dtype)
