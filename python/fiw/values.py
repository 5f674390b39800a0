"""Plain values: what a workspace is sized for, planned with, and reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fiw import _fiw
from fiw._tensors import dtype_name


@dataclass(frozen=True)
class CacheStats:
    """Counters of one cache of plans since creation; `entries` and `bytes` are what is held now."""

    hits: int
    misses: int
    evictions: int
    """Plans dropped to make room."""
    invalidations: int
    """Plans dropped by an invalidate call."""
    entries: int
    bytes: int
    """Schedule bytes of the live plans."""


@dataclass(frozen=True)
class WorkspaceStats:
    """Counters and sizes of a workspace; all zero after close."""

    decode: CacheStats
    prefill: CacheStats
    verify: CacheStats
    float_scratch_bytes: int
    """Capacity held."""
    float_scratch_peak: int
    """Most that one call needed."""
    int_scratch_bytes: int
    """Capacity held for schedules."""
    plan_nanoseconds: int
    """Time in lookups and planning."""
    run_nanoseconds: int
    """Host time in attention calls; on the CPU that is the work."""
    tables_known: int
    """Device page tables that were known by their version."""
    tables_copied: int
    """Device page tables that were copied to the host."""


@dataclass(frozen=True)
class DeviceProps:
    """A device as a value, so that its scratch can be sized on a machine that has none."""

    kind: str = "cpu"
    """"cpu" or "cuda"."""
    num_workers: int = 1
    """Streaming multiprocessors, or CPU threads."""
    compute_capability: int = 0
    """10 * major + minor; 0 on the CPU."""
    max_shared_bytes: int = 0
    decode_blocks_per_sm: int = 4
    tile_blocks_per_sm: int = 2

    @classmethod
    def cpu(cls, threads: int) -> DeviceProps:
        """A CPU with that many threads (at least 1)."""
        return cls(**_fiw.device_props_cpu(threads))

    @classmethod
    def h200(cls) -> DeviceProps:
        """An SXM H200."""
        return cls(**_fiw.device_props_h200())


@dataclass(frozen=True, kw_only=True)
class WorkspaceLimits:
    """The largest work a workspace will be asked for, so that its scratch is sized once."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int = 0
    """0: as head_dim_qk."""
    max_batch: int
    """Requests in one call."""
    max_kv_len: int
    """Tokens of one request."""
    max_total_qo: int = 0
    """Query rows in one prefill call; 0: no prefill."""
    max_verify_window: int = 0
    """Tokens a request in a verify call; 0: no verify."""
    page_size: int = 16
    kv_dtype: Any = "bfloat16"
    causal: bool = True
    window_left: int = -1
    logits_soft_cap: float = 0.0
    graph: bool = False
    """Decode and verify run from captured graphs, whose grids are padded."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_dtype", dtype_name(self.kv_dtype))

    def _params(self) -> _fiw.Params:
        return _fiw.Params(
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim_qk,
            self.head_dim_vo,
            0.0,
            self.causal,
            self.window_left,
            self.logits_soft_cap,
        )


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """Element types and options of a step's calls, fixed when it is planned."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int = 0
    """0: as head_dim_qk."""
    q_dtype: Any = "bfloat16"
    """Of q and out."""
    kv_dtype: Any = "bfloat16"
    sm_scale: float | None = None
    """None: 1 / sqrt(head_dim_qk)."""
    causal: bool = True
    window_left: int = -1
    logits_soft_cap: float = 0.0
    lse: bool = False
    """Runs may ask for the LSE."""
    sinks: bool = False
    """Runs pass sinks."""
    alibi: bool = False
    """Runs pass alibi_slopes."""
    custom_mask: bool = False
    """Runs pass a custom mask."""

    def _native(self) -> _fiw.StepSpec:
        params = _fiw.Params(
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim_qk,
            self.head_dim_vo,
            0.0 if self.sm_scale is None else self.sm_scale,
            self.causal,
            self.window_left,
            self.logits_soft_cap,
        )
        return _fiw.StepSpec(
            params,
            dtype_name(self.q_dtype),
            dtype_name(self.kv_dtype),
            self.lse,
            self.sinks,
            self.alibi,
            self.custom_mask,
        )


@dataclass(frozen=True)
class PlanInfo:
    """What a step was planned as."""

    batch: int
    items: int
    """Work items before the kernel's own second grid axis."""
    padded_items: int
    """Grid size under graphs; else equal to items."""
    kv_chunk_tokens: int
    """Keys an item covers; 0: all of a request's."""
    tile_rows: int
    """Packed (token, head) rows of a query tile; 0: one tile a request."""
    split_kv: bool
    cache_hit: bool
    """Found, not made, by the call that returned the step."""
    schedule_bytes: int
    scratch_bytes: int
    """Float scratch that running it takes."""
