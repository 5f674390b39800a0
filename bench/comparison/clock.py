"""Times of work on the device without the host's share, and the limits that the device itself sets.

What is timed is enqueued behind a kernel that only waits, and counts only where the host was done before that kernel
was: then the time between two events is the device's own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_TRIES = 6


@dataclass(frozen=True)
class Sample:
    """Microseconds a call."""

    device: float
    host: float
    """To enqueue it."""


class Clock:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._cycles_per_us = 1000.0
        cycles = 1_000_000
        waits = []
        for _ in range(5):
            self._begin.record(stream)
            torch.cuda._sleep(cycles)
            self._end.record(stream)
            self._end.synchronize()
            waits.append(self._begin.elapsed_time(self._end) * 1e3)
        self._cycles_per_us = cycles / statistics.median(waits)

    def sample(self, call: Callable[[int], None], first: int, calls: int, wait_us: float) -> Sample:
        """`call(first)`, `call(first + 1)`, ...; `wait_us` is about how long enqueueing them takes."""
        for _ in range(_TRIES):
            torch.cuda._sleep(int(wait_us * self._cycles_per_us))
            self._begin.record(self._stream)
            began = time.perf_counter()
            for i in range(first, first + calls):
                call(i)
            host = time.perf_counter() - began
            self._end.record(self._stream)
            in_time = not self._begin.query()
            self._end.synchronize()
            if in_time:
                return Sample(self._begin.elapsed_time(self._end) * 1e3 / calls, host * 1e6 / calls)
            wait_us = 2 * max(wait_us, host * 1e6)
        raise RuntimeError(f"the host waited for the device in {_TRIES} tries: the call cannot be timed apart from it")


def host_us(call: Callable[[], Any], samples: int, before: Callable[[], Any] | None = None) -> float:
    """Median microseconds of host time, each with an idle device, after `before`, which is not timed."""
    times = []
    for _ in range(samples):
        if before is not None:
            before()
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def measure_limits(clock: Clock, stream: torch.cuda.Stream, samples: int) -> dict[str, float]:
    """Bytes and operations a second, and the cost of a kernel that does nothing."""

    def median_us(call: Callable[[int], Any], calls: int) -> float:
        clock.sample(call, 0, calls, 200)
        return statistics.median(clock.sample(call, 0, calls, 200).device for _ in range(samples))

    source, target = (torch.randn(1 << 28, device="cuda") for _ in range(2))
    result = torch.empty((), device="cuda")
    copy_us = median_us(lambda _: target.copy_(source), 2)
    read_us = min(
        median_us(lambda _: torch.sum(source, 0, out=result), 2),
        median_us(lambda _: torch.amax(source, 0, out=result), 2),
    )
    side = 8192
    a, b, c = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    matmul_us = median_us(lambda _: torch.mm(a, b, out=c), 4)
    nodes = 200
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(nodes):
            torch.cuda._sleep(0)
    return {
        "copy_bytes_per_second": 2e6 * source.nbytes / copy_us,
        "read_bytes_per_second": 1e6 * source.nbytes / read_us,
        "bf16_operations_per_second": 2e6 * side**3 / matmul_us,
        "empty_kernel_us": median_us(lambda _: graph.replay(), 1) / nodes,
    }
