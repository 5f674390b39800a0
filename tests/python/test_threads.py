"""The GIL is free during a call, and a workspace takes one thread at a time."""

import threading

import numpy as np
import pytest

import fiw
from reference import assert_close, attend


class LongCall:
    """A ragged prefill that takes long enough for other threads to be seen running."""

    def __init__(self, ws, rng):
        self.ws = ws
        self.lens = [1200]
        self.q = rng.standard_normal((self.lens[0], 8, 128)).astype(np.float32)
        self.k, self.v = rng.standard_normal((2, self.lens[0], 8, 128)).astype(np.float32)
        self.out = np.full_like(self.q, np.nan)

    def __call__(self):
        self.ws.ragged_prefill(self.q, self.k, self.v, [0, *self.lens], [0, *self.lens], out=self.out)

    def check(self):
        """The last row, which sees all keys."""
        k, v = self.k.astype(np.float64), self.v.astype(np.float64)
        assert_close(self.out[-1:], attend(self.q[-1:].astype(np.float64), [1], [k], [v])[0], 2e-5)


def test_other_threads_run_during_a_call(ws, rng):
    call = LongCall(ws, rng)
    began, ended, progress = threading.Event(), threading.Event(), []

    def run():
        began.set()
        call()
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    began.wait()
    while not ended.is_set():
        unwritten = np.isnan(call.out[:, 0, 0])
        progress.append(bool(unwritten.any() and not unwritten.all()))
    thread.join()
    call.check()
    assert any(progress), "no other thread saw the output half written"


def test_a_second_thread_gets_busy_or_the_right_answer(ws, rng):
    q = np.ones((1, 2, 8), np.float32)
    k = np.ones((1, 4, 1, 8), np.float32)
    cache, table = fiw.KvCache(k, 3 * k), fiw.PageTable.from_pages(4, 1, [[0]], [3])
    busy = 0
    for _ in range(20):
        call = LongCall(ws, rng)
        errors = []

        def run(call=call, errors=errors):
            try:
                call()
            except fiw.BusyError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        while thread.is_alive():
            try:
                assert_close(ws.decode(q, cache, table), np.full((1, 2, 8), 3.0), 1e-6)
            except fiw.BusyError as error:
                assert error.code == fiw.Status.BUSY
                busy += 1
        thread.join()
        if not errors:
            call.check()
        if busy:
            break
    assert busy, "no call of twenty was met while it ran"


def test_workspaces_of_different_threads_do_not_meet(rng):
    failures = []

    def run(seed):
        try:
            own = np.random.default_rng(seed)
            with fiw.FlashInferWorkspace.create(num_threads=1) as ws:
                for _ in range(20):
                    k, v = own.standard_normal((2, 2, 4, 1, 8)).astype(np.float32)
                    q = own.standard_normal((1, 2, 8)).astype(np.float32)
                    table = fiw.PageTable.from_pages(4, 2, [[1, 0]], [7])
                    keys, values = ([np.concatenate([x[1], x[0]])[:7].astype(np.float64)] for x in (k, v))
                    expected = attend(q.astype(np.float64), [1], keys, values)[0]
                    assert_close(ws.decode(q, fiw.KvCache(k, v), table), expected, 1e-5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(int(seed),)) for seed in rng.integers(0, 2**31, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_table_may_be_advanced_while_a_call_uses_it(ws, rng):
    heads, length, page = 4, 20000, 16
    pages = list(range(-(-length // page)))
    table = fiw.PageTable.from_pages(page, 10**6, [pages], [length])
    k, v = rng.standard_normal((2, len(pages), page, heads, 64)).astype(np.float32)
    q = rng.standard_normal((1, heads, 64)).astype(np.float32)
    cache, before = fiw.KvCache(k, v), table.copy()
    out = np.full_like(q, np.nan)
    started = threading.Event()

    def advance():
        started.set()
        for _ in range(200):
            table.advance(0)

    thread = threading.Thread(target=advance)
    thread.start()
    started.wait()
    for _ in range(5):
        ws.decode(q, cache, table, out=out)
    thread.join()
    keys, values = ([x.reshape(-1, heads, 64)[:length].astype(np.float64)] for x in (k, v))
    assert_close(out, attend(q.astype(np.float64), [1], keys, values)[0], 2e-5)
    assert table == before


@pytest.mark.parametrize("when", ["before", "during"])
def test_close_from_another_thread(rng, when):
    ws = fiw.FlashInferWorkspace.create(num_threads=2)
    call = LongCall(ws, rng)
    outcome = []

    def run():
        try:
            call()
            outcome.append("done")
        except fiw.ClosedError:
            outcome.append("closed")

    thread = threading.Thread(target=run)
    if when == "during":
        thread.start()
    ws.close()
    if when == "before":
        thread.start()
    thread.join()
    assert ws.closed and outcome[0] in (("done", "closed") if when == "during" else ("closed",))
    if outcome[0] == "done":
        call.check()
