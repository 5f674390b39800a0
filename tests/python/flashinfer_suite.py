"""Runs FlashInfer's own tests against fiw.compat.flashinfer.

    python tests/python/flashinfer_suite.py FOLDER [--per-test N] [--max-work N] [--seed S] [--no-capture]
                                            [pytest arguments]

FOLDER holds FlashInfer's test files and the helper modules they import (`alibi_reference.py`); they are no part of this
project. Their `import flashinfer` gets fiw.compat.flashinfer, their warming up of FlashInfer's compiler does nothing,
and all else in them runs as it is. Where PyTorch has no CUDA device, "cuda" devices mean the CPU. There, and with
`--no-capture`, a CUDA graph is the list of the run() calls made while it was captured, which replay() makes again into
the same tensors.

Their parameters multiply to some ten thousand cases a file, made for a GPU: `--max-work` drops cases of more
multiply-adds (as far as their parameters tell), and `--per-test` picks at most so many of each test, at random. Both
are counted in the table. 0 keeps all.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

import fiw.compat.flashinfer as compat

FILES = [
    "test_alibi.py",
    "test_batch_decode_kernels.py",
    "test_batch_prefill.py",
    "test_batch_prefill_kernels.py",
    "test_decode_fp8_calibration_scale.py",
    "test_decode_prefill_lse.py",
    "test_fp8_prefill.py",
    "test_logits_cap.py",
    "test_non_contiguous_decode.py",
    "test_non_contiguous_prefill.py",
    "test_page.py",
    "test_quantization.py",
    "test_shared_prefix_kernels.py",
    "test_single_prefill.py",
    "test_sliding_window.py",
    "test_tensor_cores_decode.py",
]


# ---- their imports ---------------------------------------------------------------------------------------------------


def alias_modules() -> None:
    package = types.ModuleType("flashinfer")
    package.__dict__.update({name: getattr(compat, name) for name in compat.__all__})
    package.jit = types.ModuleType("flashinfer.jit")
    package.jit.build_jit_specs = lambda *args, **kwargs: None
    helpers = types.ModuleType("jit_utils")
    helpers.gen_decode_attention_modules = helpers.gen_prefill_attention_modules = lambda *args, **kwargs: []
    sys.modules |= {"flashinfer": package, "flashinfer.jit": package.jit, "jit_utils": helpers}
    for name in ("cascade", "decode", "page", "prefill", "quantization"):
        sys.modules[f"flashinfer.{name}"] = getattr(compat, name)


# ---- a CPU in the place of their GPU ---------------------------------------------------------------------------------


def on_cpu(device: object) -> object:
    is_cuda = isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"
    return "cpu" if is_cuda or type(device) is int else device


class CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if func is torch.Tensor.to and len(args) > 1 and not isinstance(args[1], (torch.dtype, torch.Tensor)):
            args = (args[0], on_cpu(args[1]), *args[2:])
        return func(*args, **kwargs)


class Graph:
    """The run() calls made while it was captured."""

    capturing: Graph | None = None

    def __init__(self) -> None:
        self.calls = []

    def replay(self) -> None:
        for run, args, kwargs, result in self.calls:
            again = run(*args, **kwargs)
            for old, new in zip(*((r if isinstance(r, tuple) else (r,)) for r in (result, again)), strict=True):
                old.copy_(new)


@contextlib.contextmanager
def capture(graph: Graph):
    Graph.capturing = graph
    try:
        yield
    finally:
        Graph.capturing = None


def recorded(run):
    def call(*args, **kwargs):
        result = run(*args, **kwargs)
        if Graph.capturing is not None:
            Graph.capturing.calls.append((run, args, kwargs, result))
        return result

    return call


class CpuGenerator(torch.Generator):
    def __new__(cls, device: object = "cpu") -> CpuGenerator:
        return super().__new__(cls, on_cpu(device))


class NoStream:
    def wait_stream(self, other: NoStream) -> None:
        pass


def replace_gpu() -> None:
    torch.Generator = CpuGenerator
    torch.cuda.Stream = torch.cuda.current_stream = NoStream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()


def replace_graphs() -> None:
    torch.cuda.CUDAGraph = Graph
    torch.cuda.graph = capture
    for wrapper in (
        compat.BatchDecodeWithPagedKVCacheWrapper,
        compat.BatchPrefillWithPagedKVCacheWrapper,
        compat.BatchPrefillWithRaggedKVCacheWrapper,
    ):
        wrapper.run = recorded(wrapper.run)


# ---- which cases, and what became of them ----------------------------------------------------------------------------


def work(item: pytest.Item) -> int:
    """Multiply-adds of a case, or 8 for each element of its K and V, as far as its parameters tell."""
    params = item.callspec.params if hasattr(item, "callspec") else {}

    def of(*names: str, default: int = 1) -> int:
        return next((params[name] for name in names if isinstance(params.get(name), int)), default)

    kv_len = of("kv_len", "seq_len", "unique_kv_len") + of("shared_kv_len", default=0)
    own = of("seq_len", "unique_kv_len") if "prefill" in item.name or "append" in item.name else 1
    qo_len = of("qo_len", "q_len", default=own)
    kv_heads = of("num_kv_heads", "num_heads")
    qo_heads = of("num_qo_heads", default=kv_heads * of("group_size"))
    return of("batch_size") * kv_len * of("head_dim") * max(qo_len * qo_heads, 8 * kv_heads)


class Tally:
    def __init__(self, per_test: int, max_work: int, seed: int) -> None:
        self.per_test, self.max_work, self.random = per_test, max_work, random.Random(seed)
        self.counts = collections.defaultdict(collections.Counter)
        self.reasons = collections.defaultdict(collections.Counter)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_test = collections.defaultdict(list)
        for item in items:
            if self.max_work and work(item) > self.max_work:
                self.counts[item.path.name]["too large"] += 1
            else:
                by_test[item.path.name, getattr(item, "originalname", item.name)].append(item)
        items.clear()
        for (file, _), cases in by_test.items():
            picked = cases
            if self.per_test and len(cases) > self.per_test:
                picked = self.random.sample(cases, self.per_test)
                self.counts[file]["not picked"] += len(cases) - len(picked)
            items.extend(picked)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        report = yield
        if report.when == "call" or not report.passed:
            error = call.excinfo.value if call.excinfo else None
            kind = "not covered" if isinstance(error, NotImplementedError) else report.outcome
            self.counts[item.path.name][kind] += 1
            if kind in ("not covered", "failed"):
                text = str(error).strip().splitlines() or [""]
                self.reasons[kind][f"{item.path.name}: {type(error).__name__}: {text[0]}"] += 1
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            name = Path(report.nodeid).name
            self.counts[name]["failed"] += 1
            self.reasons["failed"][f"{name}: {str(report.longrepr).strip().splitlines()[-1]}"] += 1

    def report(self) -> int:
        """Prints the table; 1 where a test failed or none ran."""
        columns = ["passed", "failed", "not covered", "skipped", "too large", "not picked"]
        print(f"\n{'file':40}" + "".join(f"{column:>13}" for column in columns))
        total = collections.Counter()
        for file in sorted(self.counts):
            total += self.counts[file]
            print(f"{file:40}" + "".join(f"{self.counts[file][column]:13}" for column in columns))
        print(f"{'all':40}" + "".join(f"{total[column]:13}" for column in columns))
        for kind in ("failed", "not covered"):
            for reason, count in sorted(self.reasons[kind].items()):
                print(f"{kind}, {count}: {reason}")
        return 1 if total["failed"] or not total["passed"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-test", type=int, default=20, help="cases of each test (default: %(default)s)")
    parser.add_argument("--max-work", type=int, default=10**9, help="multiply-adds of a case (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="of the picking and of PyTorch")
    parser.add_argument("--no-capture", action="store_true", help="replay CUDA graphs by calling run() again")
    options, pytest_arguments = parser.parse_known_args()
    files = [options.folder / file for file in FILES if (options.folder / file).is_file()]
    if not files:
        parser.error(f"{options.folder} has none of {', '.join(FILES)}")

    alias_modules()
    on_gpu = torch.cuda.is_available()
    print(f"seed {options.seed}, {'CUDA' if on_gpu else 'CPU in the place of CUDA'}")
    torch.manual_seed(options.seed)
    tally = Tally(options.per_test, options.max_work, options.seed)
    arguments = [*map(str, files), "--import-mode=importlib", "-q", "-p", "no:cacheprovider", *pytest_arguments]
    sys.path.insert(0, str(options.folder))
    if options.no_capture or not on_gpu:
        replace_graphs()
    if not on_gpu:
        replace_gpu()
    with contextlib.nullcontext() if on_gpu else CudaMeansCpu():
        pytest.main(arguments, plugins=[tally])
    return tally.report()


if __name__ == "__main__":
    sys.exit(main())
