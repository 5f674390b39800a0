"""fiw.compat.flashinfer against attention in float64, for random shapes and options."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest

from frameworks import has_cuda
from reference import attend as attend_by_rows

torch = pytest.importorskip("torch", reason="skipped: no torch")
import fiw.compat.flashinfer as flashinfer  # noqa: E402
from fiw.compat.flashinfer import _graph, _paged, _terms  # noqa: E402

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture
def one_rng(seed: int) -> np.random.Generator:
    torch.manual_seed(seed)
    return np.random.default_rng(seed)


@pytest.fixture(params=range(12))
def rng(one_rng: np.random.Generator) -> np.random.Generator:
    """As one_rng, for tests of random shapes, which run several times."""
    return one_rng


# ---- the reference ---------------------------------------------------------------------------------------------------


@dataclass
class Options:
    causal: bool = False
    window_left: int = -1
    cap: float = 0.0
    sm_scale: float | None = None
    alibi: bool = False
    rope: tuple[float, float] | None = None  # scale and theta
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None  # [qo_len, kv_len]


def host(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.detach().cpu().double().numpy()


def rotated(x: torch.Tensor, first: int, rope: tuple[float, float]) -> torch.Tensor:
    """x [n, heads, d], whose rows begin at position `first`, as complex numbers that turn; rounded to the type of x."""
    scale, theta = rope
    half = x.shape[2] // 2
    turns = np.exp(1j * np.outer(first + np.arange(len(x)), theta ** (-np.arange(half) / half)) / scale)
    pairs = (host(x[..., :half]) + 1j * host(x[..., half:])) * turns[:, None]
    return torch.from_numpy(np.concatenate([pairs.real, pairs.imag], axis=-1)).to(x.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and base-2 LSE in float64 of q [n, heads, d] over k and v [m, kv_heads, d], by FlashInfer's definitions."""
    heads, slopes = q.shape[1], None
    if options.rope is not None:
        q, k = rotated(q, len(k) - len(q), options.rope), rotated(k.to(q.dtype), 0, options.rope)
    if options.alibi:
        power = 2 ** math.floor(math.log2(heads))
        slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
        slopes = np.array(slopes + [2 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)])
    out, lse = attend_by_rows(
        host(q),
        [len(q)],
        [host(k)],
        [host(v)],
        sm_scale=options.sm_scale,
        causal=options.causal,
        window_left=options.window_left,
        soft_cap=options.cap,
        slopes=slopes,
        sinks=host(options.sinks),
        masks=None if options.mask is None else [host(options.mask)],
    )
    if options.alibi:  # FlashInfer counts a query's position from the first query
        lse = lse + slopes * (len(k) - len(q))
    return torch.from_numpy(out), torch.from_numpy(lse / math.log(2))


TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def check(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found.detach().cpu().double(), expected, rtol=tolerance, atol=tolerance)


# ---- random batches --------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A batch over a paged cache, whose unused slots are NaN."""

    rng: np.random.Generator
    device: torch.device
    prefill: bool
    heads: int = field(init=False)

    def __post_init__(self) -> None:
        rng, device = self.rng, self.device
        self.kv_heads = int(rng.integers(1, 4))
        self.heads = self.kv_heads * int(rng.integers(1, 5))
        on_gpu = device.type == "cuda"
        self.dim = int(rng.choice([64, 128])) if on_gpu else 8 * int(rng.integers(1, 17))
        self.page_size = int(rng.choice([1, 2, 5, 16]))
        self.layout = str(rng.choice(["NHD", "HND"]))
        self.q_dtype = [torch.float16, torch.bfloat16, torch.float32][rng.integers(0, 2 if on_gpu else 3)]
        self.kv_dtype = FP8[rng.integers(0, 2)] if rng.random() < 0.3 else self.q_dtype
        self.batch = int(rng.integers(1, 6))
        self.qo_lens = rng.integers(0, 9, self.batch) if self.prefill else np.ones(self.batch, dtype=np.int64)
        self.kv_lens = rng.integers(0, 60, self.batch)
        self.allocate()

    def allocate(self) -> None:
        """Tensors for these lengths, and what they are filled with."""
        device = self.device
        self.num_pages = int(self.page_counts.sum()) + 3
        self.q = torch.empty(int(self.qo_lens.sum()), self.heads, self.dim, dtype=self.q_dtype, device=device)
        page = (self.page_size, self.kv_heads) if self.layout == "NHD" else (self.kv_heads, self.page_size)
        self.cache = torch.empty(self.num_pages, 2, *page, self.dim, dtype=self.kv_dtype, device=device)
        self.fill()

    @property
    def page_counts(self) -> np.ndarray:
        return -(-self.kv_lens // self.page_size)

    def deal(self, least: int) -> None:
        """Other requests, of at least so many tokens, in the same tensors."""
        self.kv_lens = self.rng.integers(least, 60, self.batch)
        while self.page_counts.sum() > self.num_pages:
            self.kv_lens = np.maximum(self.kv_lens // 2, least)
        self.fill()

    def fill(self) -> None:
        pages = self.page_counts
        self.indptr = self.tensor(np.concatenate([[0], pages.cumsum()]))
        self.indices = self.tensor(self.rng.permutation(self.num_pages)[: pages.sum()])
        self.last_page_len = self.tensor((self.kv_lens - 1) % self.page_size + 1)
        self.qo_indptr = self.tensor(np.concatenate([[0], self.qo_lens.cumsum()]))
        self.q.copy_(torch.randn(self.q.shape))
        self.cache.copy_(torch.full(self.cache.shape, math.nan))
        self.k, self.v = [], []
        for r in range(self.batch):
            for side, rows in ((0, self.k), (1, self.v)):
                tokens = torch.randn(int(self.kv_lens[r]), self.kv_heads, self.dim, device=self.device)
                tokens = tokens.to(self.kv_dtype)
                rows.append(tokens.to(torch.float32))
                for t in range(len(tokens)):
                    page_id = int(self.indices[int(self.indptr[r]) + t // self.page_size])
                    slot = self.cache[page_id, side].view(torch.uint8 if self.kv_dtype in FP8 else self.kv_dtype)
                    value = tokens[t].view(slot.dtype)
                    slot[(t % self.page_size,) if self.layout == "NHD" else (slice(None), t % self.page_size)] = value

    def tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(self.device)

    def paged_kv_cache(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        cache = self.cache
        if self.page_size == 1 and self.rng.random() < 0.5:
            cache = cache.squeeze(2 if self.layout == "NHD" else 3)
        return cache if self.rng.random() < 0.5 else tuple(cache.unbind(1))

    def options(self) -> Options:
        rng = self.rng
        kind = rng.choice(["plain", "cap", "alibi", "sinks"])
        return Options(
            causal=not self.prefill or bool(rng.random() < 0.5),
            window_left=int(rng.integers(0, 40)) if rng.random() < 0.3 else -1,
            cap=float(rng.uniform(1, 30)) if kind == "cap" else 0.0,
            sm_scale=float(rng.uniform(0.05, 0.5)) if rng.random() < 0.3 else None,
            alibi=kind == "alibi",
            rope=random_rope(rng) if kind != "alibi" and rng.random() < 0.4 else None,
            sinks=torch.randn(self.heads, device=self.device) if kind == "sinks" else None,
        )

    def plan_options(self, options: Options) -> dict:
        return {
            "window_left": options.window_left,
            "logits_soft_cap": options.cap or None,
            "sm_scale": options.sm_scale,
            "q_data_type": self.q_dtype,
            "kv_data_type": self.kv_dtype,
            **position_encoding(options),
        }

    def expected(
        self, options: Options, masks: list[torch.Tensor] | None = None, k_scale: float = 1.0, v_scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outs, lses = [], []
        for r in range(self.batch):
            rows = self.q[int(self.qo_indptr[r]) : int(self.qo_indptr[r + 1])]
            sm_scale = self.dim**-0.5 if options.sm_scale is None else options.sm_scale
            scaled = replace(options, sm_scale=sm_scale * k_scale, mask=None if masks is None else masks[r])
            out, lse = attend(rows, self.k[r], self.v[r], scaled)
            outs.append(out * v_scale)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.q_dtype]

    def lse_tolerance(self, options: Options) -> float:
        """Tensor cores sum weights that are rounded to the queries' type; rotated ones may be rounded the other way."""
        exact = self.device.type == "cpu" and options.rope is None
        return 1e-4 if exact or self.q_dtype == torch.float32 else 5e-3

    def poisoned_out(self) -> torch.Tensor:
        return torch.full_like(self.q, math.nan)


def random_rope(rng: np.random.Generator) -> tuple[float, float]:
    return (1.0, 1e4) if rng.random() < 0.3 else (float(rng.uniform(0.5, 8)), float(rng.uniform(10, 1e6)))


def position_encoding(options: Options) -> dict:
    """The arguments of calls; rope_scale and rope_theta are left out where they have their defaults."""
    if options.rope is None:
        return {"pos_encoding_mode": "ALIBI" if options.alibi else "NONE"}
    names = {} if options.rope == (1.0, 1e4) else dict(zip(("rope_scale", "rope_theta"), options.rope, strict=True))
    return {"pos_encoding_mode": "ROPE_LLAMA", **names}


def workspace_buffer(device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


# ---- the calls -------------------------------------------------------------------------------------------------------


def test_batch_decode(rng: np.random.Generator, device: torch.device) -> None:
    case = Case(rng, device, prefill=False)
    options = case.options()
    # FlashInfer reads what indptr says, wherever it starts, and no more.
    ahead = int(rng.integers(0, 3))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace_buffer(device), case.layout)
    wrapper.plan(
        case.indptr + ahead,
        torch.nn.functional.pad(case.indices, (ahead, int(rng.integers(0, 3))), value=-1),
        case.last_page_len,
        case.heads,
        case.kv_heads,
        case.dim,
        case.page_size,
        **case.plan_options(options),
    )
    out = case.poisoned_out()
    lse = torch.full(out.shape[:2], math.nan, device=device)
    scales = rng.uniform(0.25, 2, 3)
    found = wrapper.run(
        case.q,
        case.paged_kv_cache(),
        q_scale=scales[0],
        k_scale=scales[1],
        v_scale=torch.tensor(scales[2]),
        out=out,
        lse=lse,
        return_lse=True,
        sinks=options.sinks,
    )
    assert found[0] is out and found[1] is lse
    expected = case.expected(options, k_scale=scales[0] * scales[1], v_scale=scales[2])
    check(out, expected[0], 4 * case.tolerance)
    check(lse, expected[1], case.lse_tolerance(options))
    check(wrapper.run(case.q, case.paged_kv_cache(), sinks=options.sinks), case.expected(options)[0], case.tolerance)
    fresh = Options(causal=True, window_left=2, rope=random_rope(rng) if rng.random() < 0.5 else None)
    found = wrapper.forward_return_lse(case.q, case.paged_kv_cache(), window_left=2, **position_encoding(fresh))
    check(found[0], case.expected(fresh)[0], case.tolerance)
    check(found[1], case.expected(fresh)[1], case.lse_tolerance(fresh))
    fresh.window_left = 4
    check(wrapper.run(case.q, case.paged_kv_cache(), window_left=4), case.expected(fresh)[0], case.tolerance)


def test_speculative_decode(rng: np.random.Generator, device: torch.device) -> None:
    case = Case(rng, device, prefill=False)
    window = int(rng.integers(2, 5))
    tokens = Ragged(case, np.full(case.batch, window), case.kv_lens + window)
    options = Options(causal=True, rope=random_rope(rng) if rng.random() < 0.5 else None)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace_buffer(device), use_tensor_cores=True)
    wrapper.plan(
        tokens.indptr,
        tokens.indices,
        tokens.last_page_len,
        case.heads,
        case.kv_heads,
        case.dim,
        1,
        q_data_type=case.q_dtype,
        q_len_per_req=window,
        **position_encoding(options),
    )
    out, lse = wrapper.run_return_lse(tokens.q, (tokens.k, tokens.v))
    check(out, tokens.expected(options)[0], case.tolerance)
    check(lse, tokens.expected(options)[1], case.lse_tolerance(options))


def test_batch_paged_prefill(rng: np.random.Generator, device: torch.device) -> None:
    case = Case(rng, device, prefill=True)
    options = case.options()
    masks = None
    if rng.random() < 0.4:
        masks = [torch.rand(n, m, device=device) < 0.7 for n, m in zip(case.qo_lens, case.kv_lens, strict=True)]
    mask_arguments = {}
    if masks is not None:
        flat = torch.cat([mask.reshape(-1) for mask in masks])
        ends = torch.tensor([0, *np.cumsum(case.qo_lens * case.kv_lens)], device=device)
        packed, _ = flashinfer.segment_packbits(flat, ends, bitorder="little")
        mask_arguments = {"custom_mask": flat} if rng.random() < 0.5 else {"packed_custom_mask": packed}
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_buffer(device), case.layout)
    wrapper.plan(
        case.qo_indptr,
        case.indptr,
        case.indices,
        case.last_page_len,
        case.heads,
        case.kv_heads,
        case.dim,
        case.page_size,
        causal=options.causal,
        **mask_arguments,
        **case.plan_options(options),
    )
    out = case.poisoned_out()
    base, layout = str(rng.choice(["log2", "ln"])), str(rng.choice(["NH", "HN"]))
    _, lse = wrapper.run(
        case.q,
        case.paged_kv_cache(),
        out=out,
        return_lse=True,
        lse_base=base,
        lse_layout=layout,
        sinks=options.sinks,
    )
    expected_out, expected_lse = case.expected(options, masks)
    check(out, expected_out, case.tolerance)
    expected_lse = expected_lse * (math.log(2) if base == "ln" else 1)
    check(lse, expected_lse if layout == "NH" else expected_lse.t(), case.lse_tolerance(options))
    fresh = Options(causal=not options.causal, window_left=3, rope=random_rope(rng) if rng.random() < 0.5 else None)
    found = wrapper.forward(
        case.q, case.paged_kv_cache(), causal=fresh.causal, window_left=3, **position_encoding(fresh)
    )
    check(found, case.expected(fresh, masks)[0], case.tolerance)


class Ragged:
    """A batch of the case's heads and types whose K and V lie together, or as pages of one token each."""

    def __init__(self, case: Case, qo_lens: np.ndarray, kv_lens: np.ndarray) -> None:
        self.case = case
        dtype, device = case.q_dtype, case.device
        self.qo_indptr = case.tensor(np.concatenate([[0], qo_lens.cumsum()]))
        self.indptr = case.tensor(np.concatenate([[0], kv_lens.cumsum()]))
        self.indices = case.tensor(np.arange(kv_lens.sum()))
        self.last_page_len = case.tensor(np.ones(len(kv_lens)))
        self.q = torch.randn(int(qo_lens.sum()), case.heads, case.dim, device=device).to(dtype)
        self.k = torch.randn(int(kv_lens.sum()), case.kv_heads, case.dim, device=device).to(dtype)
        self.v = torch.randn(int(kv_lens.sum()), case.kv_heads, case.dim, device=device).to(dtype)

    def expected(self, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
        parts = []
        for r in range(len(self.indptr) - 1):
            rows = slice(int(self.qo_indptr[r]), int(self.qo_indptr[r + 1]))
            keys = slice(int(self.indptr[r]), int(self.indptr[r + 1]))
            parts.append(attend(self.q[rows], self.k[keys], self.v[keys], options))
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def test_batch_ragged_prefill(rng: np.random.Generator, device: torch.device) -> None:
    case = Case(rng, device, prefill=True)
    options = case.options()
    options.sinks = None
    batch = Ragged(case, case.qo_lens, case.kv_lens)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace_buffer(device), case.layout)
    arguments = case.plan_options(options) | {"kv_data_type": case.q_dtype}
    wrapper.plan(batch.qo_indptr, batch.indptr, case.heads, case.kv_heads, case.dim, causal=options.causal, **arguments)
    k, v = (x if case.layout == "NHD" else x.transpose(0, 1).contiguous() for x in (batch.k, batch.v))
    out = torch.full_like(batch.q, math.nan)
    _, lse = wrapper.run_return_lse(batch.q, k, v, out=out)
    check(out, batch.expected(options)[0], case.tolerance)
    check(lse, batch.expected(options)[1], case.lse_tolerance(options))
    fresh = Options(causal=not options.causal, window_left=3, rope=random_rope(rng) if rng.random() < 0.5 else None)
    out = wrapper.forward(batch.q, k, v, causal=fresh.causal, window_left=3, **position_encoding(fresh))
    check(out, batch.expected(fresh)[0], case.tolerance)


def test_ragged_fp8(rng: np.random.Generator, device: torch.device) -> None:
    case = Case(rng, device, prefill=True)
    batch = Ragged(case, case.qo_lens, case.kv_lens)
    dtype = FP8[rng.integers(0, 2)]
    k, v = batch.k.to(dtype), batch.v.to(dtype)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace_buffer(device))
    options = Options(rope=random_rope(rng) if rng.random() < 0.5 else None)
    arguments = {"q_data_type": case.q_dtype, "kv_data_type": dtype, **position_encoding(options)}
    wrapper.plan(batch.qo_indptr, batch.indptr, case.heads, case.kv_heads, case.dim, **arguments)
    batch.k, batch.v = 0.5 * k.to(torch.float32), 1.5 * v.to(torch.float32)
    out = wrapper.run(batch.q, k, v, k_scale=0.5, v_scale=1.5)
    check(out, batch.expected(options)[0], 2 * case.tolerance)


def test_single(rng: np.random.Generator, device: torch.device) -> None:
    case = Case(rng, device, prefill=True)
    options = case.options()
    options.sinks = None
    n, m = int(rng.integers(1, 9)), int(rng.integers(1, 60))
    batch = Ragged(case, np.array([n]), np.array([m]))
    k, v = (x if case.layout == "NHD" else x.transpose(0, 1).contiguous() for x in (batch.k, batch.v))
    common = {
        "kv_layout": case.layout,
        "window_left": options.window_left,
        "logits_soft_cap": options.cap,
        "sm_scale": options.sm_scale,
        **position_encoding(options),
    }
    out, lse = flashinfer.single_prefill_with_kv_cache_return_lse(batch.q, k, v, causal=options.causal, **common)
    check(out, batch.expected(options)[0], case.tolerance)
    check(lse, batch.expected(options)[1], case.lse_tolerance(options))

    options.mask = torch.rand(n, m, device=device) < 0.6
    packed = flashinfer.packbits(options.mask.reshape(-1), bitorder="little")
    for mask in ({"custom_mask": options.mask}, {"packed_custom_mask": packed}):
        out = flashinfer.single_prefill_with_kv_cache(batch.q, k, v, **mask, **common)
        check(out, batch.expected(options)[0], case.tolerance)

    options.mask = None
    options.sm_scale = (case.dim**-0.5 if options.sm_scale is None else options.sm_scale) * 0.5 * 3
    out, lse = flashinfer.single_decode_with_kv_cache(
        batch.q[-1], k, v, q_scale=0.5, k_scale=3.0, v_scale=0.25, return_lse=True, **common
    )
    expected_out, expected_lse = attend(batch.q[-1:], batch.k, batch.v, options)
    check(out, 0.25 * expected_out[0], case.tolerance)
    check(lse, expected_lse[0], case.lse_tolerance(options))


def test_rotated_pages_that_requests_share(rng: np.random.Generator, device: torch.device) -> None:
    """A page is at another place in each request, or twice in one."""
    case = Case(rng, device, prefill=True)
    case.indices = case.tensor(rng.integers(0, case.num_pages, len(case.indices)))
    case.cache.copy_(torch.randn(case.cache.shape))
    pages = case.cache.to(torch.float32) if case.layout == "NHD" else case.cache.to(torch.float32).transpose(2, 3)
    for r in range(case.batch):
        of_request = case.indices[int(case.indptr[r]) : int(case.indptr[r + 1])]
        for side, rows in enumerate((case.k, case.v)):
            tokens = pages[of_request, side].reshape(-1, case.kv_heads, case.dim)
            rows[r] = tokens[: int(case.kv_lens[r])]
    options = replace(case.options(), alibi=False, rope=random_rope(rng))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_buffer(device), case.layout)
    wrapper.plan(
        case.qo_indptr,
        case.indptr,
        case.indices,
        case.last_page_len,
        case.heads,
        case.kv_heads,
        case.dim,
        case.page_size,
        causal=options.causal,
        **case.plan_options(options),
    )
    kept = case.cache.clone()
    out, lse = wrapper.run(case.q, case.paged_kv_cache(), return_lse=True, sinks=options.sinks)
    check(out, case.expected(options)[0], case.tolerance)
    check(lse, case.expected(options)[1], case.lse_tolerance(options))
    raw = torch.uint8 if case.kv_dtype in FP8 else torch.int32 if case.kv_dtype == torch.float32 else torch.int16
    assert torch.equal(case.cache.view(raw), kept.view(raw))


def items_and_masks(rng: np.random.Generator, case: Case) -> tuple[dict, list[torch.Tensor]]:
    """Requests of a prefix and items after it, for any lengths: arguments of plan(), and what they mean."""
    prefix_lens = [int(rng.integers(0, n + 1)) for n in case.kv_lens]
    places, masks = [], []
    for prefix_len, qo_len, kv_len in zip(prefix_lens, case.qo_lens, case.kv_lens, strict=True):
        own = []
        while len(own) < kv_len - prefix_len:
            own += range(int(rng.integers(1, 9)))  # a delimiter, and an item of up to 7 tokens
        places.append(own[: kv_len - prefix_len])
        # Items by number; the prefix is -1.
        item = np.concatenate([np.full(prefix_len, -1), np.cumsum([place == 0 for place in places[-1]])]).astype(int)
        delimiter = np.array([False] * prefix_len + [place == 0 for place in places[-1]], dtype=bool)
        mask = np.zeros((qo_len, kv_len), dtype=bool)
        for p, j in itertools.product(range(qo_len), range(kv_len)):
            i = kv_len - qo_len + p
            mask[p, j] = 0 <= j <= i and (j < prefix_len or (item[i] == item[j] and not delimiter[[i, j]].any()))
        masks.append(torch.from_numpy(mask).to(case.device))
    width = max(map(len, places)) + int(rng.integers(0, 3))
    padded = np.array([own + [0] * (width - len(own)) for own in places]).astype(np.int32)
    longest = np.array([max(own, default=0) for own in places]) + int(rng.integers(0, 2))
    return {
        "prefix_len_ptr": torch.tensor(prefix_lens).to(torch.uint32).to(case.device),
        "token_pos_in_items_ptr": torch.from_numpy(padded).reshape(-1).to(torch.uint16).to(case.device),
        "token_pos_in_items_len": width if rng.random() < 0.5 else torch.tensor(width),
        "max_item_len_ptr": torch.from_numpy(longest).to(torch.uint16).to(case.device),
    }, masks


def test_multi_item_scoring(rng: np.random.Generator, device: torch.device) -> None:
    case = Case(rng, device, prefill=True)
    options = case.options()
    items, masks = items_and_masks(rng, case)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_buffer(device), case.layout)
    pages = (case.indptr, case.indices, case.last_page_len)
    sizes = (case.heads, case.kv_heads, case.dim)
    arguments = {"causal": options.causal, **items, **case.plan_options(options)}
    wrapper.plan(case.qo_indptr, *pages, *sizes, case.page_size, **arguments)
    out, lse = wrapper.run(case.q, case.paged_kv_cache(), return_lse=True, sinks=options.sinks)
    check(out, case.expected(options, masks)[0], case.tolerance)
    check(lse, case.expected(options, masks)[1], case.lse_tolerance(options))

    options.sinks = None
    k, v = (torch.cat(side).to(case.q_dtype) for side in (case.k, case.v))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace_buffer(device))
    kv_indptr = case.tensor(np.concatenate([[0], case.kv_lens.cumsum()]))
    wrapper.plan(case.qo_indptr, kv_indptr, *sizes, **(arguments | {"kv_data_type": case.q_dtype}))
    check(wrapper.run(case.q, k, v), case.expected(options, masks)[0], case.tolerance)


def test_append(rng: np.random.Generator, device: torch.device) -> None:
    case = Case(rng, device, prefill=True)
    kept = case.cache.clone()
    appended = np.minimum(case.qo_lens, case.kv_lens)
    nnz = int(appended.sum())
    append_indptr = case.tensor(np.concatenate([[0], appended.cumsum()]))
    seq_lens = flashinfer.get_seq_lens(case.indptr, case.last_page_len, case.page_size)
    requests, positions = flashinfer.get_batch_indices_positions(append_indptr, seq_lens, nnz + 2)
    of = np.repeat(np.arange(case.batch), appended)
    offsets = np.concatenate([np.arange(n) for n in appended])
    np.testing.assert_array_equal(requests.cpu(), [*of, -1, -1])
    np.testing.assert_array_equal(positions.cpu(), [*(case.kv_lens[of] - appended[of] + offsets), 0, 0])

    new = [torch.randn(nnz + 2, case.kv_heads, case.dim, device=device).to(case.q_dtype) for _ in range(2)]
    order = torch.from_numpy(rng.permutation(nnz + 2)).to(device)
    flashinfer.append_paged_kv_cache(
        new[0][order],
        new[1][order],
        requests[order],
        positions[order],
        case.paged_kv_cache(),
        case.indices,
        case.indptr,
        case.last_page_len,
        case.layout,
    )
    raw = torch.uint8 if case.kv_dtype in FP8 else case.kv_dtype
    for i in range(nnz):
        position = int(positions[i])
        page = int(case.indices[int(case.indptr[int(requests[i])]) + position // case.page_size])
        slot = position % case.page_size
        for side in range(2):
            where = (page, side, slot) if case.layout == "NHD" else (page, side, slice(None), slot)
            kept.view(raw)[where] = new[side][i].to(case.kv_dtype).view(raw)
    whole = torch.uint8 if raw == torch.uint8 else torch.int32 if raw == torch.float32 else torch.int16
    assert torch.equal(case.cache.view(whole), kept.view(whole))


def test_merge(rng: np.random.Generator, device: torch.device) -> None:
    case = Case(rng, device, prefill=True)
    states, rows = int(rng.integers(1, 6)), int(rng.integers(1, 9))
    v = torch.randn(rows, states, case.heads, case.dim, device=device).to(case.q_dtype)
    s = 3 * torch.randn(rows, states, case.heads, device=device)
    s[torch.rand(s.shape, device=device) < 0.2] = -math.inf
    if rng.random() < 0.5:
        s[0] = -math.inf
    weights = torch.exp2(s.cpu().double())
    total = weights.sum(dim=1)
    expected_v = torch.where(total[..., None] > 0, (weights[..., None] * v.cpu().double()).sum(1) / total[..., None], 0)
    out, lse = flashinfer.merge_states(v, s)
    check(out, expected_v, case.tolerance)
    check(lse, total.log2(), 1e-5)

    if states >= 2:
        pair = flashinfer.merge_states(v[:, :2], s[:, :2])
        both = flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
        assert torch.equal(pair[0], both[0]) and torch.equal(pair[1], both[1])
        mask = torch.rand(rows, device=device) < 0.5
        in_place = v[:, 0].clone(), s[:, 0].clone()
        flashinfer.merge_state_in_place(*in_place, v[:, 1], s[:, 1], mask)
        assert torch.equal(in_place[0], torch.where(mask[:, None, None], both[0], v[:, 0]))
        assert torch.equal(in_place[1], torch.where(mask[:, None], both[1], s[:, 0]))


def test_cascade(rng: np.random.Generator, device: torch.device) -> None:
    """A shared prefix and what each request has of its own are attention over both."""
    case = Case(rng, device, prefill=True)
    case.q_dtype = torch.float16
    shared_len = int(rng.integers(1, 30))
    kv_lens, qo_lens = case.kv_lens + 8, case.qo_lens
    unique = Ragged(case, qo_lens, kv_lens)
    shared = Ragged(case, np.array([1]), np.array([shared_len]))
    cache = tuple(torch.cat(sides).unsqueeze(1) for sides in ((shared.k, unique.k), (shared.v, unique.v)))
    total_qo = case.tensor(np.array([0, qo_lens.sum()]))
    parts = []
    for r in range(case.batch):
        rows = slice(int(unique.qo_indptr[r]), int(unique.qo_indptr[r + 1]))
        keys = slice(int(unique.indptr[r]), int(unique.indptr[r + 1]))
        k, v = torch.cat([shared.k, unique.k[keys]]), torch.cat([shared.v, unique.v[keys]])
        parts.append(attend(unique.q[rows], k, v, Options(causal=True))[0])
    expected = torch.cat(parts)

    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace_buffer(device))
    wrapper.plan(
        [total_qo, unique.qo_indptr],
        [shared.indptr, unique.indptr],
        [shared.indices, unique.indices + shared_len],
        [shared.last_page_len, unique.last_page_len],
        case.heads,
        case.kv_heads,
        case.dim,
        1,
        causal=True,
    )
    check(wrapper.run(unique.q, cache), expected, case.tolerance)

    prefix = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace_buffer(device))
    pages = (unique.indptr, unique.indices + shared_len, unique.last_page_len)
    prefix.begin_forward(unique.qo_indptr, *pages, case.heads, case.kv_heads, case.dim, 1)
    check(prefix.forward(unique.q, shared.k, shared.v, cache, causal=True), expected, case.tolerance)

    decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace_buffer(device))
    decode.begin_forward(*pages, case.heads, case.kv_heads, case.dim, 1)
    q = torch.randn(case.batch, case.heads, case.dim, device=device).half()
    found = decode.forward(q, shared.k, shared.v, cache)
    for r in range(case.batch):
        keys = slice(int(unique.indptr[r]), int(unique.indptr[r + 1]))
        k, v = torch.cat([shared.k, unique.k[keys]]), torch.cat([shared.v, unique.v[keys]])
        check(found[r : r + 1], attend(q[r : r + 1], k, v, Options())[0], case.tolerance)


def test_packbits(rng: np.random.Generator, device: torch.device) -> None:
    lengths = rng.integers(0, 40, int(rng.integers(1, 9)))
    bits = rng.random(lengths.sum()) < 0.5
    ends = np.concatenate([[0], lengths.cumsum()])
    for bitorder in ("big", "little"):
        packed = flashinfer.packbits(torch.from_numpy(bits).to(device), bitorder)
        np.testing.assert_array_equal(packed.cpu(), np.packbits(bits, bitorder=bitorder))
        packed, starts = flashinfer.segment_packbits(
            torch.from_numpy(bits).to(device), torch.from_numpy(ends).to(device), bitorder
        )
        segments = [np.packbits(bits[a:b], bitorder=bitorder) for a, b in itertools.pairwise(ends)]
        np.testing.assert_array_equal(packed.cpu(), np.concatenate(segments))
        np.testing.assert_array_equal(starts.cpu(), [0, *np.cumsum([len(segment) for segment in segments])])


# ---- plans, buffers and what is refused ------------------------------------------------------------------------------


def planned_decode(case: Case, buffer: torch.Tensor, **arguments: object):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, case.layout)
    plan_decode(wrapper, case, **arguments)
    return wrapper


def plan_decode(wrapper: flashinfer.BatchDecodeWithPagedKVCacheWrapper, case: Case, **arguments: object) -> None:
    wrapper.plan(
        case.indptr.clone(),
        case.indices.clone(),
        case.last_page_len.clone(),
        case.heads,
        case.kv_heads,
        case.dim,
        case.page_size,
        **({"q_data_type": case.q_dtype, "kv_data_type": case.kv_dtype} | arguments),
    )


def test_plans_of_several_wrappers_stay_apart(one_rng: np.random.Generator, device: torch.device) -> None:
    buffer = workspace_buffer(device)
    cases = [Case(one_rng, device, prefill=False) for _ in range(24)]  # more than the workspace's cache has entries
    wrappers = [planned_decode(case, buffer) for case in cases]
    for index in one_rng.permutation(len(cases)):
        case = cases[index]
        check(wrappers[index].run(case.q, case.cache), case.expected(Options())[0], case.tolerance)


def test_equal_contents_find_the_plan(one_rng: np.random.Generator, device: torch.device) -> None:
    workspace_of = flashinfer._terms.workspace_of
    buffer = workspace_buffer(device)
    case = Case(one_rng, device, prefill=False)
    wrapper = planned_decode(case, buffer)
    plan_decode(wrapper, case)
    other = planned_decode(case, buffer)
    plans = workspace_of(buffer).stats().decode
    assert (plans.misses, plans.hits) == (1, 2)
    check(other.run(case.q, case.cache), case.expected(Options())[0], case.tolerance)
    planned_decode(case, workspace_buffer(device))
    assert workspace_of(buffer).stats().decode == plans


@pytest.mark.parametrize("control", ["fixed_split_size", "disable_split_kv"])
def test_split_controls_make_results_independent_of_the_batch(
    one_rng: np.random.Generator, device: torch.device, control: str
) -> None:
    heads, dim, lengths = 4, 64, np.array([700, 3, 90, 1500])
    case = Case(one_rng, device, prefill=False)
    case.heads, case.kv_heads, case.dim, case.q_dtype = heads, 2, dim, torch.float16
    batch = Ragged(case, np.ones(4, dtype=np.int64), lengths)
    cache = (batch.k.unsqueeze(1), batch.v.unsqueeze(1))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace_buffer(device), use_tensor_cores=True)
    split = {"fixed_split_size": 128} if control == "fixed_split_size" else {"disable_split_kv": True}
    wrapper.plan(batch.indptr, batch.indices, batch.last_page_len, heads, 2, dim, 1, **split)
    together = wrapper.run(batch.q, cache)
    check(together, batch.expected(Options())[0], TOLERANCE[torch.float16])
    for r in range(4):
        pages = batch.indptr[r : r + 2]
        wrapper.plan(pages, batch.indices, batch.last_page_len[r : r + 1], heads, 2, dim, 1, **split)
        assert torch.equal(wrapper.run(batch.q[r : r + 1], cache), together[r : r + 1])


def test_cuda_graph_buffers(one_rng: np.random.Generator, device: torch.device) -> None:
    case = Case(one_rng, device, prefill=False)
    buffers = [torch.full((n,), -1, dtype=torch.int32, device=device) for n in (case.batch + 1, 500, case.batch)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace_buffer(device), *buffers, case.layout)
    assert wrapper.is_cuda_graph_enabled
    plan_decode(wrapper, case)
    assert torch.equal(buffers[0], case.indptr) and torch.equal(buffers[2], case.last_page_len)
    assert torch.equal(buffers[1][: len(case.indices)], case.indices)
    check(wrapper.run(case.q, case.cache), case.expected(Options())[0], case.tolerance)
    case.indptr, case.last_page_len = case.indptr[:-1], case.last_page_len[:-1]
    with pytest.raises(ValueError, match="paged_kv_indptr_buffer"):
        plan_decode(wrapper, case)
    with pytest.raises(ValueError, match="paged_kv_indices_buffer is None"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace_buffer(device), use_cuda_graph=True, paged_kv_indptr_buffer=buffers[0]
        )
    with pytest.raises(ValueError, match="paged_kv_indptr_buf has"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace_buffer(device),
            use_cuda_graph=True,
            qo_indptr_buf=buffers[1],
            paged_kv_indptr_buf=buffers[0],
            paged_kv_indices_buf=buffers[1],
            paged_kv_last_page_len_buf=buffers[2],
        )


def recorded(device: torch.device, run: Callable[[], object]) -> Callable[[], object]:
    """What repeats `run`: a CUDA graph of it, captured as FlashInfer's users do; on the CPU, the call itself."""
    if device.type == "cpu":
        run()
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def graph_buffers(case: Case, masks: bool = False) -> list[torch.Tensor]:
    """Of the prefill wrapper: query starts, page starts, pages, last pages; mask bits and where they begin."""
    lengths = (case.batch + 1, case.batch + 1, case.num_pages, case.batch)
    buffers = [torch.full((n,), -1, dtype=torch.int32, device=case.device) for n in lengths]
    if masks:
        buffers.append(torch.full((60 * len(case.q) // 8 + case.batch,), 255, dtype=torch.uint8, device=case.device))
        buffers.append(torch.full((case.batch + 1,), -1, dtype=torch.int32, device=case.device))
    return buffers


def check_replays(
    case: Case, options: Options, least: int, plan: Callable[[], list[torch.Tensor] | None], wrapper: object
) -> None:
    """Steps of other requests, each planned and replayed; `plan` returns the masks."""
    cache = case.paged_kv_cache()
    out = case.poisoned_out()
    lse = torch.full(out.shape[:2], math.nan, device=case.device)
    with_lse = not options.alibi

    def run() -> None:
        wrapper.run(
            case.q, cache, out=out, lse=lse if with_lse else None, return_lse=with_lse, sinks=options.sinks, k_scale=0.5
        )

    def check_step() -> None:
        expected = case.expected(options, masks, k_scale=0.5)
        check(out, expected[0], 2 * case.tolerance)
        if with_lse:
            check(lse, expected[1], case.lse_tolerance(options))

    masks = plan()
    replay = recorded(case.device, run)
    for _ in range(4):
        case.deal(least)
        masks = plan()
        out.fill_(math.nan)
        lse.fill_(math.nan)
        replay()
        check_step()
        out.fill_(math.nan)
        run()  # and outside of a graph
        check_step()


@pytest.mark.parametrize("window", [1, 3], ids=["decode", "q_len_per_req"])
def test_decode_from_cuda_graphs(rng: np.random.Generator, device: torch.device, window: int) -> None:
    case = Case(rng, device, prefill=False)
    least = window if window > 1 else 0
    case.qo_lens, case.kv_lens = np.full(case.batch, window), np.maximum(case.kv_lens, least)
    case.allocate()
    options = case.options()
    _, indptr, indices, last_page_len = graph_buffers(case)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace_buffer(device), indptr, indices, last_page_len, case.layout
    )

    def plan() -> None:
        plan_decode(wrapper, case, **case.plan_options(options), q_len_per_req=window)
        assert torch.equal(indptr, case.indptr) and torch.equal(last_page_len, case.last_page_len)
        assert torch.equal(indices[: len(case.indices)], case.indices)

    check_replays(case, options, least, plan, wrapper)


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_prefill_from_cuda_graphs(rng: np.random.Generator, device: torch.device, masked: bool) -> None:
    case = Case(rng, device, prefill=False)
    case.qo_lens = np.full(case.batch, int(rng.integers(1, 17 if rng.random() < 0.5 else 200)))
    case.allocate()
    options = case.options()
    options.causal = bool(rng.random() < 0.5)
    buffers = graph_buffers(case, masked)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_buffer(device), case.layout, True, *buffers)

    def plan() -> list[torch.Tensor] | None:
        masks = None
        if masked:
            masks = [torch.rand(n, m, device=device) < 0.7 for n, m in zip(case.qo_lens, case.kv_lens, strict=True)]
        wrapper.plan(
            case.qo_indptr,
            case.indptr,
            case.indices,
            case.last_page_len,
            case.heads,
            case.kv_heads,
            case.dim,
            case.page_size,
            causal=options.causal,
            custom_mask=None if masks is None else torch.cat([mask.reshape(-1) for mask in masks]),
            **case.plan_options(options),
        )
        return masks

    check_replays(case, options, 0, plan, wrapper)


def test_an_engine_that_plans_in_the_wrappers_buffers(one_rng: np.random.Generator, device: torch.device) -> None:
    """As SGLang does: page numbers come from a kernel, page starts from the host as well."""
    case = Case(one_rng, device, prefill=False)
    options = Options(causal=True)
    _, indptr, indices, last_page_len = graph_buffers(case)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace_buffer(device), indptr, indices, last_page_len, case.layout
    )

    def plan() -> None:
        wrapper._paged_kv_indices_buf[: len(case.indices)] = case.indices
        wrapper.begin_forward(
            case.indptr,
            wrapper._paged_kv_indices_buf,
            case.last_page_len,
            case.heads,
            case.kv_heads,
            case.dim,
            case.page_size,
            q_data_type=case.q_dtype,
            data_type=case.kv_dtype,
            **override,
        )

    override = {}
    plan()
    wrapper.begin_forward = partial(flashinfer.fast_decode_plan, wrapper)
    override = {"global_override_indptr_cpu": case.indptr.cpu()}

    def plan_fast() -> None:
        override["global_override_indptr_cpu"] = case.indptr.cpu()
        plan()
        assert torch.equal(indptr, case.indptr) and torch.equal(last_page_len, case.last_page_len)

    check_replays(case, options, 0, plan_fast, wrapper)


def test_what_engines_read(one_rng: np.random.Generator) -> None:
    case = Case(one_rng, torch.device("cpu"), prefill=True)
    buffer = workspace_buffer(case.device)
    buffers = dict(
        zip(("qo_indptr", "indptr", "indices", "last", "mask", "mask_indptr"), graph_buffers(case, True), strict=True)
    )
    pages = {
        "_paged_kv_indptr_buf": buffers["indptr"],
        "_paged_kv_indices_buf": buffers["indices"],
        "_paged_kv_last_page_len_buf": buffers["last"],
    }
    masks = {"_custom_mask_buf": buffers["mask"], "_mask_indptr_buf": buffers["mask_indptr"]}
    queries = {"_qo_indptr_buf": buffers["qo_indptr"]}
    options = {"window_left": 5, "logits_soft_cap": None, "sm_scale": 0.25}
    arrays = (case.qo_indptr, case.indptr, case.indices, case.last_page_len)
    sizes = (case.heads, case.kv_heads, case.dim)
    for wrapper_class, given, plan_arguments in (
        (flashinfer.BatchDecodeWithPagedKVCacheWrapper, pages, (*arrays[1:], *sizes, case.page_size)),
        (flashinfer.BatchPrefillWithPagedKVCacheWrapper, queries | pages | masks, (*arrays, *sizes, case.page_size)),
        (
            flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
            queries | {"_kv_indptr_buf": buffers["indptr"]} | masks,
            (case.qo_indptr, case.qo_indptr, *sizes),
        ),
    ):
        plain = wrapper_class(buffer)
        assert plain._float_workspace_buffer is buffer
        with pytest.raises(RuntimeError, match="plan"):
            _ = plain._sm_scale
        for name in given:
            assert getattr(plain, name) is None
        causal = {} if "Decode" in wrapper_class.__name__ else {"causal": True}
        plain.plan(*plan_arguments, q_data_type=case.q_dtype, **options, **causal)
        read = (plain._causal, plain._window_left, plain._logits_soft_cap, plain._sm_scale)
        assert read == (True, 5, 0.0, 0.25)
        of_graphs = wrapper_class(buffer, "NHD", True, **keywords_of(wrapper_class, given))
        for name, tensor in given.items():
            assert getattr(of_graphs, name) is tensor
            with pytest.raises(AttributeError):
                setattr(of_graphs, name, tensor)


def keywords_of(wrapper_class: type, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Buffers by the names of the constructor's parameters."""
    parameters = inspect.signature(wrapper_class.__init__).parameters
    return {
        next(parameter for parameter in parameters if parameter in (name[1:], f"{name[1:]}fer")): tensor
        for name, tensor in given.items()
    }


def pretend_capture(monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
    """On the CPU, where a captured run() computes at once: for the rules of captures."""
    for module in (_graph, _paged, _terms):
        monkeypatch.setattr(module, "is_capturing", lambda device: capturing)


def test_rules_of_captures(one_rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(one_rng, torch.device("cpu"), prefill=True)
    case.qo_lens, case.kv_lens = np.array([2, 2]), np.array([1 + case.page_size, 1])
    case.batch = 2
    case.allocate()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace_buffer(case.device), case.layout, True, *graph_buffers(case)
    )

    def plan(**options: object) -> None:
        arrays = (case.qo_indptr, case.indptr, case.indices, case.last_page_len)
        dtypes = {"q_data_type": case.q_dtype, "kv_data_type": case.kv_dtype}
        wrapper.plan(*arrays, case.heads, case.kv_heads, case.dim, case.page_size, **dtypes, **options)

    def check_run(**options: object) -> None:
        check(wrapper.run(case.q, case.cache, **options), case.expected(Options())[0], case.tolerance)

    plan(pos_encoding_mode="ALIBI")
    wrapper.run(case.q, case.cache)
    pretend_capture(monkeypatch, True)
    with pytest.raises(NotImplementedError, match="ALiBi and return_lse"):
        wrapper.run(case.q, case.cache, return_lse=True)
    plan()
    with pytest.raises(RuntimeError, match="before it has run"):
        wrapper.run(case.q, case.cache)
    pretend_capture(monkeypatch, False)
    check_run()
    with pytest.raises(ValueError, match="rows"):
        wrapper.run(torch.cat([case.q, case.q]), case.cache)
    pretend_capture(monkeypatch, True)
    check_run()
    with pytest.raises(RuntimeError, match="before it has run"):
        wrapper.run(case.q, case.cache, window_left=3)
    with pytest.raises(RuntimeError, match="before it has run"):
        wrapper.run(case.q, torch.cat([case.cache, case.cache]))

    pretend_capture(monkeypatch, False)
    sound = case.indices
    case.indices = sound.clone()
    case.indices[0] = case.num_pages
    with pytest.raises(ValueError, match=f"page {case.num_pages}"):
        plan()
    case.indices, case.qo_indptr = sound, case.tensor(np.array([0, 1, 4]))
    with pytest.raises(NotImplementedError, match=r"several numbers of query tokens.* after the capture of a run"):
        plan()
    case.qo_indptr = case.tensor(np.array([0, 2, 4]))
    check_run()  # the plan before the errors is in force
    case.deal(0)
    plan()
    pretend_capture(monkeypatch, True)
    check_run()


def test_room_for_a_capture_is_that_of_the_last_run(
    one_rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(one_rng, torch.device("cpu"), prefill=False)
    case.batch, case.qo_lens, case.kv_lens = 1, np.array([2]), np.array([9])
    case.allocate()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace_buffer(case.device), case.layout, True, *graph_buffers(case)
    )

    def plan(rows: int) -> torch.Tensor:
        ends = case.tensor(np.array([0, rows]))
        arrays = (ends, case.indptr, case.indices, case.last_page_len)
        dtypes = {"q_data_type": case.q_dtype, "kv_data_type": case.kv_dtype}
        wrapper.plan(*arrays, case.heads, case.kv_heads, case.dim, case.page_size, **dtypes)
        return case.q[:rows]

    for rows in (2, 1):
        wrapper.run(plan(rows), case.cache)
    q = plan(2)
    pretend_capture(monkeypatch, True)
    with pytest.raises(RuntimeError, match="before it has run"):
        wrapper.run(q, case.cache)
    pretend_capture(monkeypatch, False)
    expected = wrapper.run(q, case.cache)
    pretend_capture(monkeypatch, True)
    assert torch.equal(wrapper.run(q, case.cache), expected)


def test_rules_of_captured_rotations(one_rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(one_rng, torch.device("cpu"), prefill=False)
    case.kv_lens = np.maximum(case.kv_lens, 2)
    case.allocate()
    buffers = graph_buffers(case)[1:]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace_buffer(case.device), *buffers, case.layout
    )
    options = Options(causal=True, rope=random_rope(one_rng))

    def check_run() -> None:
        check(wrapper.run(case.q, case.cache), case.expected(options)[0], case.tolerance)

    plan_decode(wrapper, case)
    pretend_capture(monkeypatch, True)
    with pytest.raises(NotImplementedError, match=r"first run.*ROPE_LLAMA.* while a CUDA graph is being captured"):
        wrapper.forward(case.q, case.cache, **position_encoding(options))
    pretend_capture(monkeypatch, False)
    plan_decode(wrapper, case, **position_encoding(options))
    pretend_capture(monkeypatch, True)
    with pytest.raises(RuntimeError, match="before it has run"):
        wrapper.run(case.q, case.cache)
    pretend_capture(monkeypatch, False)
    check_run()
    pretend_capture(monkeypatch, True)
    check_run()
    pages, _ = wrapper._plan._rotated

    pretend_capture(monkeypatch, False)
    sound = case.indices
    case.indices = sound.clone()
    case.indices[0] = case.num_pages
    with pytest.raises(ValueError, match=f"page {case.num_pages}"):
        plan_decode(wrapper, case, **position_encoding(options))
    case.indices = sound
    with pytest.raises(NotImplementedError, match="after the capture of a run"):
        plan_decode(wrapper, case, q_len_per_req=2, **position_encoding(options))
    check_run()  # the plan before the errors is in force
    addresses = [array.data_ptr() for array in (pages._pages, pages._keys, pages._queries)]
    case.deal(1)
    plan_decode(wrapper, case)  # of other options: replays are over these pages all the same
    assert wrapper._plan._rotated[0] is pages
    assert [array.data_ptr() for array in (pages._pages, pages._keys, pages._queries)] == addresses
    wrapper._plan.variant = replace(wrapper._plan.variant, rope=flashinfer._rope.Rope(*options.rope))
    pretend_capture(monkeypatch, True)
    check_run()


@pytest.mark.parametrize("lens", [[1, 3], [4097, 4097]], ids=["several", "long"])
def test_query_lengths_that_no_graph_takes(
    one_rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, lens: list[int]
) -> None:
    case = Case(one_rng, torch.device("cpu"), prefill=True)
    case.batch, case.qo_lens, case.kv_lens = 2, np.array(lens), np.array([20, 5])
    case.allocate()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace_buffer(case.device), case.layout, True, *graph_buffers(case)
    )
    arrays = (case.qo_indptr, case.indptr, case.indices, case.last_page_len)
    dtypes = {"q_data_type": case.q_dtype, "kv_data_type": case.kv_dtype}
    wrapper.plan(*arrays, case.heads, case.kv_heads, case.dim, case.page_size, **dtypes)
    pretend_capture(monkeypatch, True)
    with pytest.raises(NotImplementedError, match=r"query tokens.* while a CUDA graph is being captured"):
        wrapper.run(case.q, case.cache)
    pretend_capture(monkeypatch, False)
    check(wrapper.run(case.q, case.cache), case.expected(Options())[0], case.tolerance)


def test_capture_needs_use_cuda_graph(one_rng: np.random.Generator) -> None:
    if not has_cuda():
        pytest.skip("skipped: no CUDA device")
    case = Case(one_rng, torch.device("cuda", 0), prefill=False)
    wrapper = planned_decode(case, workspace_buffer(case.device))
    with pytest.raises(NotImplementedError, match="use_cuda_graph=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        wrapper.run(case.q, case.cache)
    check(wrapper.run(case.q, case.cache), case.expected(Options())[0], case.tolerance)


@pytest.mark.parametrize(
    "argument",
    [
        {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 30.0},
        {"q_data_type": torch.float8_e4m3fn},
        {"kv_data_type": torch.uint8},
        {"o_data_type": torch.float8_e4m3fn},
        {"window_right": 3},
        {"is_causal": True},
        {"use_token_head_sf": True},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_what_plan_does_not_cover(one_rng: np.random.Generator, argument: dict) -> None:
    case = Case(one_rng, torch.device("cpu"), prefill=False)
    wrapper = planned_decode(case, workspace_buffer(case.device))
    name, value = next(iter(argument.items()))
    named = {"ALIBI": "ALIBI.*logits_soft_cap", torch.uint8: "NVFP4"}.get(value, name)
    with pytest.raises(NotImplementedError, match="queries of" if name == "q_data_type" else named):
        plan_decode(wrapper, case, **argument)
    check(wrapper.run(case.q, case.cache), case.expected(Options())[0], case.tolerance)


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ({"backend": "trtllm-gen"}, "trtllm-gen"),
        ({"jit_args": ["name"]}, "jit_args"),
    ],
)
def test_what_wrappers_do_not_cover(argument: dict, named: str) -> None:
    for wrapper in (
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
    ):
        with pytest.raises(NotImplementedError, match=named):
            wrapper(workspace_buffer(torch.device("cpu")), **argument)
        with pytest.raises(KeyError, match="kv_layout"):
            wrapper(workspace_buffer(torch.device("cpu")), "NDH")


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"rope_scale": 0.0}, ValueError, "rope_scale is 0.0"),
        ({"rope_theta": math.nan}, ValueError, "rope_theta is nan"),
        ({"pos_encoding_mode": "NONE", "rope_scale": 0.0}, None, ""),
        ({"kv_dtype": torch.float16}, ValueError, r"k_cache.*torch.float16, expected.* torch.float32"),
        ({"pages": 1}, ValueError, "paged_kv_cache has 1 pages"),
        ({"rows": 1}, ValueError, "q has 1 rows"),
    ],
)
def test_bad_arguments_of_rotations(
    one_rng: np.random.Generator, device: torch.device, arguments: dict, error: type | None, named: str
) -> None:
    case = Case(one_rng, device, prefill=False)
    case.q_dtype = case.kv_dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    case.kv_lens, case.qo_lens, case.batch = np.array([40, 2]), np.array([1, 1]), 2
    case.allocate()
    plan_arguments = {"pos_encoding_mode": "ROPE_LLAMA"} | arguments
    cache = case.cache[: plan_arguments.pop("pages", None)].to(plan_arguments.pop("kv_dtype", case.kv_dtype))
    q = case.q[: plan_arguments.pop("rows", None)]
    if error is None:
        found = planned_decode(case, workspace_buffer(device), **plan_arguments).run(q, cache)
        check(found, case.expected(Options())[0], case.tolerance)
        return
    with pytest.raises(error, match=named.replace("torch.float32", str(case.q_dtype))):
        planned_decode(case, workspace_buffer(device), **plan_arguments).run(q, cache)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prefix_len_ptr": None}, "prefix_len_ptr is None"),
        ({"max_item_len_ptr": None}, "max_item_len_ptr is None"),
        ({"prefix_len_ptr": torch.tensor([1])}, "prefix_len_ptr has 1 elements"),
        ({"prefix_len_ptr": torch.tensor([1, -1])}, "prefix_len_ptr has -1"),
        ({"token_pos_in_items_ptr": torch.zeros(7, dtype=torch.int32)}, "token_pos_in_items_ptr has 7 elements"),
        ({"token_pos_in_items_len": 3}, "token_pos_in_items_len is 3"),
        ({"max_item_len_ptr": torch.tensor([2, 1])}, r"max_item_len_ptr\[1\] is 1"),
        ({"custom_mask": torch.ones(14, dtype=torch.bool)}, "custom mask"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_arguments_of_multi_item_scoring(change: dict, named: str) -> None:
    qo_indptr, kv_indptr = torch.tensor([0, 2, 4]), torch.tensor([0, 4, 10])
    items = {
        "prefix_len_ptr": torch.tensor([1, 2]),
        "token_pos_in_items_ptr": torch.tensor([0, 1, 2, 0, 0, 1, 2, 0, 0, 0]),
        "token_pos_in_items_len": 4,
        "max_item_len_ptr": torch.tensor([2, 2]),
    }
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace_buffer(torch.device("cpu")))
    wrapper.plan(qo_indptr, kv_indptr, 2, 1, 8, **items)
    with pytest.raises(ValueError, match=named):
        wrapper.plan(qo_indptr, kv_indptr, 2, 1, 8, **(items | change))


def test_rotations_in_a_cascade() -> None:
    one = torch.tensor([0, 1])
    arrays = [[one], [one], [torch.tensor([0])], [torch.tensor([1])]]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(1, workspace_buffer(torch.device("cpu")))
    with pytest.raises(NotImplementedError, match="ROPE_LLAMA"):
        wrapper.plan(*arrays, 2, 1, 8, 1, pos_encoding_mode="ROPE_LLAMA")


def test_bad_arguments_leave_the_wrapper_usable(one_rng: np.random.Generator, device: torch.device) -> None:
    case = Case(one_rng, device, prefill=False)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace_buffer(device), case.layout)
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(case.q, case.cache)
    plan_decode(wrapper, case)
    sound = case.last_page_len
    case.last_page_len = sound + case.page_size
    if case.kv_lens.any():
        with pytest.raises(ValueError, match="last_page_len"):
            plan_decode(wrapper, case)
    case.last_page_len = sound
    with pytest.raises(KeyError, match="pos_encoding_mode"):
        plan_decode(wrapper, case, pos_encoding_mode="ROPE")
    with pytest.raises(ValueError, match="sm_scale"):
        plan_decode(wrapper, case, sm_scale=0.0)
    with pytest.raises(ValueError, match="seq_lens"):
        plan_decode(wrapper, case, seq_lens=case.tensor(case.kv_lens + 1))
    other = torch.bfloat16 if case.q_dtype == torch.float16 else torch.float16
    with pytest.raises(ValueError, match="q is"):
        wrapper.run(case.q.to(other), case.cache)
    with pytest.raises(ValueError, match="rows"):
        wrapper.run(torch.cat([case.q, case.q]), case.cache)
    with pytest.raises(ValueError, match="out"):
        wrapper.run(case.q, case.cache, out=case.q.new_empty(1, 2, 3))
    with pytest.raises(ValueError, match="lse"):
        wrapper.run(case.q, case.cache, lse=case.q.new_empty(1), return_lse=True)
    with pytest.raises(NotImplementedError, match="kv_cache_sf"):
        wrapper.run(case.q, case.cache, kv_cache_sf=case.cache)
    check(wrapper.run(case.q, case.cache), case.expected(Options())[0], case.tolerance)
