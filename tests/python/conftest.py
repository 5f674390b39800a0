"""Seeds, workspaces, and the devices and frameworks that tests run with."""

import random

import numpy as np
import pytest

import fiw
from frameworks import FRAMEWORKS, has_cuda


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
def ws(request):
    """A workspace on the CPU, or on the device of the test's framework."""
    device = request.getfixturevalue("framework").device if "framework" in request.fixturenames else "cpu"
    with fiw.FlashInferWorkspace.create(device, num_threads=2) as workspace:
        yield workspace


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def device(request):
    """A torch.device. Tests on CUDA are skipped where there is none."""
    torch = pytest.importorskip("torch", reason="skipped: no torch")
    if request.param == "cuda" and not has_cuda():
        pytest.skip("skipped: no CUDA device")
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    if "cuda" in request.param and not has_cuda():
        pytest.skip("skipped: no CUDA device")
    return FRAMEWORKS[request.param]()
