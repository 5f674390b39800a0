"""Workspaces whose memory is a caller's."""

import gc
import sys
import threading

import numpy as np
import pytest

import fiw
from reference import assert_close, attend, random_batch


class Pool:
    """Memory of NumPy's; blocks begin with NaN, and freed ones are overwritten by it."""

    def __init__(self):
        self.blocks = {}
        self.allocated = 0
        self.threads = set()

    def allocate(self, num_bytes, alignment, stream):
        assert num_bytes > 0 and alignment & (alignment - 1) == 0 and stream == 0
        memory = np.full(num_bytes + alignment, 0xFF, np.uint8)
        address = -(-memory.ctypes.data // alignment) * alignment
        self.blocks[address] = memory, num_bytes
        self.allocated += num_bytes
        self.threads.add(threading.get_ident())
        return address

    def free(self, address, num_bytes, stream):
        memory, allocated = self.blocks.pop(address)
        assert (num_bytes, stream) == (allocated, 0)
        memory[:] = 0xFF


class Failing(Pool):
    """Fails by `fail`, from now until it is None."""

    fail = None

    def allocate(self, num_bytes, alignment, stream):
        return self.fail() if self.fail is not None else super().allocate(num_bytes, alignment, stream)


def check_decode(ws, rng, min_len=0):
    batch = random_batch(rng, min_len=min_len)
    q = rng.standard_normal((len(batch.kv_lens), batch.heads, batch.dim)).astype(np.float32)
    table = fiw.PageTable.from_pages(batch.page_size, batch.num_pages, batch.pages, batch.kv_lens)
    out = ws.decode(q, fiw.KvCache(batch.k, batch.v), table)
    keys, values = batch.gather(batch.k), batch.gather(batch.v)
    expected, _ = attend(q.astype(np.float64), [1] * len(q), keys, values)
    assert_close(out, expected, 2e-5)


def test_all_memory_is_the_pools_and_is_given_back(rng):
    pool = Pool()
    ws = fiw.FlashInferWorkspace.create("cpu", workspace_bytes=1 << 16, allocator=pool, cache_entries=2)
    assert pool.allocated >= 1 << 16
    for _ in range(20):
        check_decode(ws, rng)
    assert sum(num_bytes for _, num_bytes in pool.blocks.values()) >= ws.stats().float_scratch_bytes
    ws.invalidate_runtime_cache()
    check_decode(ws, rng)
    ws.close()
    assert not pool.blocks


def test_steps_and_sessions_keep_the_allocator(rng):
    pool = Pool()
    spec = fiw.StepSpec(num_qo_heads=2, num_kv_heads=1, head_dim_qk=16, q_dtype="float32", kv_dtype="float32")
    with fiw.FlashInferWorkspace.create("cpu", allocator=pool) as ws:
        table = fiw.PageTable.from_pages(4, 8, [[0]], [3])
        step = ws.plan_decode(table, spec)
        before = pool.allocated
        graph = fiw.GraphSession.decode(ws, [spec], max_batch=2, max_pages=8, page_size=4, num_pages=8)
        assert pool.allocated - before == graph.stats().bytes
    blocks = pool.blocks
    del pool, ws
    gc.collect()
    assert blocks
    del graph
    assert blocks
    del step
    gc.collect()
    assert not blocks


def nothing():
    return None


def no_address():
    return "here"


def error():
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("fail", "cause"),
    [(nothing, None), (error, KeyError("mine")), (no_address, TypeError("int"))],
    ids=["none", "raised", "no address"],
)
def test_out_of_memory(rng, fail, cause):
    pool = Failing()
    with fiw.FlashInferWorkspace.create("cpu", allocator=pool) as ws:
        pool.fail = fail
        spec = fiw.StepSpec(num_qo_heads=2, num_kv_heads=1, head_dim_qk=16)
        for take_memory in (
            lambda: fiw.FlashInferWorkspace.create("cpu", workspace_bytes=1 << 16, allocator=pool),
            lambda: fiw.GraphSession.decode(ws, [spec], max_batch=2, max_pages=8, page_size=4, num_pages=8),
        ):
            with pytest.raises(fiw.OutOfMemoryError, match="no memory for") as raised:
                take_memory()
            assert raised.value.bytes_needed > 0
            assert type(raised.value.__cause__) is type(cause) and str(cause or "") in str(raised.value.__cause__ or "")
        pool.fail = None
        check_decode(ws, rng)
    assert not pool.blocks


def test_addresses_are_checked(rng):
    pool = Failing()
    pool.fail = lambda: Pool.allocate(pool, 1 << 20, 64, 0) + 8
    pool.free = lambda address, num_bytes, stream: None
    with pytest.raises(fiw.InvalidArgumentError, match=r"allocator.allocate gave 0x.*, expected a multiple of 64"):
        fiw.FlashInferWorkspace.create("cpu", workspace_bytes=1 << 16, allocator=pool)
    for bad in (3, object(), type("Half", (), {"allocate": print})()):
        with pytest.raises(fiw.InvalidArgumentError, match=r"allocator is .*, expected an object with"):
            fiw.FlashInferWorkspace.create("cpu", allocator=bad)


def test_what_free_raises_is_unraisable(rng, monkeypatch):
    class Complaining(Pool):
        def free(self, address, num_bytes, stream):
            super().free(address, num_bytes, stream)
            raise KeyError("mine")

    pool, seen = Complaining(), []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: seen.append(event.exc_value))
    with fiw.FlashInferWorkspace.create("cpu", workspace_bytes=4096, allocator=pool) as ws:
        check_decode(ws, rng)
    assert not pool.blocks
    assert seen and all(isinstance(error, KeyError) for error in seen)


def test_threads_share_an_allocator(seed):
    pool, errors = Pool(), []

    def work(offset):
        try:
            rng = np.random.default_rng(seed + offset)
            with fiw.FlashInferWorkspace.create("cpu", num_threads=1, allocator=pool, cache_entries=1) as ws:
                for _ in range(20):
                    check_decode(ws, rng)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and not pool.blocks
    assert len(pool.threads) == 4


def test_pytorchs_pool(device, rng):
    torch = pytest.importorskip("torch", reason="skipped: no torch")
    from fiw.integrations.torch import CachingAllocator

    on_cuda = device.type == "cuda"
    held = torch.cuda.memory_allocated(device) if on_cuda else 0
    allocator = CachingAllocator(device)
    ws = fiw.FlashInferWorkspace.create(device, workspace_bytes=1 << 20, allocator=allocator)
    if on_cuda:
        assert torch.cuda.memory_allocated(device) >= held + (1 << 20)
    streams = [torch.cuda.Stream(device) for _ in range(2)] if on_cuda else [None] * 2
    for turn in range(20):
        batch = random_batch(rng, min_len=1)
        on_device = [torch.from_numpy(array).to(device) for array in (batch.k, batch.v)]
        host_q = rng.standard_normal((len(batch.kv_lens), batch.heads, batch.dim)).astype(np.float32)
        q = torch.from_numpy(host_q).to(device)
        table = fiw.PageTable.from_pages(batch.page_size, batch.num_pages, batch.pages, batch.kv_lens)
        if on_cuda:
            torch.cuda.synchronize(device)
        out = torch.full((*q.shape[:2], batch.dim_vo), float("nan"), device=device)
        if on_cuda:
            torch.cuda.synchronize(device)
        ws.decode(q, fiw.KvCache(*on_device), table, out=out, stream=streams[turn % 2])
        if on_cuda:
            torch.cuda.synchronize(device)
        keys, values = batch.gather(batch.k), batch.gather(batch.v)
        expected, _ = attend(host_q.astype(np.float64), [1] * len(host_q), keys, values)
        assert_close(out.cpu().numpy(), expected, 2e-5)
    ws.close()
    assert not allocator._blocks
    del q, out, on_device
    gc.collect()
    assert not on_cuda or torch.cuda.memory_allocated(device) == held
