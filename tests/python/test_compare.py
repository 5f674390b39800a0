"""bench/compare.py without a device: its shapes, tables, targets and plot, and the C ABI through ctypes on the CPU."""

import itertools
import json
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest

from reference import attend

BENCH = pathlib.Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from comparison import library, report, shapes  # noqa: E402

TRACE = BENCH.parent / "data" / "azure_llm_conv_2023_sample.csv"
LIMITS = {"copy_bytes_per_second": 4e12, "read_bytes_per_second": 4.2e12, "bf16_operations_per_second": 8e14}


def compare(*arguments, program="compare.py"):
    return subprocess.run(
        [sys.executable, str(BENCH / program), *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def record(shape, **times):
    """Of a shape; microseconds by contestant, or words why there are none."""
    return report.record_of(shape) | {
        "cells": {
            name.replace("_", " "): {"reason": value} if isinstance(value, str) else {"us": value}
            for name, value in times.items()
        },
    }


class TestShapes:
    def test_cover_what_the_library_is_held_to(self):
        listed = shapes.shapes(TRACE)
        assert len({shape.name for shape in listed}) == len(listed)
        decodes = {
            (s.qo_heads, s.kv_heads, s.batch, s.kv_lens[0]) for s in listed if s.kind == "decode" and s.one_length
        }
        assert decodes >= {
            (*heads, batch, kv_len)
            for heads, batch, kv_len in itertools.product(shapes.HEADS, shapes.BATCHES, shapes.KV_LENS)
        }
        windows = {(s.batch, s.qo_len) for s in listed if s.kind == "verify"}
        assert windows >= set(itertools.product((8, 64), (2, 4, 8)))
        alone = {s.qo_len for s in listed if s.kind == "prefill" and s.batch == 1 and s.qo_len == s.kv_lens[0]}
        assert alone >= {512, 1024, 2048, 4096, 8192, 16384, 32768}
        chunks = {s.qo_len for s in listed if s.kind == "prefill" and s.kv_lens[0] >= 32768 > s.qo_len}
        assert chunks >= {512, 1024, 2048}
        assert {s.head_dim for s in listed} == {64, 128, 256}
        assert {s.page_size for s in listed} == {1, 16, 64}
        assert {s.kv_dtype for s in listed} == {"bf16", "fp8"}
        assert sum(not s.one_length for s in listed) >= len(shapes.HEADS)

    def test_come_with_the_targets_first(self):
        names = [shape.name for shape in shapes.shapes(TRACE)]
        first = ["decode 8/1 b64 4096", "decode 32/8 b1 32768", "prefill 32/8 b1 8192", "verify 32/8 b64 8 of 4096"]
        assert all(name in names[:16] for name in first)
        # A window is compared with the decode step over the same cache, which a time limit must not cut off.
        for name in names:
            if name.startswith("verify") and "fp8" not in name:
                heads, batch, _, _, kv_len = name.split()[1:]
                assert names.index(f"decode {heads} {batch} {kv_len}") < names.index(name)

    def test_quick_ones_are_few_and_of_every_kind(self):
        quick = shapes.shapes(TRACE, quick=True)
        assert len(quick) <= 20
        assert {shape.kind for shape in quick} == {"decode", "verify", "prefill"}

    def test_filter(self):
        found = shapes.shapes(TRACE, part="verify 64/8")
        assert found
        assert all(shape.name.startswith("verify 64/8") for shape in found)
        with pytest.raises(ValueError, match="--filter is 'decode 3/3', expected a part of the name of a shape"):
            shapes.shapes(TRACE, part="decode 3/3")

    def test_count_what_a_loop_counts(self, rng):
        for _ in range(50):
            kv_heads = int(rng.integers(1, 5))
            qo_heads = kv_heads * int(rng.integers(1, 5))
            qo_len = int(rng.integers(1, 9))
            kv_lens = tuple(int(n) for n in rng.integers(qo_len, 60, int(rng.integers(1, 6))))
            page_size, head_dim = int(rng.integers(1, 9)), 8 * int(rng.integers(1, 9))
            kv_dtype = str(rng.choice(["bf16", "fp8"]))
            shape = shapes.Shape("prefill", qo_heads, kv_heads, qo_len, kv_lens, head_dim, page_size, kv_dtype)
            seen = sum(1 for n in kv_lens for p in range(qo_len) for key in range(n) if key <= n - qo_len + p)
            pages = sum(len(range(0, n, page_size)) for n in kv_lens)
            element = 2 if kv_dtype == "bf16" else 1
            assert shape.operations == seen * qo_heads * head_dim * 2 * 2
            assert shape.kv_bytes == sum(kv_lens) * kv_heads * head_dim * element * 2
            assert shape.cache_bytes == pages * page_size * kv_heads * head_dim * element * 2
            assert shape.bytes - shape.kv_bytes == len(kv_lens) * qo_len * qo_heads * head_dim * 2 * 2
            assert shape.rows == len(kv_lens) * qo_len

    def test_trace_lengths(self, tmp_path):
        assert shapes.trace_lengths(TRACE, 2) == (374 + 44 // 2, 396 + 109 // 2)
        short = tmp_path / "short.csv"
        short.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,0,1\n")
        assert shapes.trace_lengths(short, 1) == (1,)
        with pytest.raises(ValueError, match="holds 1 requests, expected at least 2"):
            shapes.trace_lengths(short, 2)
        bad = tmp_path / "bad.csv"
        bad.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,3,4\nx,many,1\n")
        with pytest.raises(ValueError, match=r"bad\.csv, line 3: expected integers"):
            shapes.trace_lengths(bad, 2)
        other = tmp_path / "other.csv"
        other.write_text("a,b\n1,2\n")
        with pytest.raises(ValueError, match=r"other\.csv, line 2: expected integers"):
            shapes.trace_lengths(other, 1)


class TestReport:
    def test_row(self):
        shape = shapes.decode((32, 8), 64, 4096)
        row = report.row(record(shape, fiw=300.0, fa3=270.0, sdpa_flash="slow"), ["fiw", "fa3", "sdpa flash"], LIMITS)
        cells = row.removeprefix(shape.name).split()
        share = 100 * shape.bytes / 4e12 / 300e-6
        rates = [f"{shape.kv_bytes / 300e-6 * 1e-12:.2f}", f"{shape.operations / 300e-6 * 1e-12:.1f}"]
        assert cells == ["300.0", "270.0", "-", f"{300 / 270:.3f}", f"{share:.1f}", "%", *rates]
        assert len(row) == len(report.header(["fiw", "fa3", "sdpa flash"]))

    def test_row_without_a_time_of_ours_or_of_a_rival(self):
        shape = shapes.decode((32, 8), 64, 4096)
        assert report.row(record(shape, fiw="broken", fa3=270.0), ["fiw", "fa3"], LIMITS).split()[4:] == [
            "-", "270.0", "-", "-", "-", "-"
        ]  # fmt: skip
        assert report.row(record(shape, fiw=300.0, fa3="broken"), ["fiw", "fa3"], LIMITS).split()[4:7] == [
            "300.0", "-", "-"
        ]  # fmt: skip

    def test_floor_is_the_larger_of_the_two_limits(self):
        decode, prefill = shapes.decode((32, 8), 64, 4096), shapes.prefill((32, 8), 1, 8192, 8192)
        assert report.floor_us(record(decode), LIMITS) == pytest.approx(1e6 * decode.bytes / 4e12)
        assert report.floor_us(record(prefill), LIMITS) == pytest.approx(1e6 * prefill.operations / 8e14)

    def test_reasons_are_told_once(self):
        one, other = (record(shapes.decode((32, 8), b, 512), fiw=1.0, a="no fp8", b="no fp8") for b in (1, 8))
        assert list(report.reasons([one, other])) == ["a, b: no fp8 (decode 32/8 b1 512, decode 32/8 b8 512)"]
        left = {f"shape {i}": "the time limit was reached" for i in range(5)}
        assert list(report.not_run_rows(left)) == [
            "not run: the time limit was reached (shape 0, shape 1, shape 2 and 2 more)"
        ]

    def test_host_rows_show_a_shape_of_each_kind_and_batch(self):
        records = [record(shapes.decode((32, 8), 1, n), fiw=1.0) for n in (512, 2048)]
        records[0]["cells"]["fiw"] |= {"plan_us": 12.25, "enqueue_us": 3.5}
        rows = list(report.host_rows(records, ["fiw", "fa3"]))
        assert [row.removeprefix(records[0]["name"]).split() for row in rows] == [["12.2", "3.5", "-", "-"]]

    @pytest.mark.parametrize(
        ("shape", "share"),
        [
            (shapes.decode((32, 8), 64, 4096), 0.95),
            (shapes.decode((32, 8), 64, 4096, kv_dtype="fp8"), 0.85),
            (shapes.decode((8, 1), 64, 4096), 0.80),
            (shapes.decode((28, 4), 1, 32768), 0.80),
        ],
        ids=lambda value: getattr(value, "name", value),
    )
    def test_bandwidth_targets(self, shape, share):
        least = 1e6 * shape.bytes / 4e12
        for time, met in ((least / share * 0.999, True), (least / share * 1.001, False)):
            (verdict,) = report.verdicts([record(shape, fiw=time)], LIMITS, {})
            assert (verdict.limit, verdict.met) == (share, met)

    def test_small_batches_have_no_bandwidth_target(self):
        small = [shapes.decode((32, 8), 8, 512), shapes.decode((32, 8), 1, 131072), shapes.decode((8, 1), 8, 4096)]
        assert list(report.verdicts([record(shape, fiw=1e6) for shape in small], LIMITS, {})) == []

    def test_targets_against_rivals(self):
        shape = shapes.prefill((32, 8), 1, 8192, 8192)
        times = {"fiw": 1000.0, "fi_ragged": 990.0, "sdpa_cudnn": 1001.0, "fi_fa2": 3000.0}
        found = {v.target: v for v in report.verdicts([record(shape, **times)], LIMITS, {})}
        assert found["time over the best rival's"].met
        assert found["time over the best rival's"].shape == f"{shape.name} (fi ragged)"
        assert not found["paged time over FlashInfer's ragged FA3"].met
        assert found["time over cuDNN's contiguous"].met
        (late,) = report.verdicts([record(shapes.decode((32, 8), 1, 512), fiw=104.0, fa3=100.0)], LIMITS, {})
        assert not late.met

    def test_windows_are_held_to_the_decode_step_over_the_same_cache(self):
        step, other = shapes.decode((32, 8), 8, 4096), shapes.decode((64, 8), 8, 4096)
        window = shapes.verify((32, 8), 8, 4, 4096)
        records = [record(step, fiw=50.0), record(other, fiw=500.0), record(window, fiw=54.0)]
        (verdict,) = [v for v in report.verdicts(records, LIMITS, {}) if v.target.startswith("window")]
        assert verdict.value == pytest.approx(1.08)
        assert verdict.met
        assert not any(v.target.startswith("window") for v in report.verdicts(records[1:], LIMITS, {}))

    def test_host_targets(self):
        host = {"plan_decode_us": 4.9, "plan_prefill_us": 21.0, "plan_hit_us": 0.4, "enqueue_us": 5.0}
        assert [v.met for v in report.verdicts([], LIMITS, host)] == [True, False, True, False]

    def test_summary(self):
        good, bad = (record(shapes.decode((32, 8), b, 4096), fiw=t) for b, t in ((64, 270.0), (8, 60.0)))
        broken = record(shapes.decode((32, 8), 1, 512), fiw="refused")
        lines = list(report.summary([good, bad, broken], LIMITS, {"plan_hit_us": 0.1}))
        assert lines[0] == "MISSED: share of the copy bandwidth, 64 MB or more: 1 of 2"
        assert lines[1].startswith("    decode 32/8 b8 4096: 0.5")
        assert lines[2] == "met: finding a plan, us: 1 of 1"
        assert lines[3] == "MISSED: 1 shapes without a time of ours: decode 32/8 b1 512"
        assert len(lines) == 4


class TestPrograms:
    def test_without_a_device(self):
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            pytest.skip("there is a device")
        done = compare("--quick")
        assert (done.returncode, done.stdout) == (0, "skipped: no CUDA device\n")

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--filter", "nothing"], "--filter is 'nothing', expected a part of the name"),
            (["--time-limit", "0"], "--time-limit is 0, expected a number above 0"),
            (["--time-limit", "nan"], "--time-limit is nan, expected a number above 0"),
            (["--library", "nowhere.so"], "--library is nowhere.so, expected a file"),
            (["--json", "nowhere/x.json"], "--json is nowhere/x.json, expected a file in a folder that exists"),
            (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        ],
        ids=lambda value: str(value[0]) if isinstance(value, list) else "",
    )
    def test_refuses(self, arguments, words):
        done = compare(*arguments)
        assert done.returncode == 2
        assert words in done.stderr

    def test_plot(self, tmp_path):
        records = [
            record(shapes.decode((32, 8), 64, 4096), fiw=260.0, fa3=280.0),
            record(shapes.verify((32, 8), 8, 4, 4096), fiw=60.0, fa3="refused"),
            record(shapes.prefill((32, 8), 1, 8192, 8192), fiw=900.0, fa3=850.0),
        ]
        source, target = tmp_path / "result.json", tmp_path / "roofline.png"
        source.write_text(json.dumps({"device": "a device", "limits": LIMITS, "shapes": records}))
        done = compare(source, target, program="plot.py")
        assert done.returncode == 0, done.stderr
        assert target.read_bytes().startswith(b"\x89PNG")
        assert target.stat().st_size > 10000

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("{}", "has no 'limits', expected what compare.py writes"),
            ("{", "Expecting property name"),
            (json.dumps({"device": "d", "limits": LIMITS, "shapes": []}), "the file holds no shape with a time"),
        ],
        ids=["empty", "cut off", "no shape"],
    )
    def test_plot_refuses(self, tmp_path, text, words):
        source = tmp_path / "result.json"
        source.write_text(text)
        done = compare(source, tmp_path / "x.png", program="plot.py")
        assert done.returncode == 2
        assert words in done.stderr
        assert not (tmp_path / "x.png").exists()

    def test_plot_without_the_file(self, tmp_path):
        done = compare(tmp_path / "none.json", tmp_path / "x.png", program="plot.py")
        assert done.returncode == 2
        assert "none.json" in done.stderr


class TestLibrary:
    """The C ABI that the installed package holds, on the CPU."""

    @pytest.fixture
    def workspace(self):
        workspace = library.Workspace(library.installed_library(), -1)
        yield workspace
        workspace.close()

    @pytest.mark.parametrize("kind", ["decode", "verify", "prefill"])
    def test_runs_steps(self, workspace, kind, rng):
        heads, kv_heads, dim, page_size = 6, 2, 32, 4
        qo_len = 1 if kind == "decode" else 3
        kv_lens = rng.integers(qo_len, 30, 4).astype(np.int32)
        counts = -(-kv_lens // page_size)
        pages = int(counts.sum())
        indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        indices = rng.permutation(pages).astype(np.int32)
        last_page_len = (kv_lens - (counts - 1) * page_size).astype(np.int32)
        q = rng.standard_normal((4 * qo_len, heads, dim), np.float32)
        k, v = (rng.standard_normal((pages, page_size, kv_heads, dim), np.float32) for _ in range(2))
        out = np.full_like(q, np.nan)
        table = workspace.page_table(page_size, pages, indptr, indices, last_page_len)
        spec = library.StepSpec(heads, kv_heads, dim, "float32", "float32")
        step = workspace.plan(kind, table, qo_len, spec)
        cache = library.KvCache(library.Tensor.of(k), library.Tensor.of(v))
        for make_again in (lambda: None, table.make, step.make, workspace.forget_plans):
            out.fill(np.nan)
            make_again()
            step.run(library.Tensor.of(q), cache, library.Tensor.of(out), 0)
            keys, values = (
                [
                    t[indices[indptr[r] : indptr[r + 1]]].reshape(-1, kv_heads, dim)[:kv_len].astype(np.float64)
                    for r, kv_len in enumerate(kv_lens)
                ]
                for t in (k, v)
            )
            expected, _ = attend(q.astype(np.float64), [qo_len] * 4, keys, values)
            np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
        planned, ran = workspace.nanoseconds()
        assert planned > 0
        assert ran > 0
        step.free()
        table.free()

    def test_errors_have_the_librarys_words(self, workspace):
        ones = np.ones(1, np.int32)
        with pytest.raises(RuntimeError, match="expected 0 <= page < num_pages = 1"):
            workspace.page_table(16, 1, np.array([0, 1], np.int32), ones, ones)
        table = workspace.page_table(16, 2, np.array([0, 1], np.int32), ones, ones)
        with pytest.raises(RuntimeError, match="head"):
            workspace.plan("decode", table, 1, library.StepSpec(3, 2, 64, "float32", "float32"))

    def test_a_run_that_is_refused(self, workspace):
        ones = np.ones(1, np.int32)
        table = workspace.page_table(16, 2, np.array([0, 1], np.int32), ones, ones)
        step = workspace.plan("decode", table, 1, library.StepSpec(2, 2, 64, "float32", "float32"))
        cache = library.KvCache(*(library.Tensor.of(np.zeros((2, 16, 2, 64), np.float32)) for _ in range(2)))
        q = np.zeros((random.randint(2, 5), 2, 64), np.float32)
        with pytest.raises(RuntimeError, match="q"):
            step.run(library.Tensor.of(q), cache, library.Tensor.of(np.zeros_like(q)), 0)
