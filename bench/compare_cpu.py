#!/usr/bin/env python3
"""Compares the CPU backend with PyTorch's and llama.cpp's attention: same process, same values, in turns.

Prints a row a shape: milliseconds by contestant, our time over the best rival's, and the share of our time that the
machine's read bandwidth and FMA peak, measured before each shape, cannot do without. A time counts only after the
result was compared with float64. bench/README-cpu.md says how to set it up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cpu_comparison import table
from cpu_comparison.shapes import shapes

from comparison.report import Record, reasons

_ROOT = Path(__file__).parent.parent


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare_cpu.py", description=__doc__)
    parser.add_argument("--filter", default="", metavar="PART", help="only shapes whose name holds this")
    parser.add_argument("--threads", type=int, metavar="N", help="of every contestant; left out: all that there are")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="of which medians are taken; default: 9")
    parser.add_argument("--seed", type=int, metavar="N", help="of the random tensors; left out: a new one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers and reasons there")
    parser.add_argument(
        "--tool",
        type=Path,
        default=_ROOT / "build" / "release" / "tools" / "fiw" / "fiw",
        metavar="FILE",
        help="the command line that measures the limits; default: build/release/tools/fiw/fiw",
    )
    parser.add_argument(
        "--ggml", type=Path, metavar="DIR", help="folder of libggml-cpu.so; left out: that of llama-cpp-python"
    )
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    options.threads = cores if options.threads is None else options.threads
    options.seed = random.getrandbits(32) if options.seed is None else options.seed
    if not 1 <= options.threads <= cores:
        parser.error(f"--threads is {options.threads}, expected 1 to {cores}")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}, expected at least 1")
    if not options.tool.is_file():
        parser.error(f"--tool is {options.tool}, expected a file: scripts/build release fiw_tool makes it")
    if options.ggml is not None and not (options.ggml / "libggml-cpu.so").is_file():
        parser.error(f"--ggml is {options.ggml}, expected a folder with libggml-cpu.so")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json is {options.json}, expected a file in a folder that exists")
    try:
        options.shapes = shapes(options.filter)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch's name for large pages, as caches should have
    import torch
    from cpu_comparison.contestants import Contestant, FoldedSdpa, Ours, Sdpa
    from cpu_comparison.ggml import Ggml, installed_folder
    from cpu_comparison.measure import measure, measure_limits

    torch.set_num_threads(options.threads)
    contestants: list[Contestant] = [Ours(options.threads), Sdpa(), FoldedSdpa()]
    versions = {"torch": torch.__version__}
    folder = options.ggml or installed_folder()
    if folder is not None:
        contestants.append(Ggml(folder, options.threads))
        versions["ggml"] = contestants[-1].version
    names = [contestant.name for contestant in contestants]

    print(f"{options.threads} threads, seed {options.seed}, {', '.join(f'{k} {v}' for k, v in versions.items())}")
    if folder is None:
        print("without llama.cpp: neither is llama-cpp-python installed nor --ggml given")
    print("\nmilliseconds, medians\n" + table.header(names), flush=True)
    records: list[Record] = []
    stopped = None
    try:
        for shape in options.shapes:
            print(f"{len(records) + 1} of {len(options.shapes)}: {shape.name}", file=sys.stderr)
            record = {
                "name": shape.name,
                "bytes": shape.bytes,
                "operations": shape.operations,
                "limits": measure_limits(options.tool, options.threads),
                "cells": measure(shape, contestants, options.rounds, options.seed),
            }
            records.append(record)
            print(table.row(record, names), flush=True)
    except (Exception, KeyboardInterrupt) as error:  # what was measured before is worth its report
        stopped = f"{type(error).__name__}: {error}"

    print("\nno time:")
    for line in reasons(records):
        print(f"    {line}")
    print(f"\n{table.verdict(records)}")
    if stopped is not None:
        print(f"stopped after {len(records)} of {len(options.shapes)} shapes: {stopped}", file=sys.stderr)
    if options.json is not None:
        result: dict[str, Any] = {
            "command": ["compare_cpu.py", *arguments],
            "threads": options.threads,
            "seed": options.seed,
            "versions": versions,
            "contestants": names,
            "shapes": records,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if stopped is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
