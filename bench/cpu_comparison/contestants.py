"""Ours and PyTorch's, over the same values. A contestant makes a call for a problem, or raises: the words of the
exception stand in its cell. What depends on lengths alone (plans, masks) is made outside of the timed calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

import fiw
from cpu_comparison.problem import Problem, Refused
from cpu_comparison.shapes import PAGE_SIZE, Shape

Call = Callable[[int], torch.Tensor]
"""Attends over the i-th copy of K and V; gives [batch, qo_len, heads, head_dim]."""

_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}


class Contestant(Protocol):
    name: str

    def call(self, problem: Problem) -> Call: ...


class Ours:
    """This library, over pages, with a plan that all layers of a step would share."""

    name = "fiw"

    def __init__(self, threads: int) -> None:
        self._workspace = fiw.FlashInferWorkspace.create("cpu", num_threads=threads)

    def call(self, problem: Problem) -> Call:
        shape = problem.shape
        table = fiw.PageTable.from_pages(
            PAGE_SIZE, shape.pages, problem.page_order.tolist(), kv_lens=[shape.kv_len] * shape.batch
        )
        spec = fiw.StepSpec(
            num_qo_heads=shape.qo_heads,
            num_kv_heads=shape.kv_heads,
            head_dim_qk=shape.head_dim,
            q_dtype=_NAMES[shape.q_dtype],
            kv_dtype=_NAMES[shape.kv_dtype],
        )
        if shape.kind == "decode":
            step = self._workspace.plan_decode(table, spec)
        elif shape.kind == "verify":
            step = self._workspace.plan_verify(shape.qo_len, table, spec)
        else:
            qo_indptr = [shape.qo_len * i for i in range(shape.batch + 1)]
            step = self._workspace.plan_prefill(qo_indptr, table, spec)
        caches = [fiw.KvCache(k, v) for k, v in zip(problem.k, problem.v, strict=True)]
        q = problem.q.flatten(0, 1)
        out = torch.empty_like(q)

        def call(i: int) -> torch.Tensor:
            step.run(q, caches[i % len(caches)], out=out)
            return out.view_as(problem.q)

        return call


def _refuse_fp8(shape: Shape) -> None:
    if shape.kv_dtype == "fp8":
        raise Refused("PyTorch attends over no fp8 on the CPU")


class Sdpa:
    """As people call it for grouped heads."""

    name = "sdpa"

    def call(self, problem: Problem) -> Call:
        shape = problem.shape
        _refuse_fp8(shape)
        q = problem.q.transpose(1, 2).contiguous()
        triangle = shape.qo_len == shape.kv_len
        mask = None if triangle or shape.qo_len == 1 else problem.visible

        def call(i: int) -> torch.Tensor:
            k, v = problem.dense[i % problem.copies]
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=triangle, enable_gqa=True).transpose(1, 2)

        return call


class FoldedSdpa:
    """The heads of a group as rows of one, so that each key is read once for all of them."""

    name = "sdpa folded"

    def call(self, problem: Problem) -> Call:
        shape = problem.shape
        _refuse_fp8(shape)
        if shape.kind == "prefill":
            raise Refused("groups are not folded in prefill: it would need a mask where is_causal skips half the work")
        group = shape.qo_heads // shape.kv_heads
        if group == 1:
            raise Refused("no groups to fold")
        heads = (shape.batch, shape.kv_heads, group, shape.qo_len, shape.head_dim)
        q = problem.q.transpose(1, 2).reshape(heads).flatten(2, 3).contiguous()
        mask = None if shape.qo_len == 1 else problem.visible.repeat(group, 1)

        def call(i: int) -> torch.Tensor:
            k, v = problem.dense[i % problem.copies]
            return F.scaled_dot_product_attention(q, k, v, mask).view(heads).flatten(1, 2).transpose(1, 2)

        return call
