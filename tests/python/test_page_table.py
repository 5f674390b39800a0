"""Page tables: three ways in, one out, growth, and contents that no later change reaches."""

import gc

import numpy as np
import pytest

import fiw
from reference import random_batch


def csr(batch):
    counts = [len(pages) for pages in batch.pages]
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    indices = np.array([page for pages in batch.pages for page in pages], np.int32)
    last = [
        length - (count - 1) * batch.page_size if count else 0
        for length, count in zip(batch.kv_lens, counts, strict=True)
    ]
    return indptr, indices, np.array(last, np.int32)


def test_three_ways_to_build_one_table(rng):
    for _ in range(20):
        batch = random_batch(rng)
        indptr, indices, last = csr(batch)
        table = fiw.PageTable(batch.page_size, batch.num_pages, indptr, indices, last, batch.kv_lens)
        spare = [pages + [0] * int(rng.integers(0, 3)) for pages in batch.pages]
        assert table == fiw.PageTable.from_pages(batch.page_size, batch.num_pages, spare, batch.kv_lens)
        blocks, kv_lens = table.to_block_table(max_pages=90, pad=-7)
        assert blocks.shape == (table.batch, 90) and blocks.dtype == np.int32
        assert [row[row != -7].tolist() for row in blocks] == batch.pages
        assert table == fiw.PageTable.from_block_table(batch.page_size, batch.num_pages, blocks, kv_lens)
        assert table.to_block_table()[0].shape[1] == table.page_counts.max()
        assert (table.batch, table.page_size, table.num_pages) == (len(batch.kv_lens), batch.page_size, batch.num_pages)
        assert (table.total_kv, table.max_kv_len) == (sum(batch.kv_lens), max(batch.kv_lens))
        assert table.indptr.tolist() == indptr.tolist() and table.indices.tolist() == indices.tolist()
        assert table.last_page_len.tolist() == last.tolist() and table.kv_lens.tolist() == batch.kv_lens
        assert table.page_counts.tolist() == np.diff(indptr).tolist()


def test_torch_tensors_are_indices():
    torch = pytest.importorskip("torch", reason="skipped: no torch")
    arrays = [torch.tensor(values, dtype=torch.int32) for values in ([0, 2], [3, 1], [2])]
    assert fiw.PageTable(4, 5, *arrays) == fiw.PageTable(4, 5, [0, 2], (3, 1), np.array([2], np.int32))


def test_tables_on_the_device(ws, rng, framework):
    for _ in range(20):
        batch = random_batch(rng)
        indptr, indices, last = csr(batch)
        longer = np.concatenate([indices, np.full(int(rng.integers(0, 4)), -1, np.int32)])
        arrays = tuple(framework.put(array) for array in (indptr, longer, last))
        table = ws.read_table(arrays, batch.page_size, batch.num_pages)
        assert table == fiw.PageTable(batch.page_size, batch.num_pages, indptr, indices, last)
        before = ws.stats()
        version = int(rng.integers(1, 2**40))
        assert ws.read_table(arrays, batch.page_size, batch.num_pages, version=version) == table
        assert ws.read_table(fiw.DevicePageTable(*arrays), batch.page_size, batch.num_pages, version=version) == table
        assert ws.stats().tables_known == before.tables_known + 1
    late = indptr.copy()
    late[0] = 1
    for bad, message in (
        ((framework.put(indptr), framework.put(indices), framework.put(last[1:])), "last_page_len"),
        ((framework.put(indptr.astype(np.int64)), framework.put(indices), framework.put(last)), "table.indptr"),
        ((framework.put(late), framework.put(indices), framework.put(last)), r"indptr\[0\]"),
    ):
        if message == "table.indptr" and framework.kind.__module__.startswith("jax"):
            continue  # which has no int64
        with pytest.raises(fiw.InvalidArgumentError, match=message):
            ws.read_table(bad, batch.page_size, batch.num_pages)
    assert ws.read_table(arrays, batch.page_size, batch.num_pages) == table


def test_advance_matches_a_table_built_anew(rng):
    for _ in range(20):
        batch = random_batch(rng)
        table = fiw.PageTable.from_pages(batch.page_size, 1000, batch.pages, batch.kv_lens)
        growth = rng.integers(0, 30, table.batch).tolist()
        each = rng.random() < 0.5
        if not each:
            growth = growth[:1] * table.batch
        tokens = growth if each else growth[0]
        grown = [length + own for length, own in zip(batch.kv_lens, growth, strict=True)]
        new, pages = [], []
        for own, length in zip(batch.pages, grown, strict=True):
            fresh = rng.integers(0, 1000, -(-length // batch.page_size) - len(own)).tolist()
            pages.append(own + fresh)
            new += fresh
        if not each:
            assert table.pages_needed(tokens) == len(new)
        before, lengths = table.copy(), table.kv_lens
        table.advance(tokens, new)
        assert table == fiw.PageTable.from_pages(batch.page_size, 1000, pages, grown)
        assert before == fiw.PageTable.from_pages(batch.page_size, 1000, batch.pages, batch.kv_lens)
        assert lengths.tolist() == batch.kv_lens, "an array keeps showing what it was taken from"


def test_arrays_are_read_only_and_outlive_the_table():
    table = fiw.PageTable.from_pages(4, 10, [[7, 3], []], [6, 0])
    arrays = [table.indptr, table.indices, table.last_page_len, table.page_counts, table.kv_lens]
    del table
    gc.collect()
    assert [array.tolist() for array in arrays] == [[0, 2, 2], [7, 3], [2, 0], [2, 0], [6, 0]]
    for array in arrays:
        assert array.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_failed_advance_changes_nothing():
    table = fiw.PageTable.from_pages(4, 10, [[7, 3], [1]], [8, 3])
    before = table.copy()
    for arguments in ((-1,), (1,), (1, [2, 3]), (1, [10]), ([1, 2, 3],), ([1, -1],)):
        with pytest.raises(fiw.InvalidArgumentError):
            table.advance(*arguments)
        assert table == before
    table.advance(1, [2])
    assert table != before and table.kv_lens.tolist() == [9, 4]


def test_an_empty_batch():
    table = fiw.PageTable.from_pages(4, 10, [], [])
    assert table.batch == 0 and table.indices.tolist() == [] and table.to_block_table()[0].shape == (0, 0)
    assert table == fiw.PageTable(4, 10, [0], [], [])


def test_tables_compare_by_contents_and_do_not_hash():
    table = fiw.PageTable.from_pages(4, 10, [[1]], [3])
    assert table != fiw.PageTable.from_pages(4, 10, [[1]], [2]) and table != "table"
    with pytest.raises(TypeError, match="unhashable"):
        hash(table)
    assert repr(table) == "PageTable(batch=1, page_size=4, kv_lens=[3])"
