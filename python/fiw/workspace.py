"""The workspace: scratch memory, plans, plan caches and attention calls of one device or tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, get_args

import numpy as np

from fiw import _fiw
from fiw._tensors import (
    Indices,
    Tensor,
    device_index,
    empty_like,
    from_host_like,
    index_view,
    optional_view,
    stream_handle,
    view,
)
from fiw.allocator import Allocator
from fiw.errors import InvalidArgumentError
from fiw.kv_cache import KvCache
from fiw.masks import PackedMask, native_extras, pack_mask
from fiw.page_table import DevicePageTable, PageTable
from fiw.values import CacheStats, DeviceProps, PlanInfo, StepSpec, WorkspaceLimits, WorkspaceStats

CudaRoute = Literal["table", "core", "tile", "hopper", "hopper_paged", "any", "stream", "prefill"]
"""Which CUDA kernels serve a call, in the order of `fiw_cuda_route`."""

_REASON_PARTIAL_STATES = 309
_REASON_OPTIONS = 403

_Lens = Callable[[], tuple[Any, Any]]
"""(qo_lens, kv_lens) of a call, for packing a mask of booleans."""


def _extras(
    q: Tensor, sinks: Tensor | None, alibi_slopes: Tensor | None, custom_mask: Any, lens: _Lens, stream: int
) -> _fiw.Extras | None:
    if custom_mask is not None and not isinstance(custom_mask, PackedMask):
        packed = pack_mask(custom_mask, *lens())
        custom_mask = PackedMask(*(from_host_like(q, array, stream) for array in packed))
    return native_extras(sinks, alibi_slopes, custom_mask, stream)


def _attend(
    run: Callable[[_fiw.Tensor, _fiw.Tensor, _fiw.Tensor | None, _fiw.Extras | None, int], None],
    q: Tensor,
    head_dim_vo: int,
    lens: _Lens,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    custom_mask: Any,
    out: Any,
    lse: Any,
    return_lse: bool,
    stream: Any,
) -> Any:
    """Calls `run(q, out, lse, extras, stream)` with everything imported and allocated, and returns what it wrote."""
    native = stream_handle(stream, q)
    queries = view("q", q, stream=native)
    want_lse = return_lse or lse is not None
    if out is None:
        out = empty_like(q, (*queries.shape[:-1], head_dim_vo))
    if want_lse and lse is None:
        lse = empty_like(q, queries.shape[:-1], float32=True)
    run(
        queries,
        view("out", out, writable=True, stream=native),
        view("lse", lse, writable=True, stream=native) if want_lse else None,
        _extras(q, sinks, alibi_slopes, custom_mask, lens, native),
        native,
    )
    return (out, lse) if want_lse else out


def _params(
    q: _fiw.Tensor,
    num_kv_heads: int,
    head_dim_vo: int,
    sm_scale: float | None,
    causal: bool,
    window_left: int,
    logits_soft_cap: float,
) -> _fiw.Params:
    # A q of another rank is refused by its rank, before the parameters are looked at.
    num_qo_heads, head_dim_qk = q.shape[1:] if len(q.shape) == 3 else (0, 0)
    return _fiw.Params(
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_vo,
        0.0 if sm_scale is None else sm_scale,
        bool(causal),
        window_left,
        logits_soft_cap,
    )


class AttentionStep:
    """A planned step: `run` it once a layer. Looks nothing up, and refuses tensors that differ from the plan.

    Holds its plan and page table, and keeps working after an invalidate call; after the workspace is closed, `run`
    raises ClosedError. One thread at a time, like the workspace.
    """

    def __init__(self, step: _fiw.Step, head_dim_vo: int, lens: _Lens) -> None:
        """Made by `FlashInferWorkspace.plan_decode`, `plan_prefill` and `plan_verify`."""
        self._step = step
        self._head_dim_vo = head_dim_vo
        self._lens = lens

    def run(
        self,
        q: Tensor,
        cache: KvCache,
        *,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        custom_mask: PackedMask | Tensor | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        stream: Any = None,
    ) -> Any:
        """One layer; arguments as those of the call that the step was planned for.

        Raises:
            InvalidArgumentError: a tensor differs from what was planned.
            ClosedError, BusyError: as the workspace.
        """
        return _attend(
            lambda queries, result, sums, extras, native: self._step.run(
                queries, cache._cache, result, sums, extras, native
            ),
            q,
            self._head_dim_vo,
            self._lens,
            sinks,
            alibi_slopes,
            custom_mask,
            out,
            lse,
            return_lse,
            stream,
        )

    @property
    def info(self) -> PlanInfo:
        return PlanInfo(**self._step.info())


class FlashInferWorkspace:
    """The opaque workspace / plan handle, one per CUDA device or tensor-parallel rank. Made by `create`.

    One thread at a time: a second one in a call gets BusyError and changes nothing. The GIL is released in calls. On
    the CPU results are there on return; on CUDA they are ordered by the stream, and tensors must live until it has
    passed the call (PyTorch's and CuPy's own allocators see to that on their current stream).

    Attention calls share these keyword arguments:
        sm_scale: multiplies the logits; None: 1 / sqrt(head_dim_qk).
        causal: a query sees no key after its own position. Ignored where a custom mask is given: the mask says all.
        window_left: keys that a query sees before its own position; -1: all.
        logits_soft_cap: cap * tanh(logit / cap); 0: off.
        sinks: float32 [num_qo_heads], logits that join the softmax's sum only.
        alibi_slopes: float32 [num_qo_heads].
        custom_mask: a `PackedMask` on the device of `q`; or booleans, flat, request after request, `qo_len * kv_len`
            each, which are packed on the host at every call.
        out: [rows, num_qo_heads, head_dim_vo] of q's type; None: allocated in q's framework and on its device.
        lse: float32 [rows, num_qo_heads]; takes the log-sum-exp, a natural logarithm.
        return_lse: return `(out, lse)`, allocating `lse` if it is not given. Giving `lse` implies it.
        stream: an int (`cudaStream_t`) or a stream of PyTorch or CuPy; None: the current one of q's framework where
            that is PyTorch or CuPy, else the default stream. Without effect on the CPU.
    They return `out`, or `(out, lse)`, and raise InvalidArgumentError, UnsupportedError, ClosedError, BusyError,
    WorkspaceTooSmallError or OutOfMemoryError. Nothing has changed when an argument is refused.
    """

    def __init__(self, workspace: _fiw.Workspace) -> None:
        """Use `create`."""
        self._workspace = workspace

    @staticmethod
    def create(
        device: Any = -1,
        workspace_bytes: int = 0,
        *,
        fixed_size: bool = False,
        limits: WorkspaceLimits | None = None,
        num_threads: int = 0,
        cache_entries: int = 16,
        batch_invariant: bool = False,
        fixed_split_tokens: int = 2048,
        verify_cuda_graph: bool | None = None,
        cuda_route: CudaRoute | None = None,
        allocator: Allocator | None = None,
    ) -> FlashInferWorkspace | None:
        """A workspace on a device; None where its backend is not compiled in.

        Args:
            device: -1 or "cpu"; a CUDA ordinal, "cuda" or "cuda:N"; a `torch.device`.
            workspace_bytes: a hint for the float scratch; 0: sized from `limits`, else a default that grows.
            fixed_size: never grow: what does not fit is a WorkspaceTooSmallError. Needs `workspace_bytes` or `limits`.
            limits: the largest work that will be asked for.
            num_threads: CPU only; 0: OpenMP's default.
            cache_entries: plans kept in each of the three caches, 1..1024.
            batch_invariant: cut every request's keys at multiples of `fixed_split_tokens`: its result is then the same
                bit for bit in any batch.
            verify_cuda_graph: captured verify graphs; None: as SMILE_VERIFY_CUDA_GRAPH says.
            cuda_route: which kernels serve a call, wherever they can, for tests and measurements: "table" (what is
                expected to take the least time), "core", "tile", "hopper", "hopper_paged", "any",
                "stream" or "prefill"; None: as FIW_CUDA_ROUTE in the environment says, or the table. Without effect on
                the CPU.
            allocator: where its memory comes from; None: cudaMallocAsync, or the heap.

        Raises:
            NoDeviceError, OutOfMemoryError, InvalidArgumentError
        """
        workspace = _fiw.Workspace.create(
            device_index(device),
            workspace_bytes,
            fixed_size,
            limits,
            None if limits is None else limits._params(),
            num_threads,
            cache_entries,
            batch_invariant,
            fixed_split_tokens,
            -1 if verify_cuda_graph is None else int(verify_cuda_graph),
            _route_value(cuda_route),
            _checked_allocator(allocator),
        )
        return None if workspace is None else FlashInferWorkspace(workspace)

    @staticmethod
    def required_workspace(
        device: DeviceProps,
        limits: WorkspaceLimits,
        *,
        batch_invariant: bool = False,
        fixed_split_tokens: int = 2048,
    ) -> int:
        """Float scratch bytes that suffice for any call within `limits` on such a device. Touches no device."""
        return _fiw.required_workspace(device, limits, limits._params(), batch_invariant, fixed_split_tokens)

    @property
    def handle(self) -> int:
        """The `fiw_workspace*` for calls through the C ABI, which `fiw._fiw.__file__` exports; 0 after close."""
        return self._workspace.handle()

    def close(self) -> None:
        """Frees everything once the work that uses it is done. A second call does nothing."""
        self._workspace.close()

    @property
    def closed(self) -> bool:
        return self._workspace.closed()

    def __enter__(self) -> FlashInferWorkspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        device = "cpu" if self.device_index < 0 else f"cuda:{self.device_index}"
        return f"<FlashInferWorkspace on {device}{', closed' if self.closed else ''}>"

    def invalidate_runtime_cache(self) -> None:
        """Drops decode and prefill plans; the verify plan stays. Like the two below, never needed for right results,
        and without effect on a closed workspace."""
        self._workspace.invalidate_runtime_cache()

    def invalidate_prefill_runtime_cache(self) -> None:
        """Drops prefill plans, and what was gathered for them, only."""
        self._workspace.invalidate_prefill_runtime_cache()

    def invalidate_verify_runtime_cache(self) -> None:
        """Drops verify plans only."""
        self._workspace.invalidate_verify_runtime_cache()

    @property
    def device_index(self) -> int:
        """CUDA ordinal; -1: the CPU. Also after close."""
        return self._workspace.device_index()

    @property
    def device_props(self) -> DeviceProps:
        return DeviceProps(**self._workspace.device_props())

    @property
    def verify_cuda_graph(self) -> bool:
        """Whether captured verify graphs are on."""
        return self._workspace.verify_cuda_graph()

    def stats(self) -> WorkspaceStats:
        """Counters and sizes; zeros after close. Raises BusyError while a call runs in another thread."""
        values = self._workspace.stats()
        caches: dict[str, Any] = {name: CacheStats(**values.pop(name)) for name in ("decode", "prefill", "verify")}
        return WorkspaceStats(**caches, **values)

    def read_table(
        self,
        table: DevicePageTable | tuple[Tensor, Tensor, Tensor],
        page_size: int,
        num_pages: int,
        *,
        version: int = 0,
        stream: Any = None,
    ) -> PageTable:
        """The page table that lies in three arrays on the workspace's device: to be called once a step.

        Args:
            table: indptr int32 [batch + 1], indices [indptr[batch]] or more, last_page_len [batch].
            page_size, num_pages: as `PageTable` has them.
            version: the caller's word for the contents: where these very arrays were read before with this version,
                nothing is read again. 0: no word, the arrays are copied to the host, in the order of `stream`, and
                waited for.

        Contents equal to those of a table read before share its plans. Others are validated, and the message of an
        InvalidArgumentError names request, value and limit. Once read, the arrays may change.
        """
        table = DevicePageTable(*table)
        native = stream_handle(stream, table.indptr)
        arrays = (view(f"table.{name}", getattr(table, name), stream=native) for name in table._fields)
        return PageTable._wrap(self._workspace.read_table(*arrays, page_size, num_pages, version, native))

    def plan_decode(self, table: PageTable, spec: StepSpec) -> AttentionStep:
        """Plans a step of one query token a request: validates, looks the plan up or makes it."""
        step = self._workspace.plan_decode(table._table, spec._native())
        return AttentionStep(step, spec.head_dim_vo or spec.head_dim_qk, _uniform_lens(1, table))

    def plan_prefill(self, qo_indptr: Indices, table: PageTable, spec: StepSpec) -> AttentionStep:
        """Plans a step of the last qo_len tokens of each request; see `prefill`."""
        step = self._workspace.plan_prefill(index_view("qo_indptr", qo_indptr), table._table, spec._native())
        return AttentionStep(step, spec.head_dim_vo or spec.head_dim_qk, _ragged_lens(qo_indptr, table))

    def plan_verify(self, window: int, table: PageTable, spec: StepSpec) -> AttentionStep:
        """Plans a step of the last `window` tokens (1..64) of every request; see `verify`."""
        step = self._workspace.plan_verify(window, table._table, spec._native())
        return AttentionStep(step, spec.head_dim_vo or spec.head_dim_qk, _uniform_lens(window, table))

    def decode(
        self,
        q: Tensor,
        cache: KvCache,
        table: PageTable,
        *,
        sm_scale: float | None = None,
        causal: bool = True,
        window_left: int = -1,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        custom_mask: PackedMask | Tensor | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        stream: Any = None,
    ) -> Any:
        """One query token for each request: q [batch, num_qo_heads, head_dim_qk]."""
        return _attend(
            lambda queries, result, sums, extras, native: self._workspace.decode(
                queries,
                cache._cache,
                table._table,
                _params(queries, cache.num_kv_heads, cache.head_dim_vo, sm_scale, causal, window_left, logits_soft_cap),
                result,
                sums,
                extras,
                native,
            ),
            q,
            cache.head_dim_vo,
            _uniform_lens(1, table),
            sinks,
            alibi_slopes,
            custom_mask,
            out,
            lse,
            return_lse,
            stream,
        )

    def prefill(
        self,
        q: Tensor,
        qo_indptr: Indices,
        cache: KvCache,
        table: PageTable,
        *,
        sm_scale: float | None = None,
        causal: bool = True,
        window_left: int = -1,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        custom_mask: PackedMask | Tensor | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        stream: Any = None,
    ) -> Any:
        """The last tokens of each request, whose keys the cache holds already (`append_kv`).

        Request r's queries are rows qo_indptr[r] .. qo_indptr[r+1) of q [qo_indptr[batch], num_qo_heads, head_dim_qk];
        none is legal.
        """
        rows = index_view("qo_indptr", qo_indptr)
        return _attend(
            lambda queries, result, sums, extras, native: self._workspace.prefill(
                queries,
                rows,
                cache._cache,
                table._table,
                _params(queries, cache.num_kv_heads, cache.head_dim_vo, sm_scale, causal, window_left, logits_soft_cap),
                result,
                sums,
                extras,
                native,
            ),
            q,
            cache.head_dim_vo,
            _ragged_lens(qo_indptr, table),
            sinks,
            alibi_slopes,
            custom_mask,
            out,
            lse,
            return_lse,
            stream,
        )

    def verify(
        self,
        q: Tensor,
        window: int,
        cache: KvCache,
        table: PageTable,
        *,
        sm_scale: float | None = None,
        causal: bool = True,
        window_left: int = -1,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        custom_mask: PackedMask | Tensor | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        stream: Any = None,
    ) -> Any:
        """The last `window` tokens (1..64) of every request, as speculative decoding checks them.

        Request r's queries are rows r * window .. of q [batch * window, num_qo_heads, head_dim_qk]. With a custom mask:
        a tree of drafts.
        """
        return _attend(
            lambda queries, result, sums, extras, native: self._workspace.verify(
                queries,
                window,
                cache._cache,
                table._table,
                _params(queries, cache.num_kv_heads, cache.head_dim_vo, sm_scale, causal, window_left, logits_soft_cap),
                result,
                sums,
                extras,
                native,
            ),
            q,
            cache.head_dim_vo,
            _uniform_lens(window, table),
            sinks,
            alibi_slopes,
            custom_mask,
            out,
            lse,
            return_lse,
            stream,
        )

    def ragged_prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qo_indptr: Indices,
        kv_indptr: Indices,
        *,
        sm_scale: float | None = None,
        causal: bool = True,
        window_left: int = -1,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        custom_mask: PackedMask | Tensor | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        stream: Any = None,
    ) -> Any:
        """Attention with no cache: k [total_kv, num_kv_heads, head_dim_qk], v [total_kv, num_kv_heads, head_dim_vo].

        `kv_indptr` [batch + 1] cuts the rows of k and v into requests as `qo_indptr` cuts those of q.
        """
        native_stream = stream_handle(stream, q)
        keys = view("k", k, stream=native_stream)
        values = view("v", v, stream=native_stream)
        rows = index_view("qo_indptr", qo_indptr)
        tokens = index_view("kv_indptr", kv_indptr)
        # Tensors of another rank are refused by their rank, before the parameters are looked at.
        num_kv_heads = keys.shape[1] if len(keys.shape) == 3 else 0
        head_dim_vo = values.shape[-1] if values.shape else 0
        return _attend(
            lambda queries, result, sums, extras, native: self._workspace.ragged_prefill(
                queries,
                rows,
                keys,
                values,
                tokens,
                _params(queries, num_kv_heads, head_dim_vo, sm_scale, causal, window_left, logits_soft_cap),
                result,
                sums,
                extras,
                native,
            ),
            q,
            head_dim_vo,
            lambda: (_lens(qo_indptr), _lens(kv_indptr)),
            sinks,
            alibi_slopes,
            custom_mask,
            out,
            lse,
            return_lse,
            native_stream,
        )

    def append_kv(
        self,
        k: Tensor,
        v: Tensor,
        append_indptr: Indices,
        cache: KvCache,
        table: PageTable,
        *,
        stream: Any = None,
    ) -> None:
        """Writes new tokens into the cache: rows append_indptr[r] .. append_indptr[r+1) of k [rows, num_kv_heads,
        head_dim_qk] and v [rows, num_kv_heads, head_dim_vo] become the last tokens of request r, which `table` counts
        already.

        Converts to the cache's type, dividing by its scales, and saturates (fp8, float16). A page that two requests
        share must not be appended to through both.
        """
        native = stream_handle(stream, k)
        self._workspace.append_kv(
            view("k", k, stream=native),
            view("v", v, stream=native),
            index_view("append_indptr", append_indptr),
            cache._writable(),
            table._table,
            native,
        )

    def merge_states(
        self,
        parts: Sequence[tuple[Tensor, Tensor]],
        *,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        stream: Any = None,
    ) -> Any:
        """Combines attention over disjoint sets of keys into attention over their union.

        `parts` are `(out, lse)` pairs (at least one) of equal shapes and types: out [rows, num_qo_heads, head_dim_vo],
        lse float32 [rows, num_qo_heads], natural logarithm; -inf carries no weight. `out` and `lse` may be those of a
        part.
        """
        if not parts:
            raise InvalidArgumentError("parts is empty, expected at least one (out, lse)", _REASON_PARTIAL_STATES)
        native = stream_handle(stream, parts[0][0])
        outs = [view(f"parts[{i}] out", part[0], stream=native) for i, part in enumerate(parts)]
        sums = [view(f"parts[{i}] lse", part[1], stream=native) for i, part in enumerate(parts)]
        want_lse = return_lse or lse is not None
        if out is None:
            out = empty_like(parts[0][0], outs[0].shape)
        if want_lse and lse is None:
            lse = empty_like(parts[0][0], outs[0].shape[:-1], float32=True)
        self._workspace.merge_states(
            outs,
            sums,
            view("out", out, writable=True, stream=native),
            optional_view("lse", lse, writable=True, stream=native),
            native,
        )
        return (out, lse) if want_lse else out


def _checked_allocator(allocator: Allocator | None) -> Allocator | None:
    for name in ("allocate", "free"):
        if allocator is not None and not callable(getattr(allocator, name, None)):
            raise InvalidArgumentError(f"allocator is {allocator!r}, expected an object with {name}()", _REASON_OPTIONS)
    return allocator


def _route_value(route: str | None) -> int:
    if route is None:
        return -1
    names = get_args(CudaRoute)
    if route not in names:
        raise InvalidArgumentError(f"cuda_route is {route!r}, expected None or one of {names}", _REASON_OPTIONS)
    return names.index(route)


def _lens(indptr: Indices) -> np.ndarray:
    return np.diff(np.asarray(indptr, np.int32))


def _uniform_lens(queries: int, table: PageTable) -> _Lens:
    return lambda: (np.full(table.batch, queries, np.int32), table.kv_lens)


def _ragged_lens(qo_indptr: Indices, table: PageTable) -> _Lens:
    return lambda: (_lens(qo_indptr), table.kv_lens)


def compiled_with(kind: str) -> bool:
    """Whether this build has a backend for "cpu" or "cuda"."""
    return kind == "cpu" or (kind == "cuda" and _fiw.compiled_with_cuda())
