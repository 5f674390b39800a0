"""The tensors of a shape, for paged and for contiguous K and V, and the result that a call over them must have."""

from __future__ import annotations

import functools

import torch

from cpu_comparison.shapes import PAGE_SIZE, Shape

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}

_ROTATED_BYTES = 192 << 20
"""Of K and V, over which calls rotate: more than caches hold."""

_TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}
"""Of the largest element of the right result: a rounding of weights and one of the output."""


class Refused(Exception):
    """A contestant does not serve a shape."""


class Problem:
    """Copies of K and V in pages of random order, whose contents also lie request after request."""

    def __init__(self, shape: Shape, seed: int, rotated_bytes: int = _ROTATED_BYTES) -> None:
        self.shape = shape
        self.copies = max(1, -(-rotated_bytes // shape.cache_bytes))
        generator = torch.Generator().manual_seed(seed)
        dtype = DTYPES[shape.kv_dtype]
        block = torch.randn(1 << 20, generator=generator).to(dtype).view(torch.uint8)
        page = (PAGE_SIZE, shape.kv_heads, shape.head_dim)
        elements = shape.pages * PAGE_SIZE * shape.kv_heads * shape.head_dim
        size = elements * dtype.itemsize

        def pool(number: int) -> torch.Tensor:
            # Another part of the random block first, so that no two pools are alike.
            rows = block.roll(4096 * number).repeat(-(-size // block.numel()))[:size]
            return rows.view(dtype).view(shape.pages, *page)

        self.k = [pool(2 * i) for i in range(self.copies)]
        self.v = [pool(2 * i + 1) for i in range(self.copies)]
        self.page_order = torch.randperm(shape.pages, generator=generator).view(shape.batch, -1)
        self.q = torch.randn(shape.batch, shape.qo_len, shape.qo_heads, shape.head_dim, generator=generator).to(
            DTYPES[shape.q_dtype]
        )

    def contiguous(self, pages: torch.Tensor) -> torch.Tensor:
        """[batch, KV heads, tokens, head_dim]."""
        shape = self.shape
        # Bytes, since not every operation knows fp8.
        raw = pages.view(torch.uint8).view(shape.pages, -1)[self.page_order.flatten()]
        tokens = raw.view(pages.dtype).view(shape.batch, -1, shape.kv_heads, shape.head_dim)
        return tokens[:, : shape.kv_len].transpose(1, 2).contiguous()

    @functools.cached_property
    def dense(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each copy's K and V without pages."""
        return [(self.contiguous(k), self.contiguous(v)) for k, v in zip(self.k, self.v, strict=True)]

    @functools.cached_property
    def visible(self) -> torch.Tensor:
        """bool [qo_len, kv_len]."""
        shape = self.shape
        return torch.ones(shape.qo_len, shape.kv_len, dtype=torch.bool).tril(shape.kv_len - shape.qo_len)

    @functools.cached_property
    def expected(self) -> torch.Tensor:
        """In float64, over the first copy: [batch, qo_len, heads, head_dim]."""
        shape = self.shape
        k, v = (x.double() for x in self.dense[0])
        out = torch.empty(self.q.shape, dtype=torch.float64)
        group = shape.qo_heads // shape.kv_heads
        hidden = ~self.visible
        for request in range(shape.batch):
            for head in range(shape.qo_heads):
                logits = self.q[request, :, head].double() @ k[request, head // group].T / shape.head_dim**0.5
                out[request, :, head] = logits.masked_fill_(hidden, -torch.inf).softmax(-1) @ v[request, head // group]
        return out

    def fault(self, out: torch.Tensor) -> str | None:
        """What is wrong with a result over the first copy, [batch, qo_len, heads, head_dim]."""
        error = (out.double() - self.expected).abs().max().item() / self.expected.abs().max().item()
        tolerance = _TOLERANCES[self.shape.q_dtype]
        if error <= tolerance:  # never where either is NaN
            return None
        return f"wrong: off by {error:.1e} of the largest element, expected at most {tolerance:.0e}"
