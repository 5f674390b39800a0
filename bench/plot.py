#!/usr/bin/env python3
"""Draws the roofline of a comparison: what bench/compare.py wrote with --json, against the limits that it measured."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from comparison import report

_MARKERS = {"decode": "o", "verify": "s", "prefill": "^"}


def points(records: list[report.Record], contestant: str | None) -> dict[str, list[tuple[float, float]]]:
    """By kind: operations a byte, and operations a second; of a contestant, or of the best rival."""
    found: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        rival = report.best_rival(record)
        us = (rival[1] if rival else None) if contestant is None else report.time_of(record, contestant)
        if us is not None:
            intensity = record["operations"] / record["bytes"]
            found.setdefault(record["kind"], []).append((intensity, 1e6 * record["operations"] / us))
    return found


def draw(result: dict[str, Any], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    limits = result["limits"]
    bandwidth, rate = limits["copy_bytes_per_second"], limits["bf16_operations_per_second"]
    ours, rivals = points(result["shapes"], report.OURS), points(result["shapes"], None)
    intensities = [x for kinds in (ours, rivals) for found in kinds.values() for x, _ in found]
    if not intensities:
        raise ValueError("the file holds no shape with a time")
    ends = [min(*intensities, rate / bandwidth) / 2, max(*intensities, rate / bandwidth) * 2]
    figure, axes = pyplot.subplots(figsize=(9, 6))
    roof = [ends[0], rate / bandwidth, ends[1]]
    axes.plot(roof, [min(x * bandwidth, rate) for x in roof], color="black", label="measured limits")
    for found, color, who in ((rivals, "tab:orange", "best rival"), (ours, "tab:blue", report.OURS)):
        for kind, at in found.items():
            axes.scatter(
                *zip(*at, strict=True), s=18, marker=_MARKERS[kind], color=color, alpha=0.7, label=f"{who}, {kind}"
            )
    axes.set(
        xscale="log", yscale="log", xlabel="operations a byte", ylabel="operations a second", title=result["device"]
    )
    axes.legend()
    figure.savefig(target, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="plot.py", description=__doc__)
    parser.add_argument("json", type=Path, help="what compare.py wrote")
    parser.add_argument("target", type=Path, help="the picture: .png, .svg or .pdf")
    options = parser.parse_args(arguments)
    try:
        draw(json.loads(options.json.read_text()), options.target)
    except OSError as error:
        parser.error(str(error))
    except KeyError as error:
        parser.error(f"{options.json} has no {error}, expected what compare.py writes with --json")
    except ValueError as error:
        parser.error(f"{options.json}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
