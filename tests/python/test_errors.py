"""Each class of error, its fields, and workspaces that are as they were after one."""

import pathlib
import re

import numpy as np
import pytest

import fiw
from fiw import errors


@pytest.fixture
def step():
    """(q, cache, table) of a legal decode step."""
    q = np.ones((2, 4, 16), np.float32)
    k = np.ones((6, 4, 2, 16), np.float32)
    return q, fiw.KvCache(k, k.copy()), fiw.PageTable.from_pages(4, 6, [[5, 2], [1]], [7, 1])


def test_one_class_for_each_status_of_the_c_header():
    header = pathlib.Path(__file__).parents[2].joinpath("include/fiw/fiw.h").read_text()
    body = re.search(r"typedef enum fiw_status \{(.*?)\}", header, re.S).group(1)
    statuses = {name: int(value) for name, value in re.findall(r"FIW_(\w+) = (\d+)", body) if name != "OK"}
    assert statuses == {status.name: status.value for status in errors.Status}
    for name, value in statuses.items():
        error = errors.from_fields(value, 403, "why", 5, 6, 7)
        assert isinstance(error, fiw.Error) and type(error).__name__ in fiw.__all__
        assert type(error).__name__.lower() == name.replace("_", "").lower() + "error"
        assert (error.code, error.reason, error.index, error.bytes_required, error.backend_code, str(error)) == (
            value,
            403,
            5,
            6,
            7,
            "why",
        )


def test_a_bad_argument_names_itself_and_changes_nothing(ws, step):
    q, cache, table = step
    before = ws.stats()
    for match, reason, call in [
        ("q has 1 rows, expected 2", 202, lambda: ws.decode(q[:1], cache, table)),
        ("q: rank 2, expected 3", 201, lambda: ws.decode(q[0], cache, table)),
        ("q: dtype .*, expected float32", 204, lambda: ws.decode(q.astype(np.float64), cache, table)),
        ("out: shape|out has", 202, lambda: ws.decode(q, cache, table, out=np.zeros((2, 4, 8), np.float32))),
        ("out .*float16", 204, lambda: ws.decode(q, cache, table, out=np.zeros((2, 4, 16), np.float16))),
        ("window_left is -2", 303, lambda: ws.decode(q, cache, table, window_left=-2)),
        ("logits_soft_cap is nan", 304, lambda: ws.decode(q, cache, table, logits_soft_cap=float("nan"))),
        ("sm_scale is inf", 302, lambda: ws.decode(q, cache, table, sm_scale=float("inf"))),
        ("sinks: shape .*3", 202, lambda: ws.decode(q, cache, table, sinks=np.zeros(3, np.float32))),
        ("qo_indptr", 113, lambda: ws.prefill(q, [0, 2], cache, table)),
        ("qo_indptr: int64, expected int32", 110, lambda: ws.prefill(q, np.array([0, 1, 2]), cache, table)),
        ("qo_indptr: .*expected integers", 110, lambda: ws.prefill(q, [0, 1, 2**40], cache, table)),
        ("qo_indptr: .*expected integers", 110, lambda: ws.prefill(q, [0, 1.5, 2], cache, table)),
        ("window is 65, expected 1..64", 113, lambda: ws.verify(q, 65, cache, table)),
        ("parts is empty", 309, lambda: ws.merge_states([], out=q)),
    ]:
        with pytest.raises(fiw.InvalidArgumentError, match=match) as raised:
            call()
        assert isinstance(raised.value, ValueError)
        assert raised.value.reason == reason, match
    assert ws.stats() == before
    assert ws.decode(q, cache, table).shape == (2, 4, 16)


def test_a_bad_page_table_names_the_request():
    with pytest.raises(fiw.InvalidArgumentError, match="request 1 uses page 9") as raised:
        fiw.PageTable(16, 9, [0, 1, 2], [3, 9], [1, 1])
    assert raised.value.index == 1 and raised.value.reason == 105
    with pytest.raises(fiw.InvalidArgumentError, match="kv_lens"):
        fiw.PageTable(16, 9, [0, 1], [3], [1], kv_lens=[2])


def test_bad_caches():
    k = np.zeros((2, 4, 1, 8), np.float32)
    with pytest.raises(fiw.InvalidArgumentError, match=r"kv\.layout is 'nhd', expected 'NHD' or 'HND'"):
        fiw.KvCache(k, k, "nhd")
    with pytest.raises(fiw.InvalidArgumentError, match=r"kv\.v: rank 3, expected 4"):
        fiw.KvCache(k, k[0])
    with pytest.raises(fiw.InvalidArgumentError, match=r"kv\.kv: rank 4, expected 5"):
        fiw.KvCache.interleaved(k)


@pytest.mark.parametrize("dim", [12, 584])
def test_unsupported(ws, step, dim):
    table = step[2]
    k = np.ones((6, 4, 2, dim), np.float32)
    with pytest.raises(
        fiw.UnsupportedError, match=f"head_dim_qk is {dim}, expected a multiple of 8 in 8..576"
    ) as raised:
        ws.decode(np.ones((2, 4, dim), np.float32), fiw.KvCache(k, k), table)
    assert isinstance(raised.value, NotImplementedError) and raised.value.reason == 301


def test_closed(step):
    q, cache, table = step
    ws = fiw.FlashInferWorkspace.create()
    planned = ws.plan_decode(
        table,
        fiw.StepSpec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=16, q_dtype="float32", kv_dtype="float32"),
    )
    assert planned.run(q, cache).shape == (2, 4, 16)
    ws.close()
    ws.close()
    assert ws.closed and ws.handle == 0
    for call in (
        lambda: ws.decode(q, cache, table),
        lambda: ws.append_kv(q[:, :2], q[:, :2], [0, 1, 2], cache, table),
        lambda: ws.merge_states([(q, np.zeros((2, 4), np.float32))]),
        lambda: planned.run(q, cache),
    ):
        with pytest.raises(fiw.ClosedError, match="the workspace is closed"):
            call()
    ws.invalidate_runtime_cache()
    assert ws.stats().decode.misses == 0


def test_workspace_too_small_says_what_would_do():
    limits = fiw.WorkspaceLimits(num_qo_heads=4, num_kv_heads=2, head_dim_qk=64, max_batch=1, max_kv_len=16)
    q = np.ones((1, 32, 128), np.float32)
    k = np.zeros((4096, 16, 1, 128), np.float32)
    table = fiw.PageTable.from_pages(16, 4096, [list(range(4096))], [65536])
    with fiw.FlashInferWorkspace.create(limits=limits, fixed_size=True, num_threads=8) as ws:
        with pytest.raises(fiw.WorkspaceTooSmallError) as raised:
            ws.decode(q, fiw.KvCache(k, k), table)
        assert isinstance(raised.value, MemoryError) and raised.value.bytes_needed > ws.stats().float_scratch_bytes
    with fiw.FlashInferWorkspace.create(
        workspace_bytes=raised.value.bytes_needed, fixed_size=True, num_threads=8
    ) as ws:
        assert ws.decode(q, fiw.KvCache(k, k), table).shape == q.shape


def test_devices_that_are_not_there():
    with pytest.raises(fiw.InvalidArgumentError, match="device is 'tpu'"):
        fiw.FlashInferWorkspace.create("tpu")
    if fiw.compiled_with("cuda"):
        with pytest.raises(fiw.NoDeviceError):
            fiw.FlashInferWorkspace.create(1000)
    else:
        assert fiw.FlashInferWorkspace.create("cuda:0") is None


def test_bad_options():
    for name, value in {"cache_entries": 0, "num_threads": -1, "fixed_size": True, "fixed_split_tokens": 0}.items():
        with pytest.raises(fiw.InvalidArgumentError, match=name):
            fiw.FlashInferWorkspace.create(batch_invariant=True, **{name: value})
