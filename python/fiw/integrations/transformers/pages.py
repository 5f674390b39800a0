"""Which pages of the KV cache each request of a batch holds. Host bookkeeping: no tensor is touched here."""

from collections.abc import Sequence

import fiw


class PagedRows:
    """The requests of a batch, their tokens and their pages; every layer of the model uses the same page numbers.

    Requests may share pages. A page is free once nobody holds it, and the page freed last is the next one taken.
    """

    def __init__(self, page_size: int, num_pages: int | None) -> None:
        """`num_pages` None: the pool doubles when it runs out of pages."""
        self.page_size = page_size
        self.fixed = num_pages is not None
        self.pages: list[list[int]] = []
        self.lengths: list[int] = []
        self._holders = [0] * (num_pages or 0)
        self._free = list(reversed(range(len(self._holders))))
        self._table: fiw.PageTable | None = None

    @property
    def num_pages(self) -> int:
        """Pages in the pool, free or not."""
        return len(self._holders)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def table(self) -> fiw.PageTable:
        """The page table of the batch as it stands."""
        if self._table is None:
            self._table = fiw.PageTable.from_pages(self.page_size, self.num_pages, self.pages, self.lengths)
        return self._table

    def append(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Makes room for `counts` more tokens of each request; to an empty batch, it adds that many requests.

        Returns (from, to) pairs of pages: a page that others hold too is not written to, so its contents must be copied
        before the tokens are. Raises MemoryError, having changed nothing, when a fixed pool has too few pages.
        """
        lengths = self.lengths or [0] * len(counts)
        if len(lengths) != len(counts):
            raise ValueError(f"batch: {len(counts)} requests, expected {len(lengths)}, as the cache holds")
        shared = self._shared_last_pages(counts)
        gains = [
            self._pages_of(length + count) - self._pages_of(length)
            for length, count in zip(lengths, counts, strict=True)
        ]
        self._reserve(sum(gains) + len(shared))

        self.lengths = lengths
        self.pages = self.pages or [[] for _ in counts]
        copies = []
        for row in shared:
            source = self.pages[row][-1]
            self.pages[row][-1] = self._take()
            self._holders[source] -= 1
            copies.append((source, self.pages[row][-1]))
            self._table = None
        new_pages = []
        for row, gain in enumerate(gains):
            taken = [self._take() for _ in range(gain)]
            self.pages[row].extend(taken)
            self.lengths[row] += counts[row]
            new_pages.extend(taken)
        if self._table is not None:
            self._table.advance(counts, new_pages)
        return copies

    def crop(self, counts: Sequence[int]) -> None:
        """Takes the last `counts` tokens from each request, and frees the pages that this empties."""
        if any(count > length for count, length in zip(counts, self.lengths, strict=True)):
            raise ValueError(f"crop: {list(counts)} tokens, expected at most {self.lengths}")
        self.lengths = [length - count for length, count in zip(self.lengths, counts, strict=True)]
        for pages, length in zip(self.pages, self.lengths, strict=True):
            keep = self._pages_of(length)
            self._release(pages[keep:])
            del pages[keep:]
        self._table = None

    def select(self, rows: Sequence[int]) -> None:
        """Makes the batch of these rows of it, in this order. A row named twice shares its pages."""
        pages = [list(self.pages[row]) for row in rows]
        for held in pages:
            for page in held:
                self._holders[page] += 1
        for held in self.pages:
            self._release(held)
        self.pages = pages
        self.lengths = [self.lengths[row] for row in rows]
        self._table = None

    def clear(self) -> None:
        """Back to an empty batch, and all pages free."""
        self.select([])

    def __getstate__(self) -> dict[str, object]:
        """For copies: the table is made again when it is needed."""
        return {**self.__dict__, "_table": None}

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _shared_last_pages(self, counts: Sequence[int]) -> list[int]:
        """The requests that must not write to their last page. The last of a page's holders may."""
        holders: dict[int, int] = {}
        shared = []
        for row, (pages, length) in enumerate(zip(self.pages, self.lengths, strict=True)):
            if counts[row] == 0 or length % self.page_size == 0:
                continue
            page = pages[-1]
            left = holders.setdefault(page, self._holders[page])
            if left > 1:
                shared.append(row)
                holders[page] = left - 1
        return shared

    def _reserve(self, pages: int) -> None:
        missing = pages - self.num_free
        if missing <= 0:
            return
        if self.fixed:
            raise MemoryError(
                f"num_pages: {self.num_pages} pages of {self.page_size} tokens, {self.num_free} of them free, "
                f"expected {pages} free ones"
            )
        first = self.num_pages
        self._holders.extend([0] * max(missing, first))
        self._free[:0] = reversed(range(first, self.num_pages))
        self._table = None  # it was checked against the smaller pool

    def _take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def _release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)
