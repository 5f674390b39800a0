"""A workspace's life, caches, counters and sizes."""

import ctypes
import dataclasses
import inspect
import pathlib
import re
from typing import get_args

import numpy as np
import pytest

import fiw
from fiw.workspace import CudaRoute


def decode_step(heads=4, kv_lens=(7, 1)):
    pages = [list(range(4 * i, 4 * i + -(-length // 4))) for i, length in enumerate(kv_lens)]
    k = np.ones((4 * len(kv_lens), 4, 2, 16), np.float32)
    return (
        np.ones((len(kv_lens), heads, 16), np.float32),
        fiw.KvCache(k, k),
        fiw.PageTable.from_pages(4, 64, pages, kv_lens),
    )


def test_devices_by_every_name():
    for device in (-1, "cpu"):
        with fiw.FlashInferWorkspace.create(device) as ws:
            assert ws.device_index == -1 and ws.device_props.kind == "cpu"
    torch = pytest.importorskip("torch", reason="skipped: no torch")
    assert fiw.FlashInferWorkspace.create(torch.device("cpu")).device_index == -1


def test_the_handle_serves_the_c_abi_that_the_extension_exports(ws):
    library = ctypes.CDLL(fiw._fiw.__file__)
    library.fiw_version.restype = ctypes.c_char_p
    assert library.fiw_version().decode() == fiw.__version__
    handle = ctypes.c_void_p(ws.handle)
    assert library.fiw_workspace_closed(handle) == 0
    library.fiw_workspace_close(handle)
    assert ws.closed and ws.handle == 0


def test_a_context_manager_closes_also_after_an_error():
    with pytest.raises(KeyError), fiw.FlashInferWorkspace.create() as ws:
        raise KeyError
    assert ws.closed and "closed" in repr(ws)


def test_counters_and_invalidation(ws):
    step = decode_step()
    ws.decode(*step)
    ws.decode(*step)
    q, cache, table = step
    ws.prefill(q, [0, 1, 2], cache, table)
    ws.verify(q, 1, cache, table)
    stats = ws.stats()
    assert [(c.hits, c.misses, c.entries) for c in (stats.decode, stats.prefill, stats.verify)] == [
        (1, 1, 1),
        (0, 1, 1),
        (0, 1, 1),
    ]
    assert stats.run_nanoseconds > 0 and stats.float_scratch_bytes >= stats.float_scratch_peak > 0

    def entries():
        stats = ws.stats()
        return stats.decode.entries, stats.prefill.entries, stats.verify.entries

    ws.invalidate_prefill_runtime_cache()
    assert entries() == (1, 0, 1)
    ws.invalidate_runtime_cache()
    assert entries() == (0, 0, 1)
    ws.invalidate_verify_runtime_cache()
    assert entries() == (0, 0, 0)
    assert ws.stats().decode.invalidations == 1
    ws.decode(*step)
    assert ws.stats().decode.misses == 2


def test_cache_entries_bound_the_cache():
    with fiw.FlashInferWorkspace.create(cache_entries=2) as ws:
        for heads in (2, 4, 6):
            ws.decode(*decode_step(heads))
        assert (ws.stats().decode.entries, ws.stats().decode.evictions) == (2, 1)


def test_batch_invariant_results_are_equal_bit_for_bit(rng):
    k, v = rng.standard_normal((2, 64, 16, 2, 32)).astype(np.float32)
    q = rng.standard_normal((3, 4, 32)).astype(np.float32)
    pages, kv_lens = [list(range(40)), [41], [50, 51]], [633, 3, 20]
    with fiw.FlashInferWorkspace.create(batch_invariant=True, fixed_split_tokens=128) as ws:
        together = ws.decode(q, fiw.KvCache(k, v), fiw.PageTable.from_pages(16, 64, pages, kv_lens))
        for request in range(3):
            table = fiw.PageTable.from_pages(16, 64, pages[request : request + 1], kv_lens[request : request + 1])
            alone = ws.decode(q[request : request + 1], fiw.KvCache(k, v), table)
            assert (alone[0] == together[request]).all()


def test_required_workspace_suffices(rng):
    limits = fiw.WorkspaceLimits(
        num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, max_batch=3, max_kv_len=2000, kv_dtype=np.float32
    )
    needed = fiw.FlashInferWorkspace.required_workspace(fiw.DeviceProps.cpu(4), limits)
    k = rng.standard_normal((400, 16, 2, 64)).astype(np.float32)
    with fiw.FlashInferWorkspace.create(workspace_bytes=needed, fixed_size=True, num_threads=4) as ws:
        assert ws.device_props == fiw.DeviceProps.cpu(4)
        pages = [list(range(125 * i, 125 * i + 125)) for i in range(3)]
        table = fiw.PageTable.from_pages(16, 400, pages, [2000, 1999, 1])
        assert np.isfinite(ws.decode(np.ones((3, 8, 64), np.float32), fiw.KvCache(k, k), table)).all()
        assert 0 < ws.stats().float_scratch_peak <= needed
    h200 = fiw.DeviceProps.h200()
    assert h200.kind == "cuda" and h200.compute_capability == 90
    assert fiw.FlashInferWorkspace.required_workspace(h200, limits) > 0


def test_verify_graphs_by_option_and_environment(monkeypatch):
    monkeypatch.delenv("SMILE_VERIFY_CUDA_GRAPH", raising=False)
    assert not fiw.FlashInferWorkspace.create().verify_cuda_graph
    assert fiw.FlashInferWorkspace.create(verify_cuda_graph=True).verify_cuda_graph
    monkeypatch.setenv("SMILE_VERIFY_CUDA_GRAPH", "1")
    assert fiw.FlashInferWorkspace.create().verify_cuda_graph
    assert not fiw.FlashInferWorkspace.create(verify_cuda_graph=False).verify_cuda_graph


def header_fields(struct):
    """The fields of a struct of fiw.h."""
    header = pathlib.Path(__file__).parents[2].joinpath("include/fiw/fiw.h").read_text()
    body = re.search(rf"typedef struct {struct} \{{(.*?)\n\}}", header, re.S).group(1)
    return re.findall(r"(\w+);", re.sub(r"///.*", "", body))


def test_structs_are_those_of_the_c_header():
    for cls in (fiw.WorkspaceStats, fiw.CacheStats, fiw.GraphStats, fiw.DeviceProps, fiw.PlanInfo):
        struct = "fiw_" + re.sub(r"(?<!^)([A-Z])", r"_\1", cls.__name__).lower()
        expected = [name for name in header_fields(struct) if name not in ("struct_size", "reserved")]
        assert sorted(field.name for field in dataclasses.fields(cls)) == sorted(expected)
    # The plan's options are given one by one.
    options = {*header_fields("fiw_workspace_options"), "batch_invariant", "fixed_split_tokens", "device"}
    left_out = {"struct_size", "reserved", "plan"}
    assert options - left_out == inspect.signature(fiw.FlashInferWorkspace.create).parameters.keys()


def test_cuda_routes_by_name():
    header = pathlib.Path(__file__).parents[2].joinpath("include/fiw/fiw.h").read_text()
    routes = [(name.lower(), int(value)) for name, value in re.findall(r"FIW_CUDA_ROUTE_(\w+) = (\d+)", header)]
    assert routes == [(name, value) for value, name in enumerate(get_args(CudaRoute))]
    for name in (None, *get_args(CudaRoute)):
        with fiw.FlashInferWorkspace.create(cuda_route=name) as ws:
            assert ws.decode(*decode_step()).shape == (2, 4, 16)
    for bad in ("fa3", "", "TABLE", 1):
        with pytest.raises(fiw.InvalidArgumentError, match=f"cuda_route is {bad!r}, expected None or one of") as raised:
            fiw.FlashInferWorkspace.create(cuda_route=bad)
        assert raised.value.reason == 403
        assert all(repr(name) in str(raised.value) for name, _ in routes)


def test_the_examples_of_the_documentation(capsys):
    text = pathlib.Path(__file__).parents[2].joinpath("docs/python.md").read_text()
    examples = re.findall(r"```python\n(import numpy.*?)```", text, re.S)
    assert len(examples) == 2
    for example in examples:
        exec(example, {})
        assert capsys.readouterr().out == example.rpartition("# ")[2]


def test_the_package_is_typed():
    package = pathlib.Path(fiw.__file__).parent
    assert (package / "py.typed").exists()
    stub = (package / "_fiw.pyi").read_text()
    for name in ("Workspace", "PageTable", "KvCache", "Tensor", "Graph"):
        assert f"class {name}:" in stub


def test_every_public_name_is_documented():
    for name in fiw.__all__:
        assert getattr(fiw, name).__doc__, name
    for method in ("create", "decode", "prefill", "verify", "ragged_prefill", "append_kv", "merge_states", "close"):
        assert getattr(fiw.FlashInferWorkspace, method).__doc__, method
