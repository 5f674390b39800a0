"""The attention calls that are compared, in the order in which a run with a time limit takes them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["decode", "verify", "prefill"]
KvDtype = Literal["bf16", "fp8"]

HEADS = ((32, 8), (64, 8), (8, 1), (28, 4), (32, 32))
BATCHES = (1, 8, 64, 256)
KV_LENS = (512, 2048, 8192, 32768, 131072)
PAGE_SIZES = (1, 16, 64)
_LARGE_BYTES = 16e9
ELEMENT_BYTES = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class Shape:
    """One call: the queries are the last `qo_len` tokens of each request, in bfloat16, causal."""

    kind: Kind
    qo_heads: int
    kv_heads: int
    qo_len: int
    kv_lens: tuple[int, ...]
    head_dim: int = 128
    page_size: int = 16
    kv_dtype: KvDtype = "bf16"

    @property
    def name(self) -> str:
        lens = str(self.kv_lens[0]) if self.one_length else "trace"
        if self.kind == "verify":
            lens = f"{self.qo_len} of {lens}"
        elif self.kind == "prefill" and self.kv_lens[0] != self.qo_len:
            lens = f"{self.qo_len} on {lens}"
        parts = [self.kind, f"{self.qo_heads}/{self.kv_heads}", f"b{self.batch}", lens]
        if self.head_dim != 128:
            parts.append(f"dim {self.head_dim}")
        if self.page_size != 16:
            parts.append(f"page {self.page_size}")
        if self.kv_dtype != "bf16":
            parts.append(self.kv_dtype)
        return " ".join(parts)

    @property
    def batch(self) -> int:
        return len(self.kv_lens)

    @property
    def rows(self) -> int:
        return self.batch * self.qo_len

    @property
    def one_length(self) -> bool:
        return len(set(self.kv_lens)) == 1

    @property
    def pages(self) -> int:
        return sum(-(-kv_len // self.page_size) for kv_len in self.kv_lens)

    @property
    def cache_bytes(self) -> int:
        """Of K and V together, the unused ends of last pages included."""
        return 2 * self.pages * self.page_size * self._token_bytes

    @property
    def kv_bytes(self) -> int:
        """What of K and V a call must read."""
        return 2 * sum(self.kv_lens) * self._token_bytes

    @property
    def bytes(self) -> int:
        """The least that a call reads and writes: K, V, q and out."""
        return self.kv_bytes + 2 * self.rows * self.qo_heads * self.head_dim * ELEMENT_BYTES["bf16"]

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products, over visible keys only."""
        earlier = self.qo_len * (self.qo_len - 1) // 2
        seen = sum(kv_len * self.qo_len - earlier for kv_len in self.kv_lens)
        return 4 * seen * self.qo_heads * self.head_dim

    @property
    def _token_bytes(self) -> int:
        return self.kv_heads * self.head_dim * ELEMENT_BYTES[self.kv_dtype]


def decode(
    heads: tuple[int, int],
    batch: int,
    kv_len: int,
    *,
    page_size: int = 16,
    kv_dtype: KvDtype = "bf16",
    head_dim: int = 128,
) -> Shape:
    return Shape("decode", *heads, 1, (kv_len,) * batch, head_dim, page_size, kv_dtype)


def verify(heads: tuple[int, int], batch: int, window: int, kv_len: int, *, kv_dtype: KvDtype = "bf16") -> Shape:
    return Shape("verify", *heads, window, (kv_len,) * batch, kv_dtype=kv_dtype)


def prefill(
    heads: tuple[int, int],
    batch: int,
    qo_len: int,
    kv_len: int,
    *,
    page_size: int = 16,
    kv_dtype: KvDtype = "bf16",
    head_dim: int = 128,
) -> Shape:
    return Shape("prefill", *heads, qo_len, (kv_len,) * batch, head_dim, page_size, kv_dtype)


def trace_lengths(path: Path, batch: int) -> tuple[int, ...]:
    """Lengths of the first `batch` requests of a trace, each when half of its answer is there."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        lengths = []
        for row in rows:
            if len(lengths) == batch:
                break
            try:
                lengths.append(int(row["ContextTokens"]) + int(row["GeneratedTokens"]) // 2)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {rows.line_num}: expected integers in ContextTokens and GeneratedTokens"
                ) from error
    if len(lengths) < batch:
        raise ValueError(f"{path} holds {len(lengths)} requests, expected at least {batch}")
    return tuple(max(length, 1) for length in lengths)


def _targets(trace: Path) -> Iterator[Shape]:
    """Shapes that a target names, widest first."""
    for heads in HEADS:
        yield decode(heads, 64, 4096)
    yield decode((32, 8), 8, 4096)
    yield decode((32, 8), 1, 32768)
    for tokens in (2048, 8192):
        yield prefill((32, 8), 1, tokens, tokens)
    for batch in (8, 64):
        for window in (2, 4, 8):
            yield verify((32, 8), batch, window, 4096)
    yield decode((32, 8), 64, 4096, kv_dtype="fp8")
    yield prefill((32, 8), 1, 512, 32768)
    yield prefill((32, 8), 1, 2048, 131072)
    yield prefill((32, 8), 1, 32768, 32768)
    for heads in HEADS:
        yield decode(heads, 1, 32768)
        yield decode(heads, 8, 32768)
        yield decode(heads, 64, 4096, kv_dtype="fp8")
        yield Shape("decode", *heads, 1, trace_lengths(trace, 64))
    for page_size in PAGE_SIZES:
        yield decode((32, 8), 64, 4096, page_size=page_size)
        yield prefill((32, 8), 1, 8192, 8192, page_size=page_size)
    for head_dim in (64, 256):
        yield decode((32, 8), 64, 4096, head_dim=head_dim)
        yield prefill((32, 8), 1, 8192, 8192, head_dim=head_dim)
    for tokens in (512, 1024, 4096, 16384):
        yield prefill((32, 8), 1, tokens, tokens)
    for tokens in (1024, 2048):
        yield prefill((32, 8), 1, tokens, 32768)
    for batch, tokens in ((4, 2048), (16, 512), (8, 1024)):
        yield prefill((32, 8), batch, tokens, tokens)


def _grid(trace: Path) -> Iterator[Shape]:
    """The rest of what the library is held to, from the middle outwards."""
    for batch in BATCHES:
        for heads in HEADS:
            for kv_len in KV_LENS:
                yield decode(heads, batch, kv_len)
    for heads in ((64, 8), (8, 1), (28, 4), (32, 32)):
        for batch in (8, 64):
            yield decode(heads, batch, 4096)
            for window in (2, 4, 8):
                yield verify(heads, batch, window, 4096)
        for tokens in (2048, 8192, 32768):
            yield prefill(heads, 1, tokens, tokens)
        for tokens in (512, 1024, 2048):
            yield prefill(heads, 1, tokens, 32768)
    for heads in HEADS:
        yield Shape("decode", *heads, 1, trace_lengths(trace, 256))
    for page_size in (1, 64):
        for heads in HEADS:
            for batch, kv_len in ((1, 32768), (8, 4096), (64, 4096)):
                yield decode(heads, batch, kv_len, page_size=page_size)
        yield prefill((32, 8), 1, 512, 32768, page_size=page_size)
        yield prefill((32, 8), 16, 512, 512, page_size=page_size)
    for heads in HEADS:
        for batch, kv_len in ((1, 32768), (8, 8192), (256, 2048)):
            yield decode(heads, batch, kv_len, kv_dtype="fp8")
    for window in (2, 4, 8):
        yield verify((32, 8), 64, window, 4096, kv_dtype="fp8")
    yield prefill((32, 8), 1, 8192, 8192, kv_dtype="fp8")
    yield prefill((32, 8), 1, 512, 32768, kv_dtype="fp8")
    for head_dim in (64, 256):
        for heads in ((64, 8), (32, 32)):
            yield decode(heads, 64, 4096, head_dim=head_dim)
        for batch, kv_len in ((1, 32768), (8, 4096)):
            yield decode((32, 8), batch, kv_len, head_dim=head_dim)
        yield decode((32, 8), 64, 4096, head_dim=head_dim, kv_dtype="fp8")
        for tokens in (2048, 32768):
            yield prefill((32, 8), 1, tokens, tokens, head_dim=head_dim)
        yield prefill((32, 8), 1, 512, 32768, head_dim=head_dim)


def _quick(trace: Path) -> Iterator[Shape]:
    """One shape of each sort, each small."""
    yield decode((32, 8), 64, 4096)
    yield decode((8, 1), 8, 2048)
    yield decode((28, 4), 8, 512, page_size=1)
    yield decode((32, 32), 8, 1024, page_size=64)
    yield decode((32, 8), 64, 4096, kv_dtype="fp8")
    yield Shape("decode", 32, 8, 1, trace_lengths(trace, 64))
    for head_dim in (64, 256):
        yield decode((32, 8), 8, 2048, head_dim=head_dim)
        yield prefill((32, 8), 1, 2048, 2048, head_dim=head_dim)
    yield verify((32, 8), 64, 4, 4096)
    yield prefill((32, 8), 1, 2048, 2048)
    yield prefill((32, 8), 4, 512, 512)
    yield prefill((32, 8), 1, 512, 8192)


def shapes(trace: Path, *, quick: bool = False, part: str = "") -> list[Shape]:
    """Each shape once, those of the targets first; only those whose name holds `part`."""
    grid = sorted(_grid(trace), key=lambda shape: shape.cache_bytes > _LARGE_BYTES)  # those take longest
    listed: Iterable[Shape] = _quick(trace) if quick else [*_targets(trace), *grid]
    chosen = [shape for shape in dict.fromkeys(listed) if part in shape.name]
    if not chosen:
        raise ValueError(f"--filter is {part!r}, expected a part of the name of a shape, such as 'decode 32/8 b64'")
    return chosen
