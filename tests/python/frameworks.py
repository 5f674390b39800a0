"""The frameworks that tests make tensors with, on the CPU and on CUDA."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import fiw

NUMPY_DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def has_cuda():
    torch = pytest.importorskip("torch", reason="skipped: no torch")
    return torch.cuda.is_available() and fiw.compiled_with("cuda")


def _numpy():
    return SimpleNamespace(
        device="cpu",
        make=lambda array, dtype="float32": np.asarray(array).astype(NUMPY_DTYPES[dtype]),
        put=lambda array: array,
        host=lambda array: np.asarray(array).astype(np.float64),
        pointer=lambda array: array.ctypes.data,
        dtype=lambda array: array.dtype.name,
        kind=np.ndarray,
        writable=True,
    )


def _torch(device):
    torch = pytest.importorskip("torch", reason="skipped: no torch")
    return SimpleNamespace(
        device=device,
        make=lambda array, dtype="float32": (
            torch.from_numpy(np.array(array, np.float32)).to(device).to(getattr(torch, dtype))
        ),
        put=lambda array: torch.from_numpy(array).to(device),
        host=lambda tensor: tensor.to(torch.float64).cpu().numpy(),
        pointer=lambda tensor: tensor.data_ptr(),
        dtype=lambda tensor: str(tensor.dtype).removeprefix("torch."),
        kind=torch.Tensor,
        writable=True,
    )


def _jax(device):
    jax = pytest.importorskip("jax", reason="skipped: no jax")
    place = jax.devices(device)[0]

    def host(array):
        if device == "cuda":  # calls run on the default stream, which JAX does not wait for
            pytest.importorskip("torch").cuda.synchronize()
        return np.asarray(array).astype(np.float64)

    return SimpleNamespace(
        device=device,
        make=lambda array, dtype="float32": jax.device_put(np.asarray(array).astype(NUMPY_DTYPES[dtype]), place),
        put=lambda array: jax.device_put(array, place),
        host=host,
        pointer=lambda array: array.unsafe_buffer_pointer(),
        dtype=lambda array: array.dtype.name,
        kind=jax.Array,
        writable=False,
    )


def _cupy():
    cupy = pytest.importorskip("cupy", reason="skipped: no cupy")

    def make(array, dtype="float32"):
        if dtype not in ("float32", "float16"):
            pytest.skip(f"skipped: cupy has no {dtype}")
        return cupy.asarray(np.asarray(array).astype(dtype))

    return SimpleNamespace(
        device="cuda",
        make=make,
        put=cupy.asarray,
        host=lambda array: cupy.asnumpy(array).astype(np.float64),
        pointer=lambda array: array.data.ptr,
        dtype=lambda array: array.dtype.name,
        kind=cupy.ndarray,
        writable=True,
    )


FRAMEWORKS = {
    "numpy": _numpy,
    "torch": lambda: _torch("cpu"),
    "jax": lambda: _jax("cpu"),
    "torch-cuda": lambda: _torch("cuda"),
    "jax-cuda": lambda: _jax("cuda"),
    "cupy-cuda": _cupy,
}
