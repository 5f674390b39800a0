"""Seeds, and the frameworks that tests run with."""

import random
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import fiw


@pytest.fixture
def seed(request):
    """A fresh seed a test, printed when it fails."""
    value = random.SystemRandom().getrandbits(32)
    print(f"seed {value}")
    return value


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


@pytest.fixture
def ws():
    with fiw.FlashInferWorkspace.create("cpu", num_threads=2) as workspace:
        yield workspace


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def device(request):
    """A torch.device. Tests on CUDA are skipped where there is none."""
    torch = pytest.importorskip("torch", reason="skipped: no torch")
    if request.param == "cuda" and not (torch.cuda.is_available() and fiw.compiled_with("cuda")):
        pytest.skip("skipped: no CUDA device")
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


NUMPY_DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def _numpy():
    return SimpleNamespace(
        name="numpy",
        make=lambda array, dtype="float32": np.asarray(array).astype(NUMPY_DTYPES[dtype]),
        host=lambda array: np.asarray(array).astype(np.float64),
        pointer=lambda array: array.ctypes.data,
        dtype=lambda array: array.dtype.name,
        kind=np.ndarray,
        writable=True,
    )


def _torch():
    torch = pytest.importorskip("torch", reason="skipped: no torch")
    return SimpleNamespace(
        name="torch",
        make=lambda array, dtype="float32": torch.from_numpy(np.array(array, np.float32)).to(getattr(torch, dtype)),
        host=lambda tensor: tensor.to(torch.float64).numpy(),
        pointer=lambda tensor: tensor.data_ptr(),
        dtype=lambda tensor: str(tensor.dtype).removeprefix("torch."),
        kind=torch.Tensor,
        writable=True,
    )


def _jax():
    jax = pytest.importorskip("jax", reason="skipped: no jax")
    return SimpleNamespace(
        name="jax",
        make=lambda array, dtype="float32": jax.numpy.asarray(np.asarray(array).astype(NUMPY_DTYPES[dtype])),
        host=lambda array: np.asarray(array).astype(np.float64),
        pointer=lambda array: array.unsafe_buffer_pointer(),
        dtype=lambda array: array.dtype.name,
        kind=jax.Array,
        writable=False,
    )


@pytest.fixture(params=[_numpy, _torch, _jax], ids=["numpy", "torch", "jax"])
def framework(request):
    return request.param()
