"""Decode and verify steps that are captured once and replayed with other page tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from fiw import _fiw
from fiw._tensors import Indices, Tensor, index_view, optional_view, stream_handle, view
from fiw.errors import InvalidArgumentError
from fiw.kv_cache import KvCache
from fiw.masks import PackedMask, native_extras
from fiw.page_table import DevicePageTable, PageTable
from fiw.values import StepSpec
from fiw.workspace import FlashInferWorkspace

_REASON_QO_INDPTR = 113
_REASON_MASK = 305

# Producers are asked for no synchronization: a capture takes addresses, and it may not wait for other streams.
_NO_SYNC = -1


@dataclass(frozen=True)
class GraphStats:
    """Counters of a graph session since it was made."""

    captures: int
    """Graphs recorded, one a bucket."""
    replays: int
    """By `step` and `replay`."""
    plans: int
    """Schedules written by the host."""
    plan_hits: int
    """Steps that found the last schedule right."""
    trips: int
    """Replays that were found to have no right plan."""
    bytes: int
    """Device memory held: schedules, table and float scratch."""


class GraphSession:
    """Attention steps, captured once a batch bucket and replayed with other page tables.

        graph = GraphSession.decode(ws, [spec], max_batch=8, max_pages=512, page_size=16, num_pages=4096)
        graph.capture(body, stream)     # body(batch) calls graph.run for each layer
        graph.step(table, stream)       # once a step

    A session owns its plan, its copy of the page table and its scratch, and each step rewrites them in place: a replay
    is right for any table within the limits. Rows of a bucket that the table does not fill give zeros and an LSE of
    minus infinity.

    On the CPU nothing is captured: `capture` calls the body once a bucket to have its calls checked, and a replay calls
    it again, when `run` and `append_kv` compute.

    One thread at a time, together with the workspace (BusyError). May outlive the workspace, whose close makes calls
    raise ClosedError. A stream of None is the default stream; on CUDA, `capture` needs another.
    """

    def __init__(self, graph: _fiw.Graph) -> None:
        """Use `decode` or `verify`."""
        self._graph = graph

    @staticmethod
    def decode(
        ws: FlashInferWorkspace,
        kinds: Sequence[StepSpec],
        *,
        max_batch: int,
        max_pages: int,
        page_size: int,
        num_pages: int,
        buckets: Indices | None = None,
        live_table: DevicePageTable | tuple[Tensor, Tensor, Tensor] | None = None,
        plan_on_device: bool = True,
    ) -> GraphSession:
        """A session for steps of one query token a request.

        Args:
            kinds: the kinds of layer, by options and types; layers of a kind share a plan.
            max_batch: requests in a step.
            max_pages: entries of a step's page table, all requests together.
            page_size: tokens a page.
            num_pages: pages of the cache: page ids are below it.
            buckets: batch sizes to capture, ascending, the last one max_batch; a step runs in the smallest that holds
                its requests. None: the powers of two below max_batch, and max_batch.
            live_table: a page table on the device, which each replay reads; `replay` alone is then the step. The
                session keeps its tensors. None: `step` brings the table.
            plan_on_device: with a live table: each replay plans on the device. Else `prepare` plans, and a replay whose
                table has other page counts than the prepared one, or that is of another bucket, does no work and
                raises StalePlanError.

        Raises:
            InvalidArgumentError, UnsupportedError, ClosedError, BusyError, OutOfMemoryError
        """
        return _create(ws, 0, kinds, max_batch, max_pages, page_size, num_pages, buckets, live_table, plan_on_device)

    @staticmethod
    def verify(
        ws: FlashInferWorkspace,
        window: int,
        kinds: Sequence[StepSpec],
        *,
        max_batch: int,
        max_pages: int,
        page_size: int,
        num_pages: int,
        buckets: Indices | None = None,
        live_table: DevicePageTable | tuple[Tensor, Tensor, Tensor] | None = None,
        plan_on_device: bool = True,
    ) -> GraphSession:
        """A session for steps of the last `window` tokens (1..4096) of each request, rows r * window and on.

        A request with fewer new tokens has its queries in its last rows. The rest is as `decode` has it.
        """
        if window == 0:
            raise InvalidArgumentError("window is 0, expected 1..4096 tokens a request", _REASON_QO_INDPTR)
        return _create(
            ws, window, kinds, max_batch, max_pages, page_size, num_pages, buckets, live_table, plan_on_device
        )

    def capture(self, body: Callable[[int], object], stream: Any = None) -> None:
        """Records `body` once for each bucket, on `stream`: it is called with the bucket, and enqueues one step of that
        batch with `run` for the attention of each layer, `append_kv`, and whatever else the step does.

        A second call replaces what was captured. An exception from `body` ends the capture and is raised again; what
        was captured before stays. The tensors of the body's calls are kept until then, or until close. Within the body
        the session's other calls are refused.
        """
        self._graph.capture(body, stream_handle(stream, None))

    def begin(self, batch: int, stream: Any = None) -> int:
        """Starts a step of the smallest bucket that holds `batch` requests, in a capture of the caller's, which
        `stream` is part of; returns the bucket.

        The tensors of the calls that follow are kept until the bucket is begun again, or until close.
        """
        return self._graph.begin(batch, stream_handle(stream, None))

    def run(
        self,
        q: Tensor,
        cache: KvCache,
        out: Any,
        *,
        lse: Any = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        custom_mask: PackedMask | None = None,
        kind: int = 0,
        stream: Any = None,
    ) -> None:
        """One layer's attention, within the body of `capture` or after `begin`.

        Args:
            q, out, lse: as the workspace's calls take them, with at least bucket * window rows (decode: bucket); the
                addresses are what is captured.
            custom_mask: its `indptr` has max_batch + 1 entries.
            kind: an index into the session's `kinds`.
            stream: None: the step's.
        """
        self._graph.run(
            view("q", q, stream=_NO_SYNC),
            cache._cache,
            view("out", out, writable=True, stream=_NO_SYNC),
            optional_view("lse", lse, writable=True, stream=_NO_SYNC),
            native_extras(sinks, alibi_slopes, _packed(custom_mask), _NO_SYNC),
            kind,
            stream_handle(stream, None),
        )

    def append_kv(self, k: Tensor, v: Tensor, cache: KvCache, *, stream: Any = None) -> None:
        """Writes the step's new tokens, `window` rows a request (decode: one) of k and v [rows, num_kv_heads,
        head_dim], to the ends of their requests; where and with how many rows as `run`.

        Rows of requests that are not there, and rows that would come before a request's first token, are passed over.
        """
        self._graph.append_kv(
            view("k", k, stream=_NO_SYNC),
            view("v", v, stream=_NO_SYNC),
            cache._writable(),
            stream_handle(stream, None),
        )

    def prepare(self, table: PageTable, stream: Any = None) -> int:
        """Rewrites plan and table for the next replay, in the order of `stream`; returns the bucket that it is for.

        Raises:
            InvalidArgumentError: the table is beyond a limit, which the message names; the last plan stays in force.
            StalePlanError: see `check`.
        """
        return self._graph.prepare(table._table, stream_handle(stream, None))

    def step(self, table: PageTable, stream: Any = None) -> None:
        """`prepare`, and the replay of what `capture` recorded. On the CPU, raises what the body raises."""
        self._graph.step(table._table, stream_handle(stream, None))

    def replay(self, batch: int, stream: Any = None) -> None:
        """The replay alone, of the bucket that holds `batch` requests. With a live table this is the whole step."""
        self._graph.replay(batch, stream_handle(stream, None))

    def check(self, stream: Any = None) -> None:
        """Waits for `stream`, and raises StalePlanError, with the first request in `index`, if a replay found no right
        plan since the last check. `step`, `prepare` and `replay` raise the same as soon as they see it."""
        self._graph.check(stream_handle(stream, None))

    @property
    def buckets(self) -> tuple[int, ...]:
        """The batch sizes that are captured, ascending."""
        return tuple(self._graph.buckets())

    def stats(self) -> GraphStats:
        """Counters and sizes; also after the workspace's close."""
        return GraphStats(**self._graph.stats())

    def close(self) -> None:
        """Frees the session's memory once its replays are done. Graphs of the caller's that recorded it must be gone.
        A second call does nothing; others then raise ClosedError."""
        self._graph.close()

    @property
    def closed(self) -> bool:
        return self._graph.closed()

    def __enter__(self) -> GraphSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _create(
    ws: FlashInferWorkspace,
    window: int,
    kinds: Sequence[StepSpec],
    max_batch: int,
    max_pages: int,
    page_size: int,
    num_pages: int,
    buckets: Indices | None,
    live_table: DevicePageTable | tuple[Tensor, Tensor, Tensor] | None,
    plan_on_device: bool,
) -> GraphSession:
    live = DevicePageTable(None, None, None) if live_table is None else DevicePageTable(*live_table)
    return GraphSession(
        _fiw.Graph.create(
            ws._workspace,
            window,
            [kind._native() for kind in kinds],
            max_batch,
            max_pages,
            page_size,
            num_pages,
            None if buckets is None else index_view("buckets", buckets),
            *(optional_view(f"live_table.{name}", getattr(live, name)) for name in live._fields),
            plan_on_device,
        )
    )


def _packed(mask: PackedMask | None) -> PackedMask | None:
    if mask is None or isinstance(mask, PackedMask):
        return mask
    raise InvalidArgumentError(f"custom_mask is a {type(mask).__name__}, expected a PackedMask", _REASON_MASK)
