"""Times of all contestants on one shape, in turns, each after its result was found right; and the machine's limits."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from cpu_comparison.contestants import Contestant
from cpu_comparison.problem import Problem, Refused
from cpu_comparison.shapes import Shape

_REST_SECONDS = 0.02
"""Between contestants: an OpenMP team goes on spinning for a while after its work."""


def measure_limits(tool: Path, threads: int) -> dict[str, float]:
    """Bytes and float32 operations a second, as `fiw bench` measures them between its calls."""
    command = [str(tool), "bench", "--json", "--filter", "decode 8/1", "--min-time", "0.5", "--threads", str(threads)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} exited with {run.returncode}: {run.stderr.strip()}")
    (shape,) = json.loads(run.stdout)["shapes"]
    return {"read_bytes_per_second": shape["read_bandwidth"], "operations_per_second": shape["fma_peak"]}


def measure(shape: Shape, contestants: list[Contestant], rounds: int, seed: int) -> dict[str, dict[str, Any]]:
    """By contestant `us`, the median, with `samples_us`, or the `reason` why there is no time."""
    problem = Problem(shape, seed)
    cells: dict[str, dict[str, Any]] = {}
    calls = {}
    for contestant in contestants:
        try:
            call = contestant.call(problem)
            fault = problem.fault(call(0))
        except Refused as error:
            fault = str(error)
        except Exception as error:  # a rival's failure is told in its cell
            fault = f"failed: {type(error).__name__}: {error}"
        if fault is None:
            calls[contestant.name] = call
        else:
            cells[contestant.name] = {"reason": fault}

    samples: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name, call in calls.items():
            time.sleep(_REST_SECONDS)
            call(2 * i)  # wakes its threads
            began = time.perf_counter()
            call(2 * i + 1)
            samples[name].append((time.perf_counter() - began) * 1e6)
    return cells | {name: {"us": statistics.median(times), "samples_us": times} for name, times in samples.items()}
