"""Workspaces, plans, plan caches and paged attention for LLM inference engines.

    ws = fiw.FlashInferWorkspace.create("cpu")
    table = fiw.PageTable.from_pages(page_size, num_pages, pages, kv_lens)
    out = ws.decode(q, fiw.KvCache(k, v), table)

Tensors are those of any framework with DLPack; none is copied.
"""

from fiw._fiw import version as _version
from fiw.allocator import Allocator
from fiw.errors import (
    BackendError,
    BusyError,
    ClosedError,
    Error,
    FailedError,
    InternalError,
    InvalidArgumentError,
    NoDeviceError,
    OutOfMemoryError,
    StalePlanError,
    Status,
    UnavailableError,
    UnsupportedError,
    WorkspaceTooSmallError,
)
from fiw.graph import GraphSession, GraphStats
from fiw.kv_cache import KvCache
from fiw.masks import PackedMask, alibi_slopes, pack_mask
from fiw.page_table import DevicePageTable, PageTable
from fiw.values import CacheStats, DeviceProps, PlanInfo, StepSpec, WorkspaceLimits, WorkspaceStats
from fiw.workspace import AttentionStep, FlashInferWorkspace, compiled_with

__version__: str = _version()

__all__ = [
    "Allocator",
    "AttentionStep",
    "BackendError",
    "BusyError",
    "CacheStats",
    "ClosedError",
    "DevicePageTable",
    "DeviceProps",
    "Error",
    "FailedError",
    "FlashInferWorkspace",
    "GraphSession",
    "GraphStats",
    "InternalError",
    "InvalidArgumentError",
    "KvCache",
    "NoDeviceError",
    "OutOfMemoryError",
    "PackedMask",
    "PageTable",
    "PlanInfo",
    "StalePlanError",
    "Status",
    "StepSpec",
    "UnavailableError",
    "UnsupportedError",
    "WorkspaceLimits",
    "WorkspaceStats",
    "WorkspaceTooSmallError",
    "alibi_slopes",
    "compiled_with",
    "pack_mask",
]
