#!/usr/bin/env python3
"""Compares flashinfer-workspace with other attention libraries on one GPU: same process, same tensors, in turns.

Prints a row a shape: microseconds on the device by contestant, ours over the best rival, and our share of what the
device allows, which the run measures itself; then why cells are empty, and which targets are met. How to set it up is
in docs/comparing.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from comparison import report
from comparison.shapes import shapes

_TRACE = Path(__file__).parent.parent / "data" / "azure_llm_conv_2023_sample.csv"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare.py", description=__doc__)
    parser.add_argument("--filter", default="", metavar="PART", help="only shapes whose name holds this")
    parser.add_argument("--quick", action="store_true", help="a few small shapes, a few samples")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers and reasons there")
    parser.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="start no shape later than this; targets come first"
    )
    parser.add_argument(
        "--library", type=Path, metavar="FILE", help="libfiw.so; left out: that of the installed Python package"
    )
    options = parser.parse_args(arguments)
    if options.time_limit is not None and not options.time_limit > 0:
        parser.error(f"--time-limit is {options.time_limit:g}, expected a number above 0")
    if options.library is not None and not options.library.is_file():
        parser.error(f"--library is {options.library}, expected a file")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json is {options.json}, expected a file in a folder that exists")
    try:
        options.shapes = shapes(_TRACE, quick=options.quick, part=options.filter)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return options


def has_device() -> bool:
    # Shapes of many sizes follow each other: without it their memory would not fit into each other's.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not has_device():
        print("skipped: no CUDA device")
        return 0
    from comparison.measure import Comparison

    began = time.monotonic()
    comparison = Comparison(options.library, options.shapes, quick=options.quick)
    limits, names = comparison.limits, comparison.names
    print(
        f"{comparison.device}: a copy reads and writes {limits['copy_bytes_per_second'] * 1e-12:.2f} TB/s, reading "
        f"alone {limits['read_bytes_per_second'] * 1e-12:.2f} TB/s, bf16 products "
        f"{limits['bf16_operations_per_second'] * 1e-12:.0f} TFLOP/s, an empty kernel in a graph "
        f"{limits['empty_kernel_us']:.2f} us"
    )
    print(", ".join(f"{name} {version}" for name, version in comparison.versions.items()))
    print("\nmicroseconds on the device, medians\n" + report.header(names), flush=True)

    planned = [shape for shape in options.shapes if comparison.fits(shape)]
    records: list[report.Record] = []
    stopped, failed = "", False
    try:
        for shape in planned:
            elapsed = time.monotonic() - began
            if options.time_limit is not None and elapsed > options.time_limit:
                stopped = "the time limit was reached"
                break
            print(f"{len(records) + 1} of {len(planned)}, {elapsed:.0f} s: {shape.name}", file=sys.stderr)
            records.append(comparison.run(shape))
            print(report.row(records[-1], names, limits), flush=True)
    except (Exception, KeyboardInterrupt) as error:  # what was measured before is worth its report
        stopped, failed = f"{type(error).__name__}: {error}", True

    not_run = {shape.name: stopped for shape in planned[len(records) :]} | {
        shape.name: f"K and V of {shape.cache_bytes / 1e9:.0f} GB, expected at most {comparison.most_bytes / 1e9:.0f}"
        for shape in options.shapes
        if not comparison.fits(shape)
    }
    print("\nmicroseconds of host time to plan and to enqueue, medians\n" + report.host_header(names))
    for line in report.host_rows(records, names):
        print(line)
    print("fiw itself: " + ", ".join(f"{name} {us:.2f}" for name, us in comparison.host.items()))
    print("\nno time:")
    for line in report.reasons(records):
        print(f"    {line}")
    for line in report.not_run_rows(not_run):
        print(f"    {line}")
    print("\ntargets:")
    for line in report.summary(records, limits, comparison.host):
        print(line)
    if options.json is not None:
        result: dict[str, Any] = {
            "command": ["compare.py", *arguments],
            "device": comparison.device,
            "versions": comparison.versions,
            "limits": limits,
            "host": comparison.host,
            "contestants": names,
            "shapes": records,
            "not_run": not_run,
            "targets": [
                dataclasses.asdict(verdict) | {"met": verdict.met}
                for verdict in report.verdicts(records, limits, comparison.host)
            ],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
