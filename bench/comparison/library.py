"""The C ABI of flashinfer-workspace through ctypes: what a comparison needs of it, at the least cost a call.

Structs are filled once and passed as pointers, so that a timed call converts nothing.
"""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import POINTER, byref, c_char, c_float, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

_ABI_VERSION = 1
_CPU, _CUDA = 1, 2
_INT, _FLOAT, _BFLOAT, _E4M3 = 0, 2, 4, 10
DTYPES = {"int32": (_INT, 32), "float32": (_FLOAT, 32), "bf16": (_BFLOAT, 16), "fp8": (_E4M3, 8)}
"""DLPack's type code and bits of what is passed."""


class _DataType(ctypes.Structure):
    _fields_ = (("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("dtype", _DataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class _Error(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("code", c_int32),
        ("reason", c_int32),
        ("backend_code", c_int32),
        ("reserved", c_int32),
        ("index", c_int64),
        ("bytes_required", c_uint64),
        ("message", c_char * 256),
    )


class _Params(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("num_qo_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim_qk", c_int32),
        ("head_dim_vo", c_int32),
        ("sm_scale", c_float),
        ("causal", c_int32),
        ("window_left", c_int32),
        ("logits_soft_cap", c_float),
    )


class _StepSpec(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("params", POINTER(_Params)),
        ("q_dtype", _DataType),
        ("kv_dtype", _DataType),
        ("lse", c_int32),
        ("sinks", c_int32),
        ("alibi", c_int32),
        ("custom_mask", c_int32),
    )


class _KvCache(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("k", POINTER(_Tensor)),
        ("v", POINTER(_Tensor)),
        ("kv", POINTER(_Tensor)),
        ("k_head_scale", POINTER(_Tensor)),
        ("v_head_scale", POINTER(_Tensor)),
        ("k_scale", c_float),
        ("v_scale", c_float),
        ("layout", c_int32),
        ("reserved", c_int32),
    )


class _CacheStats(ctypes.Structure):
    _fields_ = tuple((name, c_uint64) for name in ("hits", "misses", "evictions", "invalidations", "entries", "bytes"))


class _WorkspaceStats(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("decode", _CacheStats),
        ("prefill", _CacheStats),
        ("verify", _CacheStats),
        ("float_scratch_bytes", c_uint64),
        ("float_scratch_peak", c_uint64),
        ("int_scratch_bytes", c_uint64),
        ("plan_nanoseconds", c_uint64),
        ("run_nanoseconds", c_uint64),
        ("tables_known", c_uint64),
        ("tables_copied", c_uint64),
    )


class Tensor:
    """A `DLTensor`, compact, over memory that the caller keeps alive."""

    def __init__(self, address: int, dtype: str, shape: tuple[int, ...], device: int) -> None:
        """`device` is a CUDA ordinal, or -1 for the CPU."""
        code, bits = DTYPES[dtype]
        self._array: np.ndarray | None = None
        self._shape = (c_int64 * len(shape))(*shape)
        self._struct = _Tensor(
            address,
            _CPU if device < 0 else _CUDA,
            max(device, 0),
            len(shape),
            _DataType(code, bits, 1),
            ctypes.cast(self._shape, POINTER(c_int64)),
        )
        self.pointer = ctypes.pointer(self._struct)

    @staticmethod
    def of(array: np.ndarray) -> Tensor:
        """Of int32 or float32 in host memory."""
        tensor = Tensor(array.ctypes.data, array.dtype.name, array.shape, -1)
        tensor._array = array
        return tensor


class KvCache:
    """K and V of one layer, [pages, page_size, heads, head_dim] each."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self._tensors = (k, v)
        self._struct = _KvCache(ctypes.sizeof(_KvCache), k.pointer, v.pointer, k_scale=1.0, v_scale=1.0)
        self.pointer = ctypes.pointer(self._struct)


class StepSpec:
    """What a step is planned for: causal, bfloat16 or float32 queries."""

    def __init__(self, qo_heads: int, kv_heads: int, head_dim: int, q_dtype: str, kv_dtype: str) -> None:
        self._params = _Params(ctypes.sizeof(_Params), qo_heads, kv_heads, head_dim, head_dim, causal=1, window_left=-1)
        self._struct = _StepSpec(
            ctypes.sizeof(_StepSpec),
            ctypes.pointer(self._params),
            _DataType(*DTYPES[q_dtype], 1),
            _DataType(*DTYPES[kv_dtype], 1),
        )
        self.pointer = ctypes.pointer(self._struct)


def installed_library() -> Path:
    """The shared library with the C ABI that the installed Python package holds."""
    spec = importlib.util.find_spec("fiw._fiw") if importlib.util.find_spec("fiw") else None
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the Python package fiw is not installed, expected it or --library PATH/libfiw.so")
    return Path(spec.origin)


class Workspace:
    """A workspace on one device, with the calls of a comparison. Errors are RuntimeErrors with the library's words."""

    def __init__(self, path: Path, device: int) -> None:
        self._c = c = ctypes.CDLL(str(path))
        for name in ("free", "invalidate_runtime_cache", "invalidate_verify_runtime_cache"):
            getattr(c, f"fiw_workspace_{name}").argtypes = (c_void_p,) * (1 if name == "free" else 2)
        c.fiw_workspace_create.argtypes = (c_int32, c_size_t, POINTER(c_void_p), POINTER(_Error))
        c.fiw_workspace_get_stats.argtypes = (c_void_p, POINTER(_WorkspaceStats), POINTER(_Error))
        c.fiw_check_abi.argtypes = (c_int32, POINTER(_Error))
        tensor = POINTER(_Tensor)
        c.fiw_page_table_from_csr.argtypes = (
            c_int32,
            c_int64,
            tensor,
            tensor,
            tensor,
            tensor,
            POINTER(c_void_p),
            POINTER(_Error),
        )
        c.fiw_page_table_free.argtypes = c.fiw_step_free.argtypes = (c_void_p,)
        c.fiw_page_table_free.restype = c.fiw_step_free.restype = c.fiw_workspace_free.restype = None
        planned = (c_void_p, POINTER(_StepSpec), POINTER(c_void_p), POINTER(_Error))
        c.fiw_plan_decode.argtypes = (c_void_p, *planned)
        c.fiw_plan_verify.argtypes = (c_void_p, c_int32, *planned)
        c.fiw_plan_prefill.argtypes = (c_void_p, tensor, *planned)
        c.fiw_step_run.argtypes = (
            c_void_p,
            tensor,
            POINTER(_KvCache),
            tensor,
            tensor,
            c_void_p,
            c_void_p,
            POINTER(_Error),
        )
        c.fiw_version.restype = ctypes.c_char_p
        self._error = ctypes.pointer(_Error(ctypes.sizeof(_Error)))
        self._handle = c_void_p()
        self._check(c.fiw_check_abi(_ABI_VERSION, self._error))
        self._check(c.fiw_workspace_create(device, 0, byref(self._handle), self._error))

    @property
    def version(self) -> str:
        return self._c.fiw_version().decode()

    def close(self) -> None:
        self._c.fiw_workspace_free(self._handle)
        self._handle = c_void_p()

    def page_table(
        self, page_size: int, num_pages: int, indptr: np.ndarray, indices: np.ndarray, last_page_len: np.ndarray
    ) -> PageTable:
        return PageTable(self, page_size, num_pages, indptr, indices, last_page_len)

    def plan(self, kind: str, table: PageTable, qo_len: int, spec: StepSpec) -> Step:
        """`kind` is decode, verify or prefill."""
        return Step(self, kind, table, qo_len, spec)

    def forget_plans(self) -> None:
        self._check(self._c.fiw_workspace_invalidate_runtime_cache(self._handle, self._error))
        self._check(self._c.fiw_workspace_invalidate_verify_runtime_cache(self._handle, self._error))

    def forget_nothing(self) -> None:
        """A call that does nothing, to know what ctypes costs."""
        self._c.fiw_workspace_invalidate_runtime_cache(None, None)

    def nanoseconds(self) -> tuple[int, int]:
        """Host time since creation in planning, look-ups included, and in attention calls: the library's own count."""
        stats = _WorkspaceStats(ctypes.sizeof(_WorkspaceStats))
        self._check(self._c.fiw_workspace_get_stats(self._handle, byref(stats), self._error))
        return stats.plan_nanoseconds, stats.run_nanoseconds

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(self._error.contents.message.decode() or f"status {status}")


class PageTable:
    """A page table with the arrays it is made of, so that it can be made again."""

    def __init__(
        self,
        workspace: Workspace,
        page_size: int,
        num_pages: int,
        indptr: np.ndarray,
        indices: np.ndarray,
        last_page_len: np.ndarray,
    ) -> None:
        self._workspace = workspace
        self._size = (page_size, num_pages)
        self._arrays = tuple(Tensor.of(array) for array in (indptr, indices, last_page_len))
        self.batch = len(last_page_len)
        self.handle = c_void_p()
        self.make()

    def make(self) -> None:
        """Copies and validates the arrays, as an engine does once a step."""
        self.free()
        c, error = self._workspace._c, self._workspace._error
        arrays = (array.pointer for array in self._arrays)
        status = c.fiw_page_table_from_csr(*self._size, *arrays, None, byref(self.handle), error)
        self._workspace._check(status)

    def free(self) -> None:
        self._workspace._c.fiw_page_table_free(self.handle)
        self.handle = c_void_p()


class Step:
    """A planned step."""

    def __init__(self, workspace: Workspace, kind: str, table: PageTable, qo_len: int, spec: StepSpec) -> None:
        self._workspace = workspace
        self._table = table
        self._spec = spec
        c = workspace._c
        self._plan = getattr(c, f"fiw_plan_{kind}")
        self._run = c.fiw_step_run
        rows = np.arange(table.batch + 1, dtype=np.int32) * np.int32(qo_len)
        self._qo_indptr = Tensor.of(rows)
        self._first: tuple[Any, ...] = {"decode": (), "verify": (qo_len,), "prefill": (self._qo_indptr.pointer,)}[kind]
        self._handle = c_void_p()
        self.make()

    def make(self) -> None:
        """Looks the plan up, or makes it."""
        self.free()
        status = self._plan(
            self._workspace._handle,
            *self._first,
            self._table.handle,
            self._spec.pointer,
            byref(self._handle),
            self._workspace._error,
        )
        self._workspace._check(status)

    def free(self) -> None:
        self._workspace._c.fiw_step_free(self._handle)
        self._handle = c_void_p()

    def run(self, q: Tensor, kv: KvCache, out: Tensor, stream: int) -> None:
        """One layer, enqueued on `stream`."""
        status = self._run(self._handle, q.pointer, kv.pointer, out.pointer, None, None, stream, self._workspace._error)
        if status != 0:
            self._workspace._check(status)
