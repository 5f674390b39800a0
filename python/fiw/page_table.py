"""Which pages of the KV cache belong to which request."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fiw import _fiw
from fiw._tensors import Indices, Tensor, index_view, view


class DevicePageTable(NamedTuple):
    """A page table on a workspace's device, as an engine's kernels write it: int32, rank 1, compact.

    As a session's `live_table` the arrays have at least the lengths of its limits, and requests that are not there own
    no page.
    """

    indptr: Any
    """[batch + 1]."""
    indices: Any
    """[indptr[batch]] or more: what follows is ignored."""
    last_page_len: Any
    """[batch]."""


class PageTable:
    """CSR over pages: request i owns `indices[indptr[i]:indptr[i+1]]`; the last one holds `last_page_len[i]` tokens.

    Pages may be shared by several requests (prefix reuse). Threads may read one table while another advances it: a call
    works with the contents that it started with.
    """

    _table: _fiw.PageTable

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        indptr: Indices,
        indices: Indices,
        last_page_len: Indices,
        kv_lens: Indices | None = None,
    ) -> None:
        """From CSR arrays, int32 on the CPU, copied and validated.

        Args:
            page_size: tokens a page.
            num_pages: the size of the pool: indices are below it.
            indptr: [batch + 1], starts at 0, does not decrease.
            indices: [indptr[batch]], page ids.
            last_page_len: [batch], 1..page_size for a request with pages, ignored for one without (its length is 0).
            kv_lens: [batch] tokens; if given, must equal the lengths that the other three imply.

        Raises:
            InvalidArgumentError: names request, value and limit; the request is its `index`.
        """
        self._table = _fiw.PageTable.from_csr(
            page_size,
            num_pages,
            index_view("indptr", indptr),
            index_view("indices", indices),
            index_view("last_page_len", last_page_len),
            None if kv_lens is None else index_view("kv_lens", kv_lens),
        )

    @classmethod
    def _wrap(cls, table: _fiw.PageTable) -> PageTable:
        result = cls.__new__(cls)
        result._table = table
        return result

    @classmethod
    def from_pages(cls, page_size: int, num_pages: int, pages: Sequence[Sequence[int]], kv_lens: Indices) -> PageTable:
        """From one list of pages a request and `kv_lens` [batch] in tokens.

        Request i uses the first ceil(kv_lens[i] / page_size) of its pages; more are ignored (pages reserved ahead),
        fewer are an InvalidArgumentError.
        """
        return cls._wrap(
            _fiw.PageTable.from_pages(
                page_size,
                num_pages,
                index_view("pages", list(itertools.chain.from_iterable(pages))),
                index_view("page_counts", [len(request) for request in pages]),
                index_view("kv_lens", kv_lens),
            )
        )

    @classmethod
    def from_block_table(cls, page_size: int, num_pages: int, blocks: Tensor, kv_lens: Indices) -> PageTable:
        """From the padded form: `blocks` int32 [batch, max_pages] on the CPU, any row stride, and `kv_lens` [batch].

        Row i uses its first ceil(kv_lens[i] / page_size) entries; the rest is not read.
        """
        return cls._wrap(
            _fiw.PageTable.from_block_table(
                page_size, num_pages, view("blocks", blocks), index_view("kv_lens", kv_lens)
            )
        )

    def to_block_table(self, max_pages: int = 0, pad: int = -1) -> tuple[np.ndarray, np.ndarray]:
        """`(blocks [batch, max_pages], kv_lens [batch])`, int32; 0 columns: as many as the longest request needs."""
        columns = max_pages if max_pages != 0 else int(self.page_counts.max(initial=0))
        blocks = np.empty((self.batch, columns), np.int32)
        kv_lens = np.empty(self.batch, np.int32)
        self._table.to_block_table(pad, view("blocks", blocks), view("kv_lens", kv_lens))
        return blocks, kv_lens

    def advance(self, tokens: int | Indices, new_pages: Indices | None = None) -> None:
        """Every request grows by `tokens` (>= 0), or by its own entry of `tokens` [batch].

        `new_pages` lists the pages gained, in request order: exactly `pages_needed(tokens)` of them. Copies and steps
        made before keep the old contents.
        """
        pages = None if new_pages is None else index_view("new_pages", new_pages)
        if isinstance(tokens, (int, np.integer)):
            self._table.advance(int(tokens), pages)
        else:
            self._table.advance_each(index_view("tokens", tokens), pages)

    def pages_needed(self, tokens: int) -> int:
        """Pages that `advance(tokens)` would take."""
        return self._table.pages_needed(tokens)

    def copy(self) -> PageTable:
        """A second handle to the same contents; cheap."""
        return self._wrap(self._table.copy())

    def __eq__(self, other: object) -> bool:
        return self._table.equals(other._table) if isinstance(other, PageTable) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # advance changes what equality compares

    def __repr__(self) -> str:
        return f"PageTable(batch={self.batch}, page_size={self.page_size}, kv_lens={self.kv_lens.tolist()})"

    @property
    def batch(self) -> int:
        """Requests."""
        return self._table.batch

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._table.page_size

    @property
    def num_pages(self) -> int:
        """The pool that indices were checked against."""
        return self._table.num_pages

    @property
    def total_kv(self) -> int:
        """Tokens of all requests."""
        return self._table.total_kv

    @property
    def max_kv_len(self) -> int:
        """Tokens of the longest request."""
        return self._table.max_kv_len

    @property
    def indptr(self) -> np.ndarray:
        """int32 [batch + 1], read-only, as the four below; an array keeps showing the contents it was taken from."""
        return self._table.indptr

    @property
    def indices(self) -> np.ndarray:
        """[indptr[batch]], page ids."""
        return self._table.indices

    @property
    def last_page_len(self) -> np.ndarray:
        """[batch]; 0 for a request with no page."""
        return self._table.last_page_len

    @property
    def page_counts(self) -> np.ndarray:
        """[batch], pages of each request."""
        return self._table.page_counts

    @property
    def kv_lens(self) -> np.ndarray:
        """[batch], tokens of each request."""
        return self._table.kv_lens
