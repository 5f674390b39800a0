"""bench/compare_cpu.py without its rivals: its shapes, its table and its arguments; with PyTorch, its problems too."""

import pathlib
import subprocess
import sys

import pytest

BENCH = pathlib.Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from cpu_comparison import table  # noqa: E402
from cpu_comparison.shapes import ELEMENT_BYTES, Shape, shapes  # noqa: E402

LIMITS = {"read_bytes_per_second": 2e10, "operations_per_second": 2e11}


def compare(*arguments):
    return subprocess.run(
        [sys.executable, str(BENCH / "compare_cpu.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def record(shape, **cells):
    """Microseconds by contestant, or words why there are none."""
    return {
        "name": shape.name,
        "bytes": shape.bytes,
        "operations": shape.operations,
        "limits": LIMITS,
        "cells": {
            name.replace("_", " "): {"reason": value} if isinstance(value, str) else {"us": value}
            for name, value in cells.items()
        },
    }


class TestShapes:
    def test_are_those_of_the_targets(self):
        names = [shape.name for shape in shapes()]
        assert len(set(names)) == len(names)
        assert set(names) >= {
            "decode 32/8 8 x 4096 bf16",
            "decode 32/8 1 x 32768 bf16",
            "decode 64/8 8 x 4096 bf16",
            "decode 8/1 8 x 4096 bf16",
            "decode 32/32 4 x 2048 bf16",
            "decode 32/8 8 x 4096 fp16",
            "decode 32/8 8 x 4096 fp8",
            "verify 4 32/8 8 x 4096 bf16",
            "prefill 32/8 1 x 2048 bf16",
            "prefill 32/8 4 x 512 bf16",
        }

    def test_filter(self):
        assert {shape.kind for shape in shapes("prefill")} == {"prefill"}
        with pytest.raises(ValueError, match="--filter is 'cat', expected a part of the name of a shape"):
            shapes("cat")

    @pytest.mark.parametrize("shape", shapes(), ids=lambda shape: shape.name)
    def test_counts(self, shape):
        visible = sum(shape.kv_len - shape.qo_len + row + 1 for row in range(shape.qo_len))
        assert shape.operations == 2 * 2 * visible * shape.batch * shape.qo_heads * shape.head_dim
        rows = 2 * shape.batch * shape.qo_len * shape.qo_heads * shape.head_dim * ELEMENT_BYTES[shape.q_dtype]
        assert shape.bytes == shape.cache_bytes + rows  # all lengths are whole pages

    def test_fp8_has_bf16_queries(self):
        assert (Shape("decode", 8, 1, 1, 1, 64, "fp8").q_dtype, Shape("decode", 8, 1, 1, 1, 64, "fp16").q_dtype) == (
            "bf16",
            "fp16",
        )


class TestTable:
    shape = Shape("decode", 32, 8, 8, 1, 4096)

    def test_row(self):
        names = ["fiw", "sdpa", "sdpa folded", "llama.cpp"]
        line = table.row(record(self.shape, fiw=10_000, sdpa=50_000, sdpa_folded=20_000, llama_cpp="no"), names)
        # 134 MB at 20 GB/s take 6.7 ms
        assert line.split() == [
            *self.shape.name.split(),
            "10.00",
            "50.00",
            "20.00",
            "-",
            "0.50",
            "67",
            "%",
            "20.0",
            "200",
        ]
        assert len(table.header(names)) == len(line)

    def test_the_larger_limit_counts(self):
        few = record(self.shape)
        assert table.least_us(few) == pytest.approx(1e6 * self.shape.bytes / 2e10)
        many = record(Shape("prefill", 32, 8, 1, 2048, 2048))
        assert table.least_us(many) == pytest.approx(1e6 * many["operations"] / 2e11)

    def test_without_a_time_of_ours(self):
        line = table.row(record(self.shape, fiw="wrong", sdpa=50_000), ["fiw", "sdpa"])
        assert line.split()[len(self.shape.name.split()) :] == ["-", "50.00", "-", "-", "20.0", "200"]

    def test_verdict(self):
        ahead = record(self.shape, fiw=1, sdpa=2)
        behind = record(Shape("decode", 8, 1, 8, 1, 64), fiw=3, sdpa=9, llama_cpp=2)
        alone = record(Shape("decode", 8, 1, 8, 1, 64, "fp8"), fiw=3, sdpa="no fp8")
        assert table.verdict([ahead, alone]) == "ahead of every rival on 1 of 1 shapes that one of them serves"
        assert table.verdict([ahead, behind, alone]) == (
            "ahead of every rival on 1 of 2 shapes that one of them serves; behind on decode 8/1 8 x 64 bf16"
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--threads", 0), "--threads is 0, expected 1 to "),
        (("--rounds", 0), "--rounds is 0, expected at least 1"),
        (("--tool", "/no/fiw"), "--tool is /no/fiw, expected a file: scripts/build release fiw_tool makes it"),
        (("--tool", __file__, "--ggml", "/no"), "--ggml is /no, expected a folder with libggml-cpu.so"),
        (("--tool", __file__, "--json", "/no/x.json"), "--json is /no/x.json, expected a file in a folder that exists"),
        (("--tool", __file__, "--filter", "cat"), "--filter is 'cat', expected a part of the name of a shape"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    run = compare(*arguments)
    assert run.returncode == 2
    assert f"error: {message}" in run.stderr


class TestProblem:
    """What the contestants are given, and held to."""

    @pytest.fixture
    def problem(self):
        pytest.importorskip("torch")
        from cpu_comparison.problem import Problem

        return Problem(Shape("verify", 4, 2, 2, 3, 37, "fp32", head_dim=16), seed=5, rotated_bytes=70_000)

    def test_pages_and_dense_hold_the_same(self, problem):
        assert problem.copies == 3
        for pages, dense in ((problem.k, 0), (problem.v, 1)):
            for copy in (0, problem.copies - 1):
                for request, token in ((0, 0), (0, 36), (1, 17)):
                    page = problem.page_order[request, token // 16]
                    expected = problem.dense[copy][dense][request, :, token]
                    assert (pages[copy][page, token % 16] == expected).all()

    def test_our_result_is_right_and_a_wrong_one_is_not(self, problem):
        from cpu_comparison.contestants import FoldedSdpa, Ours, Sdpa

        for contestant in (Ours(1), Sdpa(), FoldedSdpa()):
            out = contestant.call(problem)(0).clone()
            assert problem.fault(out) is None, contestant.name
            for wrong in (float("nan"), 0.5):
                out[1, 2, 3, 4] = wrong
                assert problem.fault(out).startswith("wrong: off by ")
