"""Graph sessions on the CPU: replays against float64, and what stops them."""

import contextlib
import gc
import threading
import time
import weakref

import numpy as np
import pytest

import fiw
from frameworks import has_cuda
from reference import assert_close, attend

ROUNDS = 8
STEPS = 6
TOLERANCE = 2e-5


class Engine:
    """Layers' tensors at addresses that stay, and random tables over a pool of pages."""

    def __init__(self, rng, window=1):
        self.rng, self.window = rng, window
        self.page_size = int(rng.integers(1, 9))
        self.kv_heads = int(rng.integers(1, 3))
        self.heads = self.kv_heads * int(rng.integers(1, 4))
        self.dim, self.dim_vo = 8 * int(rng.integers(1, 9)), 8 * int(rng.integers(1, 9))
        self.max_batch = int(rng.integers(1, 10))
        self.num_pages = int(rng.integers(8, 80))
        self.max_pages = int(rng.integers(4, self.num_pages + 1))
        slots = (self.num_pages, self.page_size, self.kv_heads)
        self.k, self.v = np.empty((*slots, self.dim), np.float32), np.empty((*slots, self.dim_vo), np.float32)
        self.cache = fiw.KvCache(self.k, self.v)
        rows = self.max_batch * window
        self.q = np.empty((rows, self.heads, self.dim), np.float32)
        self.out, self.lse = np.empty((rows, self.heads, self.dim_vo), np.float32), np.empty((rows, self.heads), "f4")
        self.new_k = np.empty((rows, self.kv_heads, self.dim), np.float32)
        self.new_v = np.empty((rows, self.kv_heads, self.dim_vo), np.float32)

    def spec(self, **options):
        return fiw.StepSpec(
            num_qo_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim_qk=self.dim,
            head_dim_vo=self.dim_vo,
            q_dtype="float32",
            kv_dtype="float32",
            lse=True,
            **options,
        )

    def session(self, ws, kinds=None, *, verify=False, **options):
        make = fiw.GraphSession.decode if not verify else self._verify
        return make(
            ws,
            [self.spec()] if kinds is None else kinds,
            max_batch=self.max_batch,
            max_pages=self.max_pages,
            page_size=self.page_size,
            num_pages=self.num_pages,
            **options,
        )

    def _verify(self, ws, kinds, **options):
        return fiw.GraphSession.verify(ws, self.window, kinds, **options)

    def deal(self, batch=None):
        """A random step: fresh numbers in every tensor, NaN where nothing may be read. Returns its table."""
        rng = self.rng
        batch = int(rng.integers(0, self.max_batch + 1)) if batch is None else batch
        ids = rng.permutation(self.num_pages)[: int(rng.integers(0, self.max_pages + 1))].astype(int)
        cuts = np.sort(rng.integers(0, len(ids) + 1, max(batch - 1, 0)))
        self.pages = [part.tolist() for part in np.split(ids, cuts)][:batch]
        lasts = rng.integers(1, self.page_size + 1, batch)
        self.kv_lens = [
            (len(own) - 1) * self.page_size + int(last) if own else 0
            for own, last in zip(self.pages, lasts, strict=True)
        ]
        for array in (self.q, self.new_k, self.new_v):
            array[:] = rng.standard_normal(array.shape)
        for array in (self.k, self.v, self.out, self.lse):
            array[:] = np.nan
        for request, length in enumerate(self.kv_lens):
            for token in range(length):
                for array in (self.k, self.v):
                    slot = self.slot(request, token)
                    array[slot] = rng.standard_normal(array[slot].shape)
        return fiw.PageTable.from_pages(self.page_size, self.num_pages, self.pages, self.kv_lens)

    def slot(self, request, token):
        return self.pages[request][token // self.page_size], token % self.page_size

    def gather(self, cache):
        return [
            cache[own].reshape(-1, *cache.shape[2:])[:length].astype(np.float64)
            for own, length in zip(self.pages, self.kv_lens, strict=True)
        ]

    def check(self, bucket, **options):
        """The rows of requests, of the bucket behind them, and behind the bucket."""
        batch = len(self.kv_lens)
        rows, padded = batch * self.window, bucket * self.window
        keys, values = self.gather(self.k), self.gather(self.v)
        if batch:
            expected = attend(self.q[:rows].astype(np.float64), [self.window] * batch, keys, values, **options)
            assert_close(self.out[:rows], expected[0], TOLERANCE)
            assert_close(self.lse[:rows], expected[1], TOLERANCE)
        assert (self.out[rows:padded] == 0).all() and (self.lse[rows:padded] == -np.inf).all()
        assert np.isnan(self.out[padded:]).all() and np.isnan(self.lse[padded:]).all()

    def body(self, graph):
        return lambda batch: graph.run(self.q, self.cache, self.out, lse=self.lse)


def random_buckets(rng, max_batch):
    if rng.random() < 0.3:
        return None
    below = [size for size in range(1, max_batch) if rng.random() < 0.4]
    return np.array([*below, max_batch], np.int32) if rng.random() < 0.5 else [*below, max_batch]


def bucket_of(graph, batch):
    return next(size for size in graph.buckets if size >= batch)


@pytest.fixture
def engine(rng):
    return Engine(rng)


@pytest.mark.parametrize("verify", [False, True], ids=["decode", "verify"])
def test_steps_of_random_tables(ws, rng, verify):
    for _ in range(ROUNDS):
        engine = Engine(rng, int(rng.integers(1, 6)) if verify else 1)
        buckets = random_buckets(rng, engine.max_batch)
        with engine.session(ws, verify=verify, buckets=buckets) as graph:
            if buckets is None:
                powers = [2**i for i in range(8) if 2**i < engine.max_batch]
                assert graph.buckets == (*powers, engine.max_batch)
            else:
                assert graph.buckets == tuple(buckets)
            called = []
            run = engine.body(graph)
            graph.capture(lambda batch, called=called, run=run: (called.append(batch), run(batch)))
            assert tuple(called) == graph.buckets
            for _ in range(STEPS):
                graph.step(engine.deal())
                engine.check(bucket_of(graph, len(engine.kv_lens)))
                assert called[-1] == bucket_of(graph, len(engine.kv_lens))
            graph.check()
            stats = graph.stats()
            assert (stats.captures, stats.replays, stats.trips) == (len(graph.buckets), STEPS, 0)
            assert stats.plans + stats.plan_hits == STEPS and stats.bytes > 0


@pytest.mark.parametrize("verify", [False, True], ids=["decode", "verify"])
def test_append_within_a_step(ws, rng, verify):
    for _ in range(ROUNDS):
        engine = Engine(rng, int(rng.integers(1, 6)) if verify else 1)
        with engine.session(ws, verify=verify) as graph:

            def body(batch, graph=graph, engine=engine):
                graph.append_kv(engine.new_k, engine.new_v, engine.cache)
                graph.run(engine.q, engine.cache, engine.out, lse=engine.lse)

            engine.deal()
            before = engine.k.copy(), engine.v.copy()
            graph.capture(body)
            assert all(
                np.array_equal(now, old, equal_nan=True) for now, old in zip((engine.k, engine.v), before, strict=True)
            )
            for _ in range(STEPS):
                table = engine.deal()
                expected = engine.k.copy(), engine.v.copy()
                for request, length in enumerate(engine.kv_lens):
                    for p in range(max(0, engine.window - length), engine.window):
                        slot = engine.slot(request, length - engine.window + p)
                        for cache, new in zip(expected, (engine.new_k, engine.new_v), strict=True):
                            cache[slot] = new[request * engine.window + p]
                        engine.k[slot] = engine.v[slot] = np.nan
                graph.step(table)
                for actual, array in zip((engine.k, engine.v), expected, strict=True):
                    assert np.array_equal(actual, array, equal_nan=True)
                engine.check(bucket_of(graph, len(engine.kv_lens)))


def test_kinds_of_layers(ws, rng, engine):
    sinks = rng.standard_normal(engine.heads).astype(np.float32)
    kinds = [engine.spec(), engine.spec(window_left=3, logits_soft_cap=5.0, sinks=True)]
    with engine.session(ws, kinds) as graph:
        kind = 0

        def body(batch):
            graph.run(engine.q, engine.cache, engine.out, lse=engine.lse, sinks=sinks if kind else None, kind=kind)

        graph.capture(body)
        for _ in range(STEPS):
            for kind in (0, 1):
                graph.step(engine.deal())
                options = {"window_left": 3, "soft_cap": 5.0, "sinks": sinks.astype(np.float64)} if kind else {}
                engine.check(bucket_of(graph, len(engine.kv_lens)), **options)
        for kind in (2, -1):
            with pytest.raises(fiw.InvalidArgumentError, match=f"kind is {kind}"):
                graph.capture(body)


def test_a_custom_mask_for_each_step(ws, rng):
    engine = Engine(rng, window=3)
    with engine.session(ws, [engine.spec(custom_mask=True)], verify=True, buckets=[engine.max_batch]) as graph:
        bits = np.zeros(engine.max_batch + engine.window * engine.num_pages * engine.page_size, np.uint8)
        mask = fiw.PackedMask(bits, np.zeros(engine.max_batch + 1, np.int32))
        graph.capture(lambda batch: graph.run(engine.q, engine.cache, engine.out, lse=engine.lse, custom_mask=mask))
        for _ in range(STEPS):
            table = engine.deal()
            masks = [rng.random((engine.window, length)) < 0.7 for length in engine.kv_lens]
            if masks:
                packed = fiw.pack_mask(
                    np.concatenate([one.reshape(-1) for one in masks]),
                    [engine.window] * len(masks),
                    engine.kv_lens,
                )
                bits[: packed.bits.size] = packed.bits
                mask.indptr[: len(masks) + 1] = packed.indptr
                mask.indptr[len(masks) + 1 :] = packed.indptr[-1]
            graph.step(table)
            engine.check(engine.max_batch, masks=masks)
        with pytest.raises(fiw.InvalidArgumentError, match="custom_mask is a ndarray, expected a PackedMask"):
            graph.run(engine.q, engine.cache, engine.out, custom_mask=bits)


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt, fiw.BusyError])
def test_what_a_body_raises_is_raised_again(ws, engine, kind):
    error = kind("mine")
    with engine.session(ws) as graph:
        graph.capture(engine.body(graph))

        def fail(batch):
            if batch == engine.max_batch:
                raise error

        with pytest.raises(type(error)) as raised:
            graph.capture(fail)
        assert raised.value is error
        assert graph.stats().captures == len(graph.buckets)
        graph.step(engine.deal(engine.max_batch))
        engine.check(engine.max_batch)

        # On the CPU a replay calls the body, too.
        fails = False
        graph.capture(lambda batch: fail(batch) if fails else engine.body(graph)(batch))
        fails = True
        with pytest.raises(type(error)) as raised:
            graph.step(engine.deal(engine.max_batch))
        assert raised.value is error
        fails = False
        graph.step(engine.deal(engine.max_batch))
        engine.check(engine.max_batch)


def test_calls_that_a_body_may_not_make(ws, engine):
    with engine.session(ws) as graph:
        table = engine.deal()
        for call in (
            lambda: graph.step(table),
            lambda: graph.prepare(table),
            lambda: graph.replay(1),
            lambda: graph.begin(1),
            lambda: graph.check(),
            lambda: graph.capture(print),
        ):
            with pytest.raises(fiw.InvalidArgumentError, match=r"within capture\(\)'s body"):
                graph.capture(lambda batch, call=call: call())
        with pytest.raises(fiw.InvalidArgumentError, match="q has 0 rows, expected"):
            graph.capture(lambda batch: graph.run(engine.q[:0], engine.cache, engine.out))
        with pytest.raises(fiw.InvalidArgumentError, match="begin"):
            graph.run(engine.q, engine.cache, engine.out)
        with pytest.raises(fiw.InvalidArgumentError, match="nothing was captured"):
            graph.step(table)
        graph.capture(engine.body(graph))
        graph.step(engine.deal())
        engine.check(bucket_of(graph, len(engine.kv_lens)))


def test_a_limit_is_named_and_the_last_plan_stays(ws, rng):
    engine = Engine(rng)
    engine.max_pages = engine.num_pages - 1
    with engine.session(ws) as graph:
        graph.capture(engine.body(graph))
        size, pool = engine.page_size, engine.num_pages
        batch = engine.max_batch
        for match, table in [
            (
                f"{batch + 1} requests, .* max_batch = {batch}",
                fiw.PageTable.from_pages(size, pool, [[]] * (batch + 1), [0] * (batch + 1)),
            ),
            (f"max_pages = {pool - 1}", fiw.PageTable.from_pages(size, pool, [list(range(pool))], [size * pool])),
            (f"page {pool}, .* num_pages = {pool}", fiw.PageTable.from_pages(size, pool + 1, [[pool]], [1])),
            (f"page_size is {size + 1}", fiw.PageTable.from_pages(size + 1, pool, [[0]], [1])),
        ]:
            engine_table = engine.deal()
            assert graph.prepare(engine_table) == bucket_of(graph, engine_table.batch)
            before = graph.stats()
            with pytest.raises(fiw.InvalidArgumentError, match=match):
                graph.step(table)
            assert graph.stats() == before
            graph.replay(engine_table.batch)
            engine.check(bucket_of(graph, engine_table.batch))


class LiveTable:
    """Arrays of a session's limits that a step's table is written into."""

    def __init__(self, engine):
        self.arrays = fiw.DevicePageTable(
            np.zeros(engine.max_batch + 1, np.int32),
            np.zeros(engine.max_pages, np.int32),
            np.zeros(engine.max_batch, np.int32),
        )

    def write(self, table):
        indptr, indices, last = self.arrays
        indptr[: table.batch + 1], indptr[table.batch + 1 :] = table.indptr, table.indptr[-1]
        indices[: len(table.indices)] = table.indices
        last[: table.batch], last[table.batch :] = table.last_page_len, 0


def test_live_tables(ws, rng):
    for _ in range(ROUNDS):
        engine = Engine(rng)
        live = LiveTable(engine)
        with engine.session(ws, live_table=live.arrays) as graph:
            graph.capture(engine.body(graph))
            for _ in range(STEPS):
                table = engine.deal()
                live.write(table)
                graph.replay(table.batch)
                graph.check()
                engine.check(bucket_of(graph, table.batch))
            table = engine.deal(engine.max_batch)
            live.write(table)
            request = int(rng.integers(0, engine.max_batch))
            live.arrays.indptr[request + 1] = live.arrays.indptr[request] - 1
            graph.replay(engine.max_batch)
            with pytest.raises(fiw.StalePlanError, match=rf"indptr\[{request + 1}\]") as raised:
                graph.check()
            assert raised.value.index == request and isinstance(raised.value, RuntimeError)
            assert np.isnan(engine.out).all() and graph.stats().trips == 1
            live.write(table)
            graph.replay(engine.max_batch)
            engine.check(engine.max_batch)
            with pytest.raises(fiw.InvalidArgumentError, match="plans on the device"):
                graph.step(table)


def test_a_live_table_that_the_host_plans_for(ws, rng):
    engine = Engine(rng)
    live = LiveTable(engine)
    with engine.session(ws, live_table=tuple(live.arrays), plan_on_device=False) as graph:
        graph.capture(engine.body(graph))
        size = engine.page_size
        engine.pages, engine.kv_lens = [[2, 0]], [2 * size]
        for pages, length in ([2, 0], 2 * size), ([1, 3], 2 * size), ([1], 1), ([3, 2], size + 1):
            table = fiw.PageTable.from_pages(size, engine.num_pages, [pages], [length])
            if pages == [2, 0]:
                graph.prepare(table)
            live.write(table)
            engine.q[:], engine.k[:], engine.v[:] = 1, 1, 1
            engine.out[:] = engine.lse[:] = np.nan
            graph.replay(1)
            if len(pages) == 1:
                with pytest.raises(
                    fiw.StalePlanError, match="request 0 has 1 pages, the plan was made for 2"
                ) as raised:
                    graph.check()
                assert raised.value.index == 0 and np.isnan(engine.out).all()
            else:
                graph.check()
                engine.pages, engine.kv_lens = [pages], [length]
                engine.check(1)


@pytest.mark.parametrize("window", [1, 4, 150], ids=["decode", "verify", "chunk"])
@pytest.mark.parametrize("live", [False, True], ids=["table", "live_table"])
def test_cuda_graphs(rng, window, live):
    torch = pytest.importorskip("torch", reason="skipped: no torch")
    if not has_cuda():
        pytest.skip("skipped: no CUDA device")
    stream = torch.cuda.Stream()
    for _ in range(ROUNDS):
        engine = Engine(rng, window)
        names = ("q", "k", "v", "out", "lse", "new_k", "new_v")
        on_device = {name: torch.from_numpy(getattr(engine, name)).cuda() for name in names}
        host_table = LiveTable(engine)
        tables = fiw.DevicePageTable(*(torch.from_numpy(array).cuda() for array in host_table.arrays))
        q, k, v, out, lse, new_k, new_v = on_device.values()
        cache = fiw.KvCache(k, v)
        torch.cuda.synchronize()
        with (
            fiw.FlashInferWorkspace.create("cuda") as ws,
            engine.session(ws, verify=window > 1, live_table=tables if live else None) as graph,
        ):
            error = KeyError("mine")
            calls = []

            def body(batch, graph=graph, cache=cache, tensors=(q, out, lse, new_k, new_v), calls=calls):
                calls.append(batch)
                graph.append_kv(*tensors[3:], cache)
                graph.run(tensors[0], cache, tensors[1], lse=tensors[2])

            def fail(batch, body=body, error=error):
                body(batch)
                raise error

            with torch.cuda.stream(stream):
                graph.capture(body, stream)
                with pytest.raises(KeyError) as raised:
                    graph.capture(fail, stream)
            assert raised.value is error
            captured = len(calls)
            for _ in range(STEPS):
                table = engine.deal()
                host_table.write(table)
                with torch.cuda.stream(stream):
                    for name, tensor in on_device.items():
                        tensor.copy_(torch.from_numpy(getattr(engine, name)))
                    for tensor, array in zip(tables, host_table.arrays, strict=True):
                        tensor.copy_(torch.from_numpy(array))
                if live:
                    graph.replay(table.batch, stream)
                else:
                    graph.step(table, stream)
                graph.check(stream)
                for request, length in enumerate(engine.kv_lens):
                    for p in range(max(0, window - length), window):
                        slot = engine.slot(request, length - window + p)
                        engine.k[slot] = engine.new_k[request * window + p]
                        engine.v[slot] = engine.new_v[request * window + p]
                for cached, expected in ((k, engine.k), (v, engine.v)):
                    assert np.array_equal(cached.cpu().numpy(), expected, equal_nan=True)
                engine.out[:], engine.lse[:] = out.cpu().numpy(), lse.cpu().numpy()
                engine.check(bucket_of(graph, table.batch))
            assert len(calls) == captured, "a replay on CUDA calls no body"


def test_a_step_of_the_callers(ws, engine):
    with engine.session(ws) as graph:
        for _ in range(STEPS):
            table = engine.deal()
            bucket = graph.prepare(table)
            assert graph.begin(table.batch) == bucket == bucket_of(graph, table.batch)
            engine.body(graph)(bucket)
            engine.check(bucket)


def test_what_is_captured_is_kept(ws, engine):
    seen = []

    def body_of(graph):
        def body(batch):
            out = engine.out.copy()
            seen.append(weakref.ref(out))
            graph.run(engine.q, engine.cache, out)

        return body

    graph = engine.session(ws)
    graph.capture(body_of(graph))
    gc.collect()
    assert len(seen) == len(graph.buckets) and all(ref() is not None for ref in seen)
    graph.step(engine.deal(1))
    assert seen.pop()() is None, "a replay on the CPU needs nothing to be kept"
    graph.capture(engine.body(graph))
    assert all(ref() is None for ref in seen)

    # A body refers to its session: the collector finds the cycle.
    graph.capture(body_of(graph))
    kept = weakref.ref(graph)
    del graph
    gc.collect()
    assert kept() is None and seen[-1]() is None


def test_what_a_step_of_the_callers_uses_is_kept(ws, engine):
    with engine.session(ws) as graph:
        seen = []
        for _ in range(2):
            graph.prepare(engine.deal(1))
            graph.begin(1)
            out = engine.out.copy()
            seen.append(weakref.ref(out))
            graph.run(engine.q, engine.cache, out)
            del out
        assert seen[0]() is None and seen[1]() is not None
    assert seen[1]() is None


def test_close_gives_back_what_is_kept(ws, engine):
    live = LiveTable(engine)
    kept = [weakref.ref(array) for array in live.arrays]
    graph = engine.session(ws, live_table=live.arrays)
    del live
    assert all(ref() is not None for ref in kept)
    graph.close()
    graph.close()
    assert graph.closed and all(ref() is None for ref in kept)
    table = engine.deal()
    for call in (
        lambda: graph.capture(print),
        lambda: graph.begin(1),
        lambda: graph.run(engine.q, engine.cache, engine.out),
        lambda: graph.append_kv(engine.new_k, engine.new_v, engine.cache),
        lambda: graph.prepare(table),
        lambda: graph.step(table),
        lambda: graph.replay(1),
        lambda: graph.check(),
        lambda: graph.buckets,
        lambda: graph.stats(),
    ):
        with pytest.raises(fiw.ClosedError, match="the graph session is closed"):
            call()


def test_a_session_outlives_its_workspace(engine):
    ws = fiw.FlashInferWorkspace.create()
    graph = engine.session(ws)
    graph.capture(engine.body(graph))
    table = engine.deal()
    graph.step(table)
    ws.close()
    for call in (lambda: graph.step(table), lambda: graph.capture(print), lambda: graph.check()):
        with pytest.raises(fiw.ClosedError, match="the workspace is closed"):
            call()
    with pytest.raises(fiw.ClosedError):
        engine.session(ws)
    assert graph.stats().replays == 1 and not graph.closed
    graph.close()


def test_a_session_may_be_closed_by_its_own_body(ws, engine):
    graph = engine.session(ws)
    graph.capture(lambda batch: graph.close())
    assert graph.closed


def test_one_thread_at_a_time(ws, engine):
    with engine.session(ws) as graph:
        inside, leave = threading.Event(), threading.Event()
        waits = False

        def body(batch):
            if waits:
                inside.set()
                assert leave.wait(60)
            graph.run(engine.q, engine.cache, engine.out, lse=engine.lse)

        graph.capture(body)
        waits = True
        table = engine.deal()
        for call in (lambda: graph.step(table), lambda: graph.capture(body)):
            inside.clear(), leave.clear()
            thread = threading.Thread(target=call)
            thread.start()
            try:
                assert inside.wait(60)
                for refused in (lambda: graph.step(table), lambda: graph.capture(print), lambda: graph.check()):
                    with pytest.raises(fiw.BusyError):
                        refused()
            finally:
                leave.set()
                thread.join()
        waits = False
        graph.step(table)
        engine.check(bucket_of(graph, table.batch))


def test_other_threads_run_during_a_call(ws):
    heads, dim, pages, batch = 8, 128, 128, 32
    k = np.ones((pages, 16, 1, dim), np.float32)
    q, cache = np.ones((batch, heads, dim), np.float32), fiw.KvCache(k, 3 * k)
    out = np.full_like(q, np.nan)
    spec = fiw.StepSpec(
        num_qo_heads=heads, num_kv_heads=1, head_dim_qk=dim, q_dtype="float32", kv_dtype="float32", lse=True
    )
    table = fiw.PageTable.from_pages(16, pages, [list(range(pages))] * batch, [16 * pages] * batch)
    with fiw.GraphSession.decode(
        ws, [spec], max_batch=batch, max_pages=batch * pages, page_size=16, num_pages=pages
    ) as graph:
        graph.begin(graph.prepare(table))
        found = threading.Event()

        def run():
            while not found.is_set():
                with contextlib.suppress(fiw.BusyError):
                    graph.run(q, cache, out)

        thread = threading.Thread(target=run)
        thread.start()
        deadline = time.monotonic() + 60
        while not found.is_set() and time.monotonic() < deadline:
            try:
                graph.check()
            except fiw.BusyError:
                found.set()
        seen = found.is_set()
        found.set()
        thread.join()
        assert seen, "no other thread found the session busy"
        graph.run(q, cache, out)
        assert_close(out, np.full(out.shape, 3.0), 1e-5)


def test_bad_options(ws, engine):
    def verify(window):
        return lambda: fiw.GraphSession.verify(
            ws, window, [engine.spec()], max_batch=1, max_pages=1, page_size=1, num_pages=1
        )

    batch = engine.max_batch
    short = fiw.DevicePageTable(*(np.zeros(batch, np.int32) for _ in range(3)))
    wide = LiveTable(engine).arrays._replace(indices=np.zeros(engine.max_pages, np.int64))
    for match, call in [
        ("window is 0, expected 1..4096", verify(0)),
        ("window is 4097, expected 1..4096", verify(4097)),
        ("window is -1, expected 1..4096", verify(-1)),
        ("num_kinds is 0, expected at least 1", lambda: engine.session(ws, [])),
        (r"buckets hold 2 after 2", lambda: _with(engine, max_batch=3).session(ws, buckets=[2, 2])),
        ("the last of buckets is", lambda: _with(engine, max_batch=3).session(ws, buckets=[1, 2])),
        (f"live_table.indptr has {batch} entries, expected {batch + 1}", lambda: engine.session(ws, live_table=short)),
        ("live_table.indices: int64, expected int32", lambda: engine.session(ws, live_table=wide)),
        (r"max_batch is 0, expected 1\.\.16777216", lambda: _with(engine, max_batch=0).session(ws)),
        *(
            (f"{name} is 0, expected at least 1", lambda name=name: _with(engine, **{name: 0}).session(ws))
            for name in ("max_pages", "page_size", "num_pages")
        ),
    ]:
        with pytest.raises(fiw.InvalidArgumentError, match=match):
            call()
    with pytest.raises(TypeError, match="incompatible function arguments"):
        engine.session(ws).capture(3)


def _with(engine, **changes):
    copy = object.__new__(Engine)
    copy.__dict__.update(engine.__dict__, **changes)
    return copy


def test_every_method_is_documented():
    for name in dir(fiw.GraphSession):
        if not name.startswith("_"):
            assert getattr(fiw.GraphSession, name).__doc__ or name == "closed", name
