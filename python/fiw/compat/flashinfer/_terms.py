"""FlashInfer's arguments in this library's terms: what the calls of this package have in common."""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

import fiw
from fiw.compat.flashinfer._rope import Rope
from fiw.kv_cache import Layout

PagedKv = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
DTypeLike = str | torch.dtype
Scale = float | torch.Tensor

_LN2 = math.log(2.0)
_BACKENDS = ("auto", "fa2", "fa3")

_lock = threading.Lock()
_by_buffer: WeakIdKeyDictionary = WeakIdKeyDictionary()
_by_thread = threading.local()


def not_covered(what: str) -> NotImplementedError:
    return NotImplementedError(f"fiw.compat.flashinfer does not cover {what}")


def refuse(**arguments: Any) -> None:
    """Raises for the first argument that is given, that is neither None nor False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise not_covered(name)


def checked_kv_layout(kv_layout: str) -> Layout:
    if kv_layout == "NHD":
        return "NHD"
    if kv_layout == "HND":
        return "HND"
    raise KeyError(f"kv_layout is {kv_layout!r}, expected 'NHD' or 'HND'")


def check_backend(backend: str) -> None:
    if backend not in _BACKENDS:
        raise not_covered(f"backend {backend!r}, only {', '.join(_BACKENDS)}")


# ---- workspaces ------------------------------------------------------------------------------------------------------


def workspace_of(buffer: torch.Tensor, split_tokens: int | None = None) -> fiw.FlashInferWorkspace:
    """The workspace of the wrappers that were given `buffer`.

    FlashInfer's rule for a buffer, one call at a time, is the rule for a workspace: so each buffer has its own, for as
    long as it lives. `split_tokens`: with plans that cut keys at its multiples, in a workspace apart.
    """
    with _lock:
        if buffer not in _by_buffer:
            _by_buffer[buffer] = {}
        workspaces: dict[int | None, fiw.FlashInferWorkspace] = _by_buffer[buffer]
        if split_tokens not in workspaces:
            workspaces[split_tokens] = _create(buffer.device, split_tokens)
        return workspaces[split_tokens]


def workspace_on(device: torch.device) -> fiw.FlashInferWorkspace:
    """This thread's workspace for the functions, which are given no buffer."""
    workspaces: dict[str, fiw.FlashInferWorkspace] = _by_thread.__dict__
    key = str(device)
    if key not in workspaces:
        workspaces[key] = _create(device, None)
    return workspaces[key]


def _create(device: torch.device, split_tokens: int | None) -> fiw.FlashInferWorkspace:
    if split_tokens is None:
        workspace = fiw.FlashInferWorkspace.create(device)
    else:
        workspace = fiw.FlashInferWorkspace.create(device, batch_invariant=True, fixed_split_tokens=split_tokens)
    if workspace is None:
        raise not_covered(f"device {device}: this build of fiw has no CUDA backend")
    return workspace


def split_tokens(fixed_split_size: int | None, disable_split_kv: bool, page_size: int) -> int | None:
    """FlashInfer's two controls of how keys are cut, both for the sake of results that do not depend on the batch."""
    if disable_split_kv:
        return 2**30  # longer than any request
    if fixed_split_size is None or fixed_split_size < 0:
        return None
    return fixed_split_size * page_size


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_not_capturing(device: torch.device, what: str) -> None:
    if is_capturing(device):
        raise not_covered(f"{what} while a CUDA graph is being captured")


def current_stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


# ---- tensors ---------------------------------------------------------------------------------------------------------


def torch_dtype(dtype: DTypeLike) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}, expected a torch.dtype or the name of one")
    return found


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def resolve_dtypes(
    q_data_type: DTypeLike | None, kv_data_type: DTypeLike | None, o_data_type: DTypeLike | None
) -> tuple[torch.dtype, torch.dtype]:
    """The types of q and out, and of K and V."""
    q_dtype = torch_dtype("float16" if q_data_type is None else q_data_type)
    kv_dtype = q_dtype if kv_data_type is None else torch_dtype(kv_data_type)
    if is_fp8(q_dtype):
        raise not_covered(f"queries of {q_dtype}")
    if kv_dtype == torch.uint8:
        raise not_covered("NVFP4 caches (kv_data_type torch.uint8)")
    if o_data_type is not None and torch_dtype(o_data_type) != q_dtype:
        raise not_covered(f"o_data_type {torch_dtype(o_data_type)} with queries of {q_dtype}")
    return q_dtype, kv_dtype


def host_int32(name: str, tensor: torch.Tensor) -> np.ndarray:
    """A copy of an index tensor on the host."""
    values = tensor.detach().to("cpu").numpy().reshape(-1)
    if values.dtype == np.int32:
        return values.copy()
    limits = np.iinfo(np.int32)
    if values.dtype.kind not in "iu" or (values.size and not limits.min <= values.min() <= values.max() <= limits.max):
        raise ValueError(f"{name} is {values.dtype}, expected integers of at most 32 bits")
    return values.astype(np.int32)


def unpack_paged_kv_cache(paged_kv_cache: PagedKv, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, [num_pages, page...] each; a cache of page size 1 may lack its token axis."""
    token_axis = 1 if kv_layout == "NHD" else 2
    if isinstance(paged_kv_cache, torch.Tensor):
        if paged_kv_cache.ndim not in (4, 5):
            raise ValueError(f"paged_kv_cache has {paged_kv_cache.ndim} axes, expected 5, or 4 with page size 1")
        k, v = paged_kv_cache.unbind(dim=1)
    elif isinstance(paged_kv_cache, tuple):
        k, v = paged_kv_cache
    else:
        raise KeyError(f"paged_kv_cache is a {type(paged_kv_cache).__name__}, expected a tensor or a tuple of two")
    for name, side in (("k_cache", k), ("v_cache", v)):
        if side.ndim not in (3, 4):
            raise ValueError(f"{name} has {side.ndim} axes, expected 4, or 3 with page size 1")
    k, v = (side if side.ndim == 4 else side.unsqueeze(token_axis) for side in (k, v))
    return k, v


def token_major(tensor: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """K or V without pages as [tokens, num_kv_heads, head_dim]."""
    return tensor if kv_layout == "NHD" else tensor.transpose(0, 1)


def check_planned(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """`shape`: all axes but the first."""
    if tuple(tensor.shape[1:]) != shape or tensor.dtype != dtype:
        found = f"[{', '.join(map(str, tensor.shape))}] of {tensor.dtype}"
        raise ValueError(f"{name} is {found}, expected [*, {', '.join(map(str, shape))}] of {dtype}, as planned")


def scalar(name: str, scale: Scale | None) -> float:
    if isinstance(scale, torch.Tensor) and scale.numel() != 1:
        raise not_covered(f"{name} of {scale.numel()} elements, only one")
    return 1.0 if scale is None else float(scale)


# ---- what attention computes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """The options that FlashInfer's deprecated forward() may change after plan()."""

    causal: bool
    alibi: bool
    rope: Rope | None
    window_left: int
    logits_soft_cap: float
    sm_scale: float | None

    @staticmethod
    def of(
        pos_encoding_mode: str = "NONE",
        causal: bool = True,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Variant:
        if pos_encoding_mode not in ("NONE", "ROPE_LLAMA", "ALIBI"):
            raise KeyError(f"pos_encoding_mode is {pos_encoding_mode!r}, expected 'NONE', 'ROPE_LLAMA' or 'ALIBI'")
        rope = Rope.of(rope_scale, rope_theta) if pos_encoding_mode == "ROPE_LLAMA" else None
        cap = max(0.0, logits_soft_cap or 0.0)
        alibi = pos_encoding_mode == "ALIBI"
        if alibi and cap > 0:
            raise not_covered("pos_encoding_mode 'ALIBI' with logits_soft_cap")
        if sm_scale is not None and not float(sm_scale) > 0:
            raise ValueError(f"sm_scale is {sm_scale}, expected a value above 0, or None for 1 / sqrt(head_dim)")
        scale = None if sm_scale is None else float(sm_scale)
        return Variant(bool(causal), alibi, rope, max(-1, int(window_left)), cap, scale)

    def options(self) -> dict[str, Any]:
        """As keywords of this library's calls."""
        return {
            "causal": self.causal,
            "window_left": self.window_left,
            "logits_soft_cap": self.logits_soft_cap,
            "sm_scale": self.sm_scale,
        }

    def check_sinks(self, sinks: torch.Tensor | None) -> torch.Tensor | None:
        if sinks is None:
            return None
        if self.alibi:
            raise not_covered("sinks with pos_encoding_mode 'ALIBI'")
        return sinks.detach().to(torch.float32).contiguous()


@functools.cache  # for good: captured graphs read them
def alibi_slopes(num_qo_heads: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(fiw.alibi_slopes(num_qo_heads)).to(device)


@dataclass(frozen=True)
class LseForm:
    """How a call wants its LSE."""

    base: str = "log2"
    layout: str = "NH"

    def __post_init__(self) -> None:
        if self.base not in ("log2", "ln"):
            raise ValueError(f"lse_base is {self.base!r}, expected 'log2' or 'ln'")
        if self.layout not in ("NH", "HN"):
            raise ValueError(f"lse_layout is {self.layout!r}, expected 'NH' or 'HN'")

    def buffer(self, q: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        """Where a call on q [rows, heads, dim] writes the natural logarithm."""
        shape = q.shape[:2]
        if given is not None:
            expected = tuple(shape) if self.layout == "NH" else tuple(reversed(shape))
            if tuple(given.shape) != expected or given.dtype != torch.float32 or given.device != q.device:
                found = f"{tuple(given.shape)} of {given.dtype} on {given.device}"
                raise ValueError(f"lse is {found}, expected {expected} of torch.float32 on {q.device}")
            if self.layout == "NH" and given.is_contiguous():
                return given
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    def finish(
        self, natural: torch.Tensor, given: torch.Tensor | None, alibi_shift: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Brings what was written to `buffer` into this form, in `given` where that is not None.

        `alibi_shift` [rows]: the positions that FlashInfer's ALiBi biases are ahead of ours. It counts a query's own
        position from the first query, not from the first key; that is the same to the output, but not to the LSE.
        """
        if alibi_shift is not None:
            natural += alibi_shift[:, None] * alibi_slopes(natural.shape[1], natural.device)
        if self.base == "log2":
            natural /= _LN2
        lse = natural if self.layout == "NH" else natural.t()
        if given is None:
            return lse.contiguous()
        if given is not natural:
            given.copy_(lse)
        return given


BASE_2 = LseForm()


def alibi_shift(qo_lens: np.ndarray, kv_lens: np.ndarray, device: torch.device) -> torch.Tensor:
    """See LseForm.finish."""
    return torch.from_numpy(np.repeat((kv_lens - qo_lens).astype(np.float32), qo_lens)).to(device)


def natural(lse: torch.Tensor) -> torch.Tensor:
    """FlashInfer's LSE as ours."""
    return lse.to(torch.float32) * _LN2
