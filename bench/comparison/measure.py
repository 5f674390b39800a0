"""Runs shapes: checks every contestant's output, then times those that are right, in turns."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from comparison import report
from comparison.clock import Clock, Sample, host_us, measure_limits
from comparison.contestants import DTYPES, Call, Contestant, Ours, Problem, contestants, copies_of, random_pool, reason
from comparison.library import installed_library
from comparison.shapes import ELEMENT_BYTES, Shape, decode, prefill

_ROTATED_BYTES = 192 << 20
"""Of K and V: over three times what the L2 cache of an H200 holds."""
_BLOCK_US = 400
"""A sample's calls take about this long together."""
_MOST_CALLS = 16
_CONTESTANT_SECONDS = 0.06
"""A contestant's samples of a shape take about this long, but there are at least three."""
_TOLERANCE = {"bf16": 0.02, "fp8": 0.03}
"""Norm of the difference over the norm."""
_CHECKED_REQUESTS = 3
_HOST_SAMPLES = 30


class DeviceLostError(Exception):
    """A fault that stays until the process ends."""


@dataclass
class _Entry:
    """A contestant that has served a shape."""

    call: Call
    wait_us: float = 200
    calls: int = 1
    samples: list[Sample] = field(default_factory=list)
    failure: str | None = None


class Comparison:
    def __init__(self, library: Path | None, shapes: list[Shape], *, quick: bool) -> None:
        self._stream = torch.cuda.Stream()
        torch.cuda.set_stream(self._stream)
        torch.set_grad_enabled(False)
        torch.backends.cuda.matmul.allow_tf32 = False
        self._samples = 5 if quick else 15
        self._clock = Clock(self._stream)
        self.limits = measure_limits(self._clock, self._stream, self._samples)
        self._ours, self._rivals, self._missing = contestants(library or installed_library(), self._stream)
        self.device = torch.cuda.get_device_name()
        self.versions = {
            "fiw": self._ours.workspace.version,
            "torch": torch.__version__,
            "cuDNN": str(torch.backends.cudnn.version()),
        } | {name: importlib.metadata.version(name) for name in ("flashinfer-python", "fa3-fwd") if _installed(name)}
        self.names = [self._ours.name, *(rival.name for rival in self._rivals), *self._missing]
        # A shape takes its cache, and as much again where rivals need it without pages.
        free = torch.cuda.mem_get_info()[0]
        self.most_bytes = int(0.3 * free)
        self._pools = {}
        for dtype in ("bf16", "fp8"):
            pools = [
                copies_of(shape, _ROTATED_BYTES) * shape.cache_bytes // 2
                for shape in shapes
                if shape.kv_dtype == dtype and self.fits(shape)
            ]
            if pools:
                elements = max(pools) // ELEMENT_BYTES[dtype]
                self._pools[dtype] = tuple(random_pool(dtype, elements, seed) for seed in (1, 2))
        self.host = measure_host(self._ours, self._clock)

    def fits(self, shape: Shape) -> bool:
        return shape.cache_bytes <= self.most_bytes

    def run(self, shape: Shape) -> report.Record:
        """Of a shape that fits. Raises only where the device itself failed."""
        record = report.record_of(shape)
        cells = record["cells"] = {name: {"reason": why} for name, why in self._missing.items()}
        problem = Problem(shape, *self._pools[shape.kv_dtype], _ROTATED_BYTES, seed=len(shape.name))
        entries = {}
        right: torch.Tensor | None = None
        expected = list(_expected_rows(problem))
        for contestant in (self._ours, *self._rivals):
            cells[contestant.name], entry, right = self._enter(contestant, problem, expected, right)
            if entry is not None:
                entries[contestant.name] = entry
        self._time(entries)
        for name, entry in entries.items():
            if entry.failure is not None:
                cells[name] = {"reason": entry.failure}
            else:
                cells[name]["us"] = statistics.median(sample.device for sample in entry.samples)
                cells[name]["enqueue_us"] = statistics.median(sample.host for sample in entry.samples)
                cells[name]["calls"] = entry.calls * len(entry.samples)
        return record

    def _enter(
        self,
        contestant: Contestant,
        problem: Problem,
        expected: list[tuple[slice, torch.Tensor]],
        right: torch.Tensor | None,
    ) -> tuple[dict[str, Any], _Entry | None, torch.Tensor | None]:
        """Makes the call, checks what it computes, and times its plan."""
        try:
            call = contestant.call(problem)
            problem.out.fill_(float("nan"))
            out = call.run(0)
            out = (problem.out if out is None else out).reshape(problem.q.shape)
            tolerance = _TOLERANCE[problem.shape.kv_dtype]
            for rows, values in expected:
                _check(out[rows].float(), values, tolerance, "the reference")
            if right is None:
                right = out.float()
            else:
                _check(out.float(), right, tolerance, "the first right output")
            cell = {}
            if call.plan is not None:
                cell["plan_us"] = host_us(call.plan, 5, call.forget)
            entry = _Entry(call)
            self._size(entry)
            return cell, entry, right
        except Exception as error:  # one contestant's failure is its own
            self._assure_device(contestant.name, error)
            return {"reason": reason(error)}, None, right

    def _size(self, entry: _Entry) -> None:
        """Calls a sample, of which there are fewer where a call takes long."""
        self._clock.sample(entry.call.run, 0, 2, entry.wait_us)
        once = self._clock.sample(entry.call.run, 2, 2, entry.wait_us)
        entry.calls = max(1, min(_MOST_CALLS, round(_BLOCK_US / once.device)))
        entry.wait_us = 1.5 * once.host * entry.calls + 50

    def _time(self, entries: dict[str, _Entry]) -> None:
        turns = list(entries.items())
        for round_ in range(self._samples):
            turns = turns[1:] + turns[:1]
            for name, entry in turns:
                spent = sum(sample.device for sample in entry.samples) * entry.calls * 1e-6
                if entry.failure is not None or (round_ >= 3 and spent > _CONTESTANT_SECONDS):
                    continue
                try:
                    entry.samples.append(
                        self._clock.sample(entry.call.run, round_ * entry.calls, entry.calls, entry.wait_us)
                    )
                except Exception as error:  # as in _enter
                    self._assure_device(name, error)
                    entry.failure = reason(error)

    def _assure_device(self, name: str, error: Exception) -> None:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise DeviceLostError(f"the device failed under {name}: {reason(error)}") from error


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _expected_rows(problem: Problem) -> Iterator[tuple[slice, torch.Tensor]]:
    """The last row of some requests, and a row between, in float32."""
    shape = problem.shape
    step = max(1, shape.batch // _CHECKED_REQUESTS)
    start = 0
    for r, kv_len in enumerate(shape.kv_lens):
        slots = problem.slots[start : start + kv_len]
        start += kv_len
        if r % step != step - 1:
            continue
        k, v = (
            t[0]
            .flatten(0, 1)
            .view(torch.uint8 if shape.kv_dtype == "fp8" else t[0].dtype)[slots]
            .view(DTYPES[shape.kv_dtype])
            .float()
            for t in (problem.k, problem.v)
        )
        for position in {shape.qo_len - 1, shape.qo_len // 3}:
            row = r * shape.qo_len + position
            seen = kv_len - shape.qo_len + position + 1
            q = problem.q[row].float().view(shape.kv_heads, -1, shape.head_dim)
            scores = torch.einsum("hgd,nhd->hgn", q, k[:seen]) / shape.head_dim**0.5
            values = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v[:seen])
            yield slice(row, row + 1), values.reshape(1, shape.qo_heads, shape.head_dim)


def _check(out: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    difference = float((out - expected).norm() / expected.norm())
    if not difference <= tolerance:
        raise ValueError(f"differs from {what} by {difference:.2g} of its norm, expected at most {tolerance:g}")


def _driver_copy() -> Callable[[], None]:
    """A call through ctypes that enqueues a copy of a few KB to the device, and nothing else."""
    enqueue = ctypes.CDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2
    enqueue.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    source = torch.zeros(4096, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream

    def copy() -> None:
        status = enqueue(target.data_ptr(), source.data_ptr(), source.nbytes, stream)
        if status != 0:
            raise RuntimeError(f"cuMemcpyHtoDAsync gave {status}")

    return copy


def measure_host(ours: Ours, clock: Clock) -> dict[str, float]:
    """Median microseconds of our own host work, at 64 requests of 4096 tokens and 16 prompts of 2048, 32/8 heads.

    Of planning and looking up it is the library's own count; that of planning holds a copy of the plan to the device,
    and what the driver takes to enqueue one stands beside it. Of enqueueing, which happens while the device is busy, it
    is the whole call through ctypes; the own count of that, and what an empty call costs, stand beside it.
    """
    result = {}
    workspace = ours.workspace

    def own(work: Callable[[], Any], which: int, samples: int, before: Callable[[], Any] = lambda: None) -> float:
        times = []
        for _ in range(samples):
            before()
            torch.cuda.synchronize()
            count = workspace.nanoseconds()[which]
            work()
            times.append((workspace.nanoseconds()[which] - count) * 1e-3)
        return statistics.median(times)

    for name, shape in (("decode", decode((32, 8), 64, 4096)), ("prefill", prefill((32, 8), 16, 2048, 2048))):
        pools = [torch.zeros(shape.cache_bytes // 4, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        problem = Problem(shape, *pools, 1, seed=1)  # the call holds addresses alone
        call = ours.call(problem)
        assert call.plan is not None and call.forget is not None and call.find is not None
        result[f"plan_{name}_us"] = own(call.plan, 0, _HOST_SAMPLES, call.forget)
        if name == "decode":
            layers = functools.partial(clock.sample, call.run, 0, _MOST_CALLS, 500)
            result["plan_hit_us"] = own(call.find, 0, _HOST_SAMPLES)
            result["enqueue_us"] = statistics.median(layers().host for _ in range(_HOST_SAMPLES))
            result["enqueue_own_count_us"] = own(layers, 1, _HOST_SAMPLES) / _MOST_CALLS
            result["empty_ctypes_call_us"] = host_us(workspace.forget_nothing, _HOST_SAMPLES)
    result["driver_copy_us"] = host_us(_driver_copy(), _HOST_SAMPLES)
    torch.cuda.synchronize()
    return result
