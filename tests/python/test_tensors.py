"""DLPack: no copies, memory kept alive, strides, read-only arrays, element types, streams."""

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

import fiw
from fiw import _fiw, _tensors
from frameworks import FRAMEWORKS, has_cuda
from reference import assert_close, attend


def small(rng, make=lambda array: array):
    """(q, k, v, table, expected out) of a decode step over two pages."""
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 2, 8), (2, 4, 1, 8), (2, 4, 1, 8)))
    table = fiw.PageTable.from_pages(4, 2, [[1, 0]], [6])
    keys, values = ([np.concatenate([cache[1], cache[0]])[:6].astype(np.float64)] for cache in (k, v))
    return make(q), make(k), make(v), table, attend(q.astype(np.float64), [1], keys, values)[0]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_view_has_the_tensor_s_own_address(framework, dtype):
    tensor = framework.make(np.ones((3, 2, 8)), dtype)
    view = _tensors.view("x", tensor)
    assert view.data == framework.pointer(tensor)
    assert (view.shape, view.dtype, view.device_index) == ((3, 2, 8), dtype, 0 if framework.device == "cuda" else -1)


def test_writes_reach_memory_that_the_caller_looks_at_through_another_view(ws, rng, framework):
    if not framework.writable:
        pytest.skip("skipped: the framework's arrays cannot be written")
    q, k, v, table, expected = small(rng, framework.make)
    storage = framework.make(np.full((3, 2, 8), np.nan))
    result = ws.decode(q, fiw.KvCache(k, v), table, out=storage[1:2])
    assert framework.pointer(result) == framework.pointer(storage) + 2 * 8 * 4
    assert_close(framework.host(storage)[1:2], expected, 1e-5)
    assert np.isnan(framework.host(storage)[[0, 2]]).all()


def test_a_cache_sees_later_writes_to_its_tensors(ws, rng):
    q, k, v, table, expected = small(rng)
    later = np.full_like(k, np.nan), np.full_like(v, np.nan)
    cache = fiw.KvCache(*later)
    later[0][:], later[1][:] = k, v
    assert_close(ws.decode(q, cache, table), expected, 1e-5)


def test_strided_queries_and_caches_are_read_in_place(ws, rng, framework):
    q, k, v, table, expected = small(rng)
    fused = np.full((1, 6, 8), np.nan, np.float32)
    fused[:, 2:4] = q
    both = np.full((2, 2, 4, 1, 8), np.nan, np.float32)
    both[:, 0], both[:, 1] = k, v
    fused, both = framework.make(fused), framework.make(both)
    assert_close(framework.host(ws.decode(fused[:, 2:4], fiw.KvCache(both[:, 0], both[:, 1]), table)), expected, 1e-5)


def test_read_only_arrays_are_inputs_only(ws, rng):
    q, k, v, table, expected = small(rng)
    for array in (q, k, v):
        array.flags.writeable = False
    cache = fiw.KvCache(k, v)
    assert_close(ws.decode(q, cache, table), expected, 1e-5)
    with pytest.raises(fiw.InvalidArgumentError, match="kv is read-only"):
        ws.append_kv(q[:, :1], q[:, :1], [0, 1], cache, table)
    with pytest.raises(fiw.InvalidArgumentError, match="out is read-only"):
        ws.decode(q.copy(), cache, table, out=q)
    with pytest.raises(fiw.InvalidArgumentError, match="lse is read-only"):
        lse = np.zeros((1, 2), np.float32)
        lse.flags.writeable = False
        ws.decode(q, cache, table, lse=lse)


def test_a_cache_keeps_its_tensors_and_lets_them_go(ws, rng):
    q, k, v, table, expected = small(rng)
    alive = [weakref.ref(k), weakref.ref(v)]
    cache = fiw.KvCache(k, v)
    del k, v
    gc.collect()
    assert all(ref() is not None for ref in alive)
    assert_close(ws.decode(q, cache, table), expected, 1e-5)
    del cache
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_a_call_lets_go_of_its_tensors(ws, rng):
    q, k, v, table, _ = small(rng)
    alive = [weakref.ref(q), weakref.ref(ws.decode(q, fiw.KvCache(k, v), table))]
    with pytest.raises(fiw.InvalidArgumentError):
        ws.decode(q, fiw.KvCache(k, v), table, out=np.zeros((1, 2, 16), np.float32))
    del q
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_bytes_may_be_said_to_hold_fp8(ws, rng):
    q, k, v, table, _ = small(rng)
    k, v = (array.astype(ml_dtypes.float8_e4m3fn) for array in (k, v))
    expected = ws.decode(q, fiw.KvCache(k, v), table)
    cache = fiw.KvCache(k.view(np.uint8), v.view(np.uint8), dtype=ml_dtypes.float8_e4m3fn)
    assert cache.dtype == "float8_e4m3fn"
    assert (ws.decode(q, cache, table) == expected).all()
    with pytest.raises(fiw.InvalidArgumentError, match="elements of 32 bits, expected 8"):
        fiw.KvCache(q, q, dtype="float8_e5m2")
    with pytest.raises(fiw.InvalidArgumentError, match="dtype is float4"):
        fiw.KvCache(q, q, dtype="float4")


@pytest.mark.parametrize("name", ["q", "out", "kv.k"])
def test_what_is_no_tensor_is_a_type_error_that_names_it(ws, rng, name):
    q, k, v, table, _ = small(rng)
    with pytest.raises(TypeError, match=f"^{name} is of type list, expected a tensor"):
        if name == "kv.k":
            fiw.KvCache([1.0], v)
        elif name == "out":
            ws.decode(q, fiw.KvCache(k, v), table, out=[1.0])
        else:
            ws.decode([1.0], fiw.KvCache(k, v), table, out=q)


class Producer:
    """A tensor of no known framework; records how it was asked for."""

    def __init__(self, array, device=(1, 0), old=False):
        self.array, self.device, self.old, self.asked = array, device, old, []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        self.asked.append(options)
        if self.old and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**{key: value for key, value in options.items() if key == "max_version"})


@pytest.mark.parametrize("old", [False, True])
def test_any_producer_of_old_or_new_dlpack_will_do(ws, rng, old):
    q, k, v, table, expected = small(rng)
    out = np.full_like(q, np.nan)
    assert ws.decode(Producer(q, old=old), fiw.KvCache(Producer(k), Producer(v)), table, out=out) is out
    assert_close(out, expected, 1e-5)
    with pytest.raises(fiw.InvalidArgumentError, match="cannot allocate for a Producer"):
        ws.decode(Producer(q), fiw.KvCache(k, v), table)


@pytest.mark.parametrize(("stream", "asked"), [(0, 1), (1, 1), (2, 2), (0x7F00DEAD, 0x7F00DEAD)])
def test_cuda_producers_are_told_the_stream(stream, asked):
    producer = Producer(np.zeros(4, np.float32), device=(2, 0))
    _fiw.Tensor("x", producer, stream=stream)
    assert producer.asked == [{"stream": asked, "max_version": (1, 0)}]
    producer = Producer(np.zeros(4, np.float32))
    _fiw.Tensor("x", producer, stream=stream)
    assert producer.asked == [{"max_version": (1, 0)}]


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_calls_on_cuda_run_on_the_frameworks_current_stream(rng, name):
    if not has_cuda():
        pytest.skip("skipped: no CUDA device")
    made = FRAMEWORKS[f"{name}-cuda"]()
    torch = pytest.importorskip("torch")
    module = pytest.importorskip(name)
    q, k, v, table, expected = small(rng)
    late, cache = made.make(np.full_like(q, np.nan)), fiw.KvCache(made.make(k), made.make(v))
    source = made.make(q)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with fiw.FlashInferWorkspace.create("cuda") as ws:
        ws.decode(source, cache, table)
        current = torch.cuda.stream(side) if name == "torch" else module.cuda.ExternalStream(side.cuda_stream)
        with current:
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000_000)  # about 0.1 s, behind which q is filled
            late[...] = source
            out = ws.decode(late, cache, table)
            found = made.host(out)
    assert_close(found, expected, 1e-5)


def test_a_capsule_is_used_once():
    class Once:
        capsule = np.zeros(4, np.float32).__dlpack__()

        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **options):
            return self.capsule

    producer = Once()
    _fiw.Tensor("x", producer)
    with pytest.raises(TypeError, match="x: __dlpack__ returned no DLPack capsule"):
        _fiw.Tensor("x", producer)


def test_a_producer_s_own_error_comes_through(ws, rng):
    torch = pytest.importorskip("torch", reason="skipped: no torch")
    q, k, v, table, _ = small(rng, torch.from_numpy)
    with pytest.raises(BufferError, match="require"):
        ws.decode(q.requires_grad_(), fiw.KvCache(k, v), table)


def test_streams_by_object():
    class Torch:
        cuda_stream = 7

    class CuPy:
        ptr = 8

    cpu = np.zeros(1)
    assert [_tensors.stream_handle(stream, cpu) for stream in (None, 5, Torch(), CuPy())] == [0, 5, 7, 8]
    with pytest.raises(TypeError, match="stream is of type str"):
        _tensors.stream_handle("0", cpu)
