"""Tables and verdicts out of the records of a comparison: plain values, as they stand in its JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from comparison.shapes import Shape

OURS = "fiw"
Record = dict[str, Any]
"""A shape's `name`, its measures, and `cells`: by contestant `us` and more, or the `reason` why there is no time."""

_SLOWER = 1.03
_LEAST_KV_BYTES = 64e6
_SHOWN = 12


def record_of(shape: Shape) -> Record:
    """Without its cells."""
    return {
        "name": shape.name,
        "kind": shape.kind,
        "heads": f"{shape.qo_heads}/{shape.kv_heads}",
        "batch": shape.batch,
        "qo_len": shape.qo_len,
        "kv_len": shape.kv_lens[0] if shape.one_length else None,
        "head_dim": shape.head_dim,
        "page_size": shape.page_size,
        "kv_dtype": shape.kv_dtype,
        "kv_bytes": shape.kv_bytes,
        "bytes": shape.bytes,
        "operations": shape.operations,
    }


def time_of(record: Record, contestant: str) -> float | None:
    """Microseconds on the device."""
    return record["cells"].get(contestant, {}).get("us")


def best_rival(record: Record) -> tuple[str, float] | None:
    times = {name: cell["us"] for name, cell in record["cells"].items() if name != OURS and "us" in cell}
    return min(times.items(), key=lambda item: item[1]) if times else None


def floor_us(record: Record, limits: dict[str, float]) -> float:
    """The least time that the device's copy bandwidth and matrix rate allow."""
    return 1e6 * max(
        record["bytes"] / limits["copy_bytes_per_second"], record["operations"] / limits["bf16_operations_per_second"]
    )


def header(contestants: list[str]) -> str:
    columns = "".join(f"{name:>12}" for name in contestants)
    return f"{'shape':<34}{columns}{'/ best':>8}{'of limit':>10}{'TB/s':>7}{'TFLOP/s':>9}"


def row(record: Record, contestants: list[str], limits: dict[str, float]) -> str:
    """Microseconds by contestant; `-` where there is none, with the reason below the table."""
    cells = []
    for name in contestants:
        us = time_of(record, name)
        cells.append(f"{'-':>12}" if us is None else f"{us:>12.1f}")
    ours, rival = time_of(record, OURS), best_rival(record)
    ratio = f"{ours / rival[1]:>8.3f}" if ours is not None and rival is not None else f"{'-':>8}"
    if ours is None:
        rates = f"{'-':>10}{'-':>7}{'-':>9}"
    else:
        share = 100 * floor_us(record, limits) / ours
        rates = f"{share:>8.1f} %{record['kv_bytes'] / ours * 1e-6:>7.2f}{record['operations'] / ours * 1e-6:>9.1f}"
    return f"{record['name']:<34}{''.join(cells)}{ratio}{rates}"


def host_header(contestants: list[str]) -> str:
    return f"{'shape':<34}" + "".join(f"{name:>14}" for name in contestants)


def host_rows(records: Iterable[Record], contestants: list[str]) -> Iterator[str]:
    """Microseconds of host time to plan and to enqueue, of the first shape of each kind and batch size."""
    seen = set()
    for record in records:
        key = (record["kind"], record["batch"])
        if key in seen:
            continue
        seen.add(key)
        cells = []
        for name in contestants:
            cell = record["cells"].get(name, {})
            plan, enqueue = (f"{cell[key]:.1f}" if key in cell else "-" for key in ("plan_us", "enqueue_us"))
            cells.append(f"{plan + ' ' + enqueue:>14}")
        yield f"{record['name']:<34}{''.join(cells)}"


def reasons(records: Iterable[Record]) -> Iterator[str]:
    """Why cells have no time: each reason with its contestants and the shapes that they say it of."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for record in records:
        for name, cell in record["cells"].items():
            if "reason" in cell:
                contestants, shapes = found.setdefault(cell["reason"], ({}, {}))
                contestants[name] = shapes[record["name"]] = None
    for reason, (contestants, shapes) in found.items():
        yield f"{', '.join(contestants)}: {reason} ({_few(list(shapes))})"


def not_run_rows(not_run: dict[str, str]) -> Iterator[str]:
    """Shapes that were left out, by reason."""
    for reason in dict.fromkeys(not_run.values()):
        yield f"not run: {reason} ({_few([name for name, why in not_run.items() if why == reason])})"


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@dataclass(frozen=True)
class Verdict:
    """A target on a shape, by what it is measured: at most `limit`, or at least where `at_least`."""

    target: str
    shape: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        bound = "at least" if self.at_least else "at most"
        return f"{self.shape}: {self.value:.3g}, {bound} {self.limit:.3g}"


def verdicts(records: list[Record], limits: dict[str, float], host: dict[str, float]) -> Iterator[Verdict]:
    """Every target on every shape that it speaks of. A record without a time of ours has no verdict: it is counted as
    missed by `summary`."""
    timed = [record for record in records if time_of(record, OURS) is not None]
    for record in timed:
        yield from _bandwidth(record, limits)
    decodes = {
        (r["heads"], r["batch"], r["kv_len"], r["kv_dtype"], r["page_size"], r["head_dim"]): r
        for r in timed
        if r["kind"] == "decode" and r["kv_len"] is not None
    }
    for r in timed:
        ours, name = r["cells"][OURS]["us"], r["name"]
        rival = best_rival(r)
        if rival is not None:
            yield Verdict("time over the best rival's", f"{name} ({rival[0]})", ours / rival[1], _SLOWER)
        step = decodes.get((r["heads"], r["batch"], r["kv_len"], r["kv_dtype"], r["page_size"], r["head_dim"]))
        if r["kind"] == "verify" and r["qo_len"] <= 8 and step is not None:
            yield Verdict("window's time over a decode step's", name, ours / step["cells"][OURS]["us"], 1.1)
        if r["kind"] == "prefill":
            ragged, cudnn = time_of(r, "fi ragged"), time_of(r, "sdpa cudnn")
            if ragged is not None and r["batch"] == 1 and r["qo_len"] == r["kv_len"] >= 8192:
                yield Verdict("paged time over FlashInfer's ragged FA3", name, ours / ragged, 1.0)
            if cudnn is not None and (r["kv_len"] > r["qo_len"] or r["qo_len"] >= 2048):
                yield Verdict("time over cuDNN's contiguous", name, ours / cudnn, 1.0)
    for key, target, limit in (
        ("plan_decode_us", "planning a decode step, us", 5),
        ("plan_prefill_us", "planning an FA3 prefill, us", 20),
        ("plan_hit_us", "finding a plan, us", 0.5),
        ("enqueue_us", "enqueueing a layer's decode, us", 3),
    ):
        if key in host:
            yield Verdict(target, "host", host[key], limit)


def _bandwidth(r: Record, limits: dict[str, float]) -> Iterator[Verdict]:
    if r["kind"] != "decode":
        return
    share = 1e6 * r["bytes"] / r["cells"][OURS]["us"] / limits["copy_bytes_per_second"]

    def verdict(target: str, least: float) -> Verdict:
        return Verdict(f"share of the copy bandwidth, {target}", r["name"], share, least, at_least=True)

    if r["batch"] == 1:
        if r["kv_len"] == 32768:
            yield verdict("one request of 32768", 0.80)
    elif r["kv_bytes"] >= _LEAST_KV_BYTES and r["batch"] >= 8:
        if r["kv_dtype"] == "fp8":
            yield verdict("fp8", 0.85)
        elif (r["heads"], r["batch"], r["kv_len"]) == ("8/1", 64, 4096):
            yield verdict("a tensor-parallel rank", 0.80)
        else:
            yield verdict("64 MB or more", 0.95)


def summary(records: list[Record], limits: dict[str, float], host: dict[str, float]) -> Iterator[str]:
    """Each target with its count, and below it where it is missed, worst first, the first few."""
    by_target: dict[str, list[Verdict]] = {}
    for verdict in verdicts(records, limits, host):
        by_target.setdefault(verdict.target, []).append(verdict)
    for target, found in by_target.items():
        missed = [verdict for verdict in found if not verdict.met]
        missed.sort(key=lambda v: v.value / v.limit, reverse=not found[0].at_least)
        yield f"{'met' if not missed else 'MISSED'}: {target}: {len(found) - len(missed)} of {len(found)}"
        yield from (f"    {verdict}" for verdict in missed[:_SHOWN])
        if len(missed) > _SHOWN:
            yield f"    and {len(missed) - _SHOWN} more"
    without = [r["name"] for r in records if time_of(r, OURS) is None]
    if without:
        yield f"MISSED: {len(without)} shapes without a time of ours: {', '.join(without)}"
