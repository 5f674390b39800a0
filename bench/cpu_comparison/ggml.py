"""llama.cpp's flash attention alone: the operation `flash_attn_ext` of its tensor library, ggml, on the CPU.

The shared libraries are those that llama-cpp-python builds. ggml takes K and V without copies, in float32, float16 and
bfloat16; queries and results are float32, so the queries are widened before anything is timed. The mask, float16, is
made by the caller, as in llama.cpp. Every request of a batch is one index of the fourth dimension.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from cpu_comparison.problem import Problem, Refused

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
_CONTEXT_BYTES = 1 << 20  # descriptions of tensors and the graph, no data
_SUCCESS = 0


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


_POINTER, _INT, _FLOAT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_size_t
_FUNCTIONS = {
    "ggml_version": (ctypes.c_char_p, []),
    "ggml_init": (_POINTER, [_InitParams]),
    "ggml_free": (None, [_POINTER]),
    "ggml_new_tensor_4d": (_POINTER, [_POINTER, _INT, *[ctypes.c_int64] * 4]),
    "ggml_flash_attn_ext": (_POINTER, [*[_POINTER] * 5, *[_FLOAT] * 3]),
    "ggml_new_graph": (_POINTER, [_POINTER]),
    "ggml_build_forward_expand": (None, [_POINTER, _POINTER]),
    "ggml_backend_cpu_buffer_from_ptr": (_POINTER, [_POINTER, _SIZE]),
    "ggml_backend_buffer_free": (None, [_POINTER]),
    "ggml_backend_tensor_alloc": (_INT, [_POINTER, _POINTER, _POINTER]),
    "ggml_backend_supports_op": (ctypes.c_bool, [_POINTER, _POINTER]),
    "ggml_backend_graph_compute": (_INT, [_POINTER, _POINTER]),
    "ggml_backend_cpu_init": (_POINTER, []),
    "ggml_backend_cpu_set_n_threads": (None, [_POINTER, _INT]),
}


def installed_folder() -> Path | None:
    """Of an installed llama-cpp-python, which is not imported: that would load all of llama.cpp."""
    package = importlib.util.find_spec("llama_cpp")
    return None if package is None or package.origin is None else Path(package.origin).parent / "lib"


class _Graph:
    """One operation whose tensors lie where PyTorch has put them."""

    def __init__(
        self,
        ggml: SimpleNamespace,
        backend: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        self._ggml = ggml
        self._backend = backend
        self._kept = (q, k, v, mask, out)
        self._buffers: list[int] = []
        self._context = ggml.ggml_init(_InitParams(_CONTEXT_BYTES, None, True))
        sources = [None if x is None else self._tensor(x) for x in (q, k, v, mask)]
        result = ggml.ggml_flash_attn_ext(self._context, *sources, q.shape[-1] ** -0.5, 0.0, 0.0)
        self._place(result, out)
        if not ggml.ggml_backend_supports_op(backend, result):
            raise Refused("ggml's CPU backend says that it does not support the operation")
        self._graph = ggml.ggml_new_graph(self._context)
        ggml.ggml_build_forward_expand(self._graph, result)

    def _tensor(self, x: torch.Tensor) -> int:
        sizes = [1] * (4 - x.dim()) + list(x.shape)
        tensor = self._ggml.ggml_new_tensor_4d(self._context, _TYPES[x.dtype], *reversed(sizes))
        self._place(tensor, x)
        return tensor

    def _place(self, tensor: int, x: torch.Tensor) -> None:
        buffer = self._ggml.ggml_backend_cpu_buffer_from_ptr(x.data_ptr(), x.nbytes)
        self._buffers.append(buffer)
        if self._ggml.ggml_backend_tensor_alloc(buffer, tensor, x.data_ptr()) != _SUCCESS:
            raise RuntimeError("ggml_backend_tensor_alloc failed")

    def compute(self) -> None:
        status = self._ggml.ggml_backend_graph_compute(self._backend, self._graph)
        if status != _SUCCESS:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")

    def __del__(self) -> None:
        for buffer in self._buffers:
            self._ggml.ggml_backend_buffer_free(buffer)
        self._ggml.ggml_free(self._context)


def _load(folder: Path) -> SimpleNamespace:
    libraries = [ctypes.CDLL(str(folder / f"libggml-{part}.so"), ctypes.RTLD_GLOBAL) for part in ("base", "cpu")]
    functions = SimpleNamespace()
    for name, (result, arguments) in _FUNCTIONS.items():
        function = next(getattr(library, name) for library in libraries if hasattr(library, name))
        function.restype, function.argtypes = result, arguments
        setattr(functions, name, function)
    return functions


class Ggml:
    name = "llama.cpp"

    def __init__(self, folder: Path, threads: int) -> None:
        self._ggml = _load(folder)
        self.version: str = self._ggml.ggml_version().decode()
        self._backend: int = self._ggml.ggml_backend_cpu_init()
        self._ggml.ggml_backend_cpu_set_n_threads(self._backend, threads)

    def call(self, problem: Problem) -> Callable[[int], torch.Tensor]:
        shape = problem.shape
        if shape.kv_dtype == "fp8":
            raise Refused("ggml has no fp8")
        q = problem.q.transpose(1, 2).float().contiguous()
        out = torch.empty(problem.q.shape, dtype=torch.float32)
        mask = None
        if shape.qo_len > 1:
            hidden = torch.full(problem.visible.shape, -torch.inf, dtype=torch.float16)
            mask = hidden.masked_fill_(problem.visible, 0.0)
        graphs = [_Graph(self._ggml, self._backend, q, k, v, mask, out) for k, v in problem.dense]

        def call(i: int) -> torch.Tensor:
            graphs[i % len(graphs)].compute()
            return out

        return call
