"""The attention calls that are compared on the CPU: those that the CPU backend's targets speak of, and their kin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["decode", "verify", "prefill"]
KvDtype = Literal["fp32", "bf16", "fp16", "fp8"]

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
PAGE_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """One causal call: the queries are the last `qo_len` of `kv_len` tokens of each request."""

    kind: Kind
    qo_heads: int
    kv_heads: int
    batch: int
    qo_len: int
    kv_len: int
    kv_dtype: KvDtype = "bf16"
    head_dim: int = 128

    @property
    def name(self) -> str:
        window = f" {self.qo_len}" if self.kind == "verify" else ""
        heads = f"{self.qo_heads}/{self.kv_heads}"
        return f"{self.kind}{window} {heads} {self.batch} x {self.kv_len} {self.kv_dtype}"

    @property
    def q_dtype(self) -> KvDtype:
        """Of queries and outputs."""
        return "bf16" if self.kv_dtype == "fp8" else self.kv_dtype

    @property
    def pages(self) -> int:
        """Of all requests, each with its own."""
        return self.batch * -(-self.kv_len // PAGE_SIZE)

    @property
    def cache_bytes(self) -> int:
        """Of K and V together, the unused ends of last pages included."""
        return 2 * self.pages * PAGE_SIZE * self.kv_heads * self.head_dim * ELEMENT_BYTES[self.kv_dtype]

    @property
    def bytes(self) -> int:
        """The least that a call reads and writes: K, V, q and out."""
        kv = 2 * self.batch * self.kv_len * self.kv_heads * ELEMENT_BYTES[self.kv_dtype]
        rows = 2 * self.batch * self.qo_len * self.qo_heads * ELEMENT_BYTES[self.q_dtype]
        return (kv + rows) * self.head_dim

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products, over visible keys only."""
        visible = self.kv_len * self.qo_len - self.qo_len * (self.qo_len - 1) // 2
        return 4 * visible * self.batch * self.qo_heads * self.head_dim


def _all() -> list[Shape]:
    listed = [
        Shape("decode", 32, 8, 8, 1, 4096),
        Shape("decode", 32, 8, 1, 1, 32768),
        Shape("decode", 64, 8, 8, 1, 4096),
        Shape("decode", 8, 1, 8, 1, 4096),
        Shape("decode", 32, 32, 4, 1, 2048),
    ]
    listed += [Shape("decode", 32, 8, 8, 1, 4096, dtype) for dtype in ("fp16", "fp32", "fp8")]
    listed += [Shape("verify", 32, 8, 8, window, 4096) for window in (2, 4, 8)]
    for dtype in ("bf16", "fp16", "fp32"):
        listed += [Shape("prefill", 32, 8, 1, 2048, 2048, dtype), Shape("prefill", 32, 8, 4, 512, 512, dtype)]
    return listed


def shapes(part: str = "") -> list[Shape]:
    """Those whose name holds `part`."""
    chosen = [shape for shape in _all() if part in shape.name]
    if not chosen:
        raise ValueError(f"--filter is {part!r}, expected a part of the name of a shape, such as 'decode 32/8'")
    return chosen
