"""What differs from framework to framework: element types, allocation, streams. Everything else goes through DLPack."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from fiw import _fiw
from fiw.errors import InvalidArgumentError


class Tensor(Protocol):
    """An array of NumPy, PyTorch, CuPy, JAX or another framework with DLPack."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


Indices = Tensor | Sequence[int]
"""int32 on the CPU, of rank 1; plain integers are converted, other arrays are not."""

# Element types that some producer does not export, and the integers of the same width that they all do.
_CARRIERS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}

_REASON_OPTIONS = 403


def is_torch(tensor: Any) -> bool:
    return "torch" in sys.modules and isinstance(tensor, sys.modules["torch"].Tensor)


def is_cupy(tensor: Any) -> bool:
    return "cupy" in sys.modules and isinstance(tensor, sys.modules["cupy"].ndarray)


def dtype_name(dtype: Any) -> str:
    """The name of a dtype that is given as a name or as a framework's object, as DLPack-minded frameworks spell it."""
    text = str(dtype)
    if isinstance(dtype, str) or text.startswith("torch."):
        return text.removeprefix("torch.")
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return text


def view(name: str, tensor: Any, *, dtype: str = "", writable: bool = False, stream: int = 0) -> _fiw.Tensor:
    """Imports the argument called `name`. `dtype` says what the elements are if the tensor itself cannot."""
    if not dtype and (is_torch(tensor) or isinstance(tensor, np.ndarray)):
        element = dtype_name(tensor.dtype)
        if element in _CARRIERS and not (element == "bfloat16" and is_torch(tensor)):
            carrier = _CARRIERS[element]
            tensor = tensor.view(getattr(sys.modules["torch"], carrier) if is_torch(tensor) else carrier)
            dtype = element
    return _fiw.Tensor(name, tensor, dtype, writable, stream)


def optional_view(name: str, tensor: Any, *, writable: bool = False, stream: int = 0) -> _fiw.Tensor | None:
    return None if tensor is None else view(name, tensor, writable=writable, stream=stream)


def index_view(name: str, indices: Any) -> _fiw.Tensor:
    """As `view`, for index arrays."""
    if isinstance(indices, Sequence) and not isinstance(indices, (str, bytes)):
        values = np.array(indices if len(indices) > 0 else np.empty(0, np.int32))
        if values.dtype.kind not in "iu" or (values.size and np.abs(values.astype(np.int64)).max() > 2**31 - 1):
            raise InvalidArgumentError(f"{name}: {values.dtype} values, expected integers that int32 holds", 110)
        indices = values.astype(np.int32)
    return view(name, indices)


def empty_like(tensor: Any, shape: tuple[int, ...], *, float32: bool = False) -> Any:
    """A new tensor of `tensor`'s framework, device and, unless `float32`, element type."""
    if is_torch(tensor):
        return tensor.new_empty(shape, dtype=sys.modules["torch"].float32 if float32 else tensor.dtype)
    if is_cupy(tensor):  # which has no namespace of the array API
        with tensor.device:
            return sys.modules["cupy"].empty(shape, np.float32 if float32 else tensor.dtype)
    if not hasattr(tensor, "__array_namespace__"):
        raise InvalidArgumentError(
            f"out: cannot allocate for a {type(tensor).__name__}, expected out and lse to be given", _REASON_OPTIONS
        )
    namespace = tensor.__array_namespace__()
    dtype = namespace.float32 if float32 else tensor.dtype
    return namespace.empty(shape, dtype=dtype, device=tensor.device)


def from_host_like(tensor: Any, array: np.ndarray, stream: int) -> Any:
    """`array` in the framework and on the device of `tensor`, for a call on `stream` that it need not outlive."""
    if isinstance(tensor, np.ndarray):
        return array
    if is_torch(tensor):
        torch = sys.modules["torch"]
        moved = torch.from_numpy(array).to(tensor.device)
        if moved.is_cuda:
            moved.record_stream(torch.cuda.ExternalStream(stream, device=moved.device))
        return moved
    if is_cupy(tensor):
        with tensor.device:
            return sys.modules["cupy"].asarray(array)
    return tensor.__array_namespace__().asarray(array, device=tensor.device)


def to_host(name: str, tensor: Any) -> np.ndarray:
    """A NumPy array of a tensor on any device, without a copy where it is on the CPU."""
    if is_torch(tensor):
        return np.asarray(tensor.detach().cpu())
    if is_cupy(tensor):
        return np.asarray(tensor.get())
    try:
        return np.asarray(tensor)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name}: {error}", _REASON_OPTIONS) from error


def stream_handle(stream: Any, tensor: Any) -> int:
    """The `cudaStream_t` of a stream object, or the current stream of `tensor`'s framework; 0 on the CPU."""
    if isinstance(stream, int):
        return stream
    if stream is not None:
        for attribute in ("cuda_stream", "ptr"):  # PyTorch, CuPy
            if hasattr(stream, attribute):
                return int(getattr(stream, attribute))
        raise TypeError(f"stream is of type {type(stream).__name__}, expected an int or a stream of PyTorch or CuPy")
    if is_torch(tensor):
        return sys.modules["torch"].cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
    if is_cupy(tensor):
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return 0


def device_index(device: Any) -> int:
    """-1 for the CPU, else a CUDA ordinal, of an int, a name or a `torch.device`."""
    if isinstance(device, int):
        return device
    kind, _, ordinal = str(device).partition(":")
    if kind == "cpu":
        return -1
    if kind == "cuda" and (not ordinal or ordinal.isdigit()):
        return int(ordinal or 0)
    raise InvalidArgumentError(f"device is {device!r}, expected -1, an ordinal, 'cpu', 'cuda' or 'cuda:N'", 601)
