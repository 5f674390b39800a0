"""The lines of the table, out of the records that stand in the JSON."""

from __future__ import annotations

from comparison.report import OURS, Record, best_rival, time_of


def least_us(record: Record) -> float:
    """What the machine's read bandwidth and FMA peak allow."""
    limits = record["limits"]
    return 1e6 * max(
        record["bytes"] / limits["read_bytes_per_second"], record["operations"] / limits["operations_per_second"]
    )


def header(contestants: list[str]) -> str:
    columns = "".join(f"{name:>13}" for name in contestants)
    return f"{'shape':<30}{columns}{'/ best':>8}{'of limit':>10}{'reads GB/s':>12}{'GFLOP/s':>9}"


def row(record: Record, contestants: list[str]) -> str:
    """Milliseconds by contestant; `-` where there is none. `/ best`: our time over the best rival's."""
    times = [time_of(record, name) for name in contestants]
    cells = "".join(f"{'-':>13}" if us is None else f"{us / 1e3:>13.2f}" for us in times)
    ours, rival = time_of(record, OURS), best_rival(record)
    ratio = "-" if ours is None or rival is None else f"{ours / rival[1]:.2f}"
    share = "-" if ours is None else f"{100 * least_us(record) / ours:.0f} %"
    limits = record["limits"]
    reads, peak = limits["read_bytes_per_second"] * 1e-9, limits["operations_per_second"] * 1e-9
    return f"{record['name']:<30}{cells}{ratio:>8}{share:>10}{reads:>12.1f}{peak:>9.0f}"


def verdict(records: list[Record]) -> str:
    """On which shapes a rival is ahead."""
    compared = [record for record in records if time_of(record, OURS) is not None and best_rival(record) is not None]
    behind = [record["name"] for record in compared if time_of(record, OURS) > best_rival(record)[1]]
    line = f"ahead of every rival on {len(compared) - len(behind)} of {len(compared)} shapes that one of them serves"
    return line + (f"; behind on {', '.join(behind)}" if behind else "")
