"""What wrappers with use_cuda_graph=True have more than others: the caller's buffers, and what captured runs read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import fiw
from fiw.compat.flashinfer._rope import RotatedPages
from fiw.compat.flashinfer._terms import current_stream, is_capturing, not_covered

MAX_WINDOW = 4096


class FixedBuffers:
    """Filled by each plan(), as FlashInfer fills them; their sizes fix the batch size and other capacities.

    Optional ones may be None until plan() has something for them.
    """

    def __init__(self, required: dict[str, torch.Tensor | None], optional: dict[str, torch.Tensor | None]) -> None:
        for name, buffer in required.items():
            if not isinstance(buffer, torch.Tensor):
                raise ValueError(f"{name} is {buffer}, expected a tensor with use_cuda_graph=True")
        self._buffers = {name: buffer for name, buffer in (required | optional).items() if buffer is not None}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._buffers[name]

    def get(self, name: str) -> torch.Tensor | None:
        return self._buffers.get(name)

    def check_length(self, name: str, other: str, more: int) -> None:
        """`name` has `more` elements than `other`."""
        length, expected = len(self._buffers[name]), len(self._buffers[other]) + more
        if length != expected:
            raise ValueError(f"{name} has {length} elements, expected {expected}, by the length of {other}")

    def check(self, exact: dict[str, torch.Tensor], at_most: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values for the buffers of their names, for fill(); `exact` ones fill them, the others may leave a rest."""
        values = exact | at_most
        for name, value in values.items():
            if name not in self._buffers:
                raise ValueError(f"{name} is None, expected a tensor, as this plan with use_cuda_graph=True needs it")
            length = len(self._buffers[name])
            if len(value) > length or (name in exact and len(value) != length):
                expected = length if name in exact else f"at most {length}"
                raise ValueError(f"{len(value)} elements for {name}, expected {expected}, the size of the buffer")
        return values

    def fill(self, values: dict[str, torch.Tensor], non_blocking: bool) -> None:
        for name, value in values.items():
            self._buffers[name][: len(value)].copy_(value, non_blocking=non_blocking)


@dataclass(frozen=True)
class PlanShape:
    """What a plan must have in common with a captured one to take its place."""

    workspace: fiw.FlashInferWorkspace
    page_size: int
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    dtypes: tuple[torch.dtype, torch.dtype]
    window: int
    """The query tokens of every request; 0: their numbers differ."""
    masked: bool

    def __str__(self) -> str:
        rows = f"{self.window} query tokens a request" if self.window else "several numbers of query tokens"
        mask = "with a custom mask" if self.masked else "without a custom mask"
        types = " and ".join(str(dtype) for dtype in self.dtypes)
        return f"{rows}, pages of {self.page_size}, heads {self.heads} of {self.head_dims}, {types}, {mask}"


class GraphRuns:
    """The plans that captured runs of a wrapper read, and that each plan() rewrites in place.

    A capture allows no allocation: a run() before it, with the same options, makes room for the plan. Until a
    capture there is room for one shape, that of the last run(): it takes memory by the rows of queries.
    """

    def __init__(self, batch: int, max_pages: int) -> None:
        self._batch, self._max_pages = batch, max_pages
        self._sessions: dict[tuple[PlanShape, fiw.StepSpec, int], fiw.GraphSession] = {}
        self._captured: PlanShape | None = None
        self.copies: tuple[RotatedPages, GraphRuns] | None = None
        """See over_copies(); None: it has not been asked."""

    def over_copies(self, device: torch.device) -> tuple[RotatedPages, GraphRuns]:
        """The copies that captured runs of rotations make, and what these read of their plans."""
        if self.copies is None:
            self.copies = RotatedPages(device, self._max_pages), GraphRuns(self._batch, self._max_pages)
        return self.copies

    def prepare(self, shape: PlanShape, table: fiw.PageTable, device: torch.device) -> bool:
        """Rewrites the plans of this shape; returns whether there are any."""
        if self._captured not in (None, shape):
            raise not_covered(f"plan() for {shape}, after the capture of a run() for {self._captured}")
        if self.copies is not None:
            self.copies[0].check(table)
        # Caches of fewest pages first: they alone can refuse the table.
        own = sorted((pages, i) for i, (other, _, pages) in enumerate(self._sessions) if other == shape)
        sessions = list(self._sessions.values())
        for _, i in own:
            sessions[i].prepare(table, current_stream(device))
        return bool(own)

    def session(
        self, shape: PlanShape, spec: fiw.StepSpec, num_pages: int, table: fiw.PageTable, device: torch.device
    ) -> fiw.GraphSession | None:
        """The session of a run() over a cache of that many pages; None where none can serve it."""
        if self._batch == 0 or not 1 <= shape.window <= MAX_WINDOW:
            return None
        key = (shape, spec, num_pages)
        if key not in self._sessions:
            if is_capturing(device):
                raise RuntimeError(
                    "run() is captured in a CUDA graph before it has run, expected a run() with the same options and "
                    "as large a cache before the capture"
                )
            self._sessions = {other: session for other, session in self._sessions.items() if other[0] == shape}
            session = _make(shape, spec, self._batch, self._max_pages, num_pages)
            session.prepare(table, current_stream(device))
            self._sessions[key] = session
        if is_capturing(device):
            self._captured = shape
        return self._sessions[key]


def _make(shape: PlanShape, spec: fiw.StepSpec, batch: int, max_pages: int, num_pages: int) -> fiw.GraphSession:
    limits: dict[str, Any] = {
        "max_batch": batch,
        "max_pages": max(1, max_pages),
        "page_size": shape.page_size,
        "num_pages": num_pages,
        "buckets": [batch],
    }
    if shape.window == 1 and not shape.masked:
        return fiw.GraphSession.decode(shape.workspace, [spec], **limits)
    return fiw.GraphSession.verify(shape.workspace, shape.window, [spec], **limits)
