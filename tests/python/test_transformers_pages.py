"""The page bookkeeping of the transformers integration, against a list of tokens for each request."""

import random

import pytest

pytest.importorskip("transformers", reason="skipped: transformers is not installed")

from fiw.integrations.transformers.pages import PagedRows


class Model:
    """What the pages must hold: written through the bookkeeping, compared with plain lists."""

    def __init__(self, rng: random.Random, page_size: int, num_pages: int | None) -> None:
        self.rng = rng
        self.rows = PagedRows(page_size, num_pages)
        self.slots: dict[tuple[int, int], int] = {}
        self.expected: list[list[int]] = []
        self.next_token = 0

    def append(self, counts: list[int]) -> None:
        before = list(self.rows.lengths) or [0] * len(counts)
        size = self.rows.page_size
        for source, target in self.rows.append(counts):
            for offset in range(size):
                self.slots[target, offset] = self.slots.get((source, offset), -1)
        self.expected = self.expected or [[] for _ in counts]
        for row, count in enumerate(counts):
            for position in range(before[row], before[row] + count):
                self.slots[self.rows.pages[row][position // size], position % size] = self.next_token
                self.expected[row].append(self.next_token)
                self.next_token += 1

    def crop(self, counts: list[int]) -> None:
        self.rows.crop(counts)
        self.expected = [row[: len(row) - count] for row, count in zip(self.expected, counts, strict=True)]

    def select(self, indices: list[int]) -> None:
        self.rows.select(indices)
        self.expected = [list(self.expected[index]) for index in indices]

    def check(self) -> None:
        size = self.rows.page_size
        rows = list(zip(self.rows.pages, self.rows.lengths, strict=True))
        held = [[self.slots[pages[i // size], i % size] for i in range(length)] for pages, length in rows]
        assert held == self.expected
        used = {page for pages in self.rows.pages for page in pages}
        assert all(len(pages) == -(-length // size) for pages, length in rows)
        assert len(used) + self.rows.num_free == self.rows.num_pages
        table = self.rows.table
        assert list(table.kv_lens) == self.rows.lengths
        assert list(table.indices) == [page for pages in self.rows.pages for page in pages]
        assert table.num_pages == self.rows.num_pages


@pytest.mark.parametrize("case", range(20))
def test_random_operations_keep_every_token(case: int, seed: int) -> None:
    rng = random.Random(seed)
    model = Model(rng, page_size=rng.choice((1, 2, 3, 4, 16)), num_pages=None)
    model.append([rng.randint(0, 9) for _ in range(rng.randint(1, 5))])
    for _ in range(60):
        batch = len(model.expected)
        match rng.choice(("append", "append", "append", "grow", "crop", "select")):
            case "append":
                model.append([1] * batch)
            case "grow":
                model.append([rng.randint(0, 7) for _ in range(batch)])
            case "crop":
                model.crop([rng.randint(0, len(row)) for row in model.expected])
            case "select":
                model.select([rng.randrange(batch) for _ in range(rng.randint(1, 5))])
        model.check()
    model.rows.clear()
    assert model.rows.num_free == model.rows.num_pages


def test_rows_share_pages_until_they_write() -> None:
    rows = PagedRows(page_size=4, num_pages=None)
    rows.append([6])
    rows.select([0, 0, 0])
    assert rows.pages[0] == rows.pages[1] == rows.pages[2]
    shared = rows.pages[0][1]
    copies = rows.append([1, 1, 1])
    assert [source for source, _ in copies] == [shared, shared]
    assert {pages[0] for pages in rows.pages} == {rows.pages[0][0]}
    assert len({pages[1] for pages in rows.pages}) == 3
    assert shared in {pages[1] for pages in rows.pages}


def test_full_pages_stay_shared() -> None:
    rows = PagedRows(page_size=4, num_pages=None)
    rows.append([8])
    rows.select([0, 0])
    assert rows.append([1, 1]) == []
    assert rows.pages[0][:2] == rows.pages[1][:2]


def test_freed_pages_are_taken_again() -> None:
    rows = PagedRows(page_size=2, num_pages=4)
    rows.append([8])
    rows.crop([3])
    assert rows.num_free == 1
    rows.append([3])
    assert sorted(rows.pages[0]) == [0, 1, 2, 3]


def test_a_fixed_pool_that_is_too_small_changes_nothing() -> None:
    rows = PagedRows(page_size=2, num_pages=4)
    with pytest.raises(MemoryError, match="num_pages: 4 pages of 2 tokens, 4 of them free, expected 5 free ones"):
        rows.append([9])
    rows.append([3, 2])
    pages, lengths = [list(held) for held in rows.pages], list(rows.lengths)
    with pytest.raises(MemoryError):
        rows.append([2, 3])
    assert (rows.pages, rows.lengths, rows.num_free) == (pages, lengths, 1)
    assert rows.append([1, 1]) == []


def test_a_pool_with_just_enough_pages_for_copies() -> None:
    rows = PagedRows(page_size=4, num_pages=3)
    rows.append([2])
    rows.select([0, 0, 0])
    assert len(rows.append([1, 1, 1])) == 2
    assert rows.num_free == 0


def test_bad_calls_are_refused() -> None:
    rows = PagedRows(page_size=4, num_pages=None)
    rows.append([3, 1])
    with pytest.raises(ValueError, match="batch: 3 requests, expected 2"):
        rows.append([1, 1, 1])
    with pytest.raises(ValueError, match=r"crop: \[2, 2\] tokens, expected at most \[3, 1\]"):
        rows.crop([2, 2])
    assert rows.lengths == [3, 1]
