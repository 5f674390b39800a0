"""A view of one layer's paged K and V."""

from __future__ import annotations

from typing import Any, Literal

from fiw import _fiw
from fiw._tensors import Tensor, dtype_name, stream_handle, view
from fiw.errors import InvalidArgumentError

Layout = Literal["NHD", "HND"]

_REASON_TENSOR_RANK = 201
_REASON_OPTIONS = 403


class KvCache:
    """One layer's paged K and V: a view, which keeps its tensors alive.

    Slots past a request's length may hold anything, NaN too. Attention reads through any strides of at least head_dim;
    `append_kv` writes, and refuses a cache in which two slots share memory, or one that is read-only.

    On CUDA the tensors are taken once, here, on the current stream of PyTorch or CuPy where they are theirs: who makes
    calls on another one, or writes them on another one later, orders the two.
    """

    _cache: _fiw.KvCache

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        layout: Layout = "NHD",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        k_head_scale: Tensor | None = None,
        v_head_scale: Tensor | None = None,
        *,
        dtype: Any = None,
    ) -> None:
        """K and V apart.

        Args:
            k: [num_pages, page_size, num_kv_heads, head_dim_qk] (NHD) or [num_pages, num_kv_heads, page_size,
                head_dim_qk] (HND); float32, float16, bfloat16, float8_e4m3fn or float8_e5m2; the last axis contiguous.
            v: as `k`, with head_dim_vo.
            layout: "NHD" or "HND".
            k_scale, v_scale: fp8 caches store value / scale, and attention multiplies the scale back.
            k_head_scale, v_head_scale: float32 [num_kv_heads] on the cache's device; multiply the above.
            dtype: what uint8 tensors hold: "float8_e4m3fn" or "float8_e5m2", or a framework's object for them.
        """
        element = "" if dtype is None else dtype_name(dtype)
        self._init(
            (_take("kv.k", k, element), _take("kv.v", v, element)),
            layout,
            (k_scale, v_scale),
            (k_head_scale, v_head_scale),
        )

    @classmethod
    def interleaved(
        cls,
        kv: Tensor,
        layout: Layout = "NHD",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        k_head_scale: Tensor | None = None,
        v_head_scale: Tensor | None = None,
        *,
        dtype: Any = None,
    ) -> KvCache:
        """K and V in one tensor [num_pages, 2, page_size, num_kv_heads, head_dim] (NHD; HND alike)."""
        element = "" if dtype is None else dtype_name(dtype)
        result = cls.__new__(cls)
        result._init((_take("kv.kv", kv, element),), layout, (k_scale, v_scale), (k_head_scale, v_head_scale))
        return result

    def _init(
        self,
        tensors: tuple[_fiw.Tensor, ...],
        layout: str,
        scales: tuple[float, float],
        head_scales: tuple[Tensor | None, Tensor | None],
    ) -> None:
        if layout not in ("NHD", "HND"):
            raise InvalidArgumentError(f"kv.layout is {layout!r}, expected 'NHD' or 'HND'", _REASON_OPTIONS)
        apart = len(tensors) == 2
        rank = 4 if apart else 5
        for name, tensor in zip(("kv.k", "kv.v") if apart else ("kv.kv",), tensors, strict=True):
            if len(tensor.shape) != rank:
                raise InvalidArgumentError(f"{name}: rank {len(tensor.shape)}, expected {rank}", _REASON_TENSOR_RANK)
        self._cache = _fiw.KvCache(
            tensors[0] if apart else None,
            tensors[1] if apart else None,
            None if apart else tensors[0],
            *(
                None if scale is None else _take(f"kv.{side}_head_scale", scale)
                for side, scale in zip("kv", head_scales, strict=True)
            ),
            *scales,
            layout == "HND",
        )
        self._read_only = any(tensor.read_only for tensor in tensors)
        self.layout: str = layout
        """"NHD" or "HND"."""
        self.dtype: str = tensors[0].dtype
        self.device_index: int = tensors[0].device_index
        """CUDA ordinal; -1: the CPU."""
        self.num_pages: int = tensors[0].shape[0]
        first, second, self.head_dim_qk = tensors[0].shape[-3:]
        self.page_size: int = second if layout == "HND" else first
        """Tokens a page."""
        self.num_kv_heads: int = first if layout == "HND" else second
        self.head_dim_vo: int = tensors[-1].shape[-1]

    def _writable(self) -> _fiw.KvCache:
        if self._read_only:
            raise InvalidArgumentError("kv is read-only, expected writable tensors", _REASON_OPTIONS)
        return self._cache

    def __repr__(self) -> str:
        return (
            f"KvCache({self.layout}, {self.dtype}, num_pages={self.num_pages}, page_size={self.page_size}, "
            f"num_kv_heads={self.num_kv_heads}, head_dim_qk={self.head_dim_qk}, head_dim_vo={self.head_dim_vo})"
        )


def _take(name: str, tensor: Any, dtype: str = "") -> _fiw.Tensor:
    """Ordered after the work before it on its framework's current stream, which may be under capture."""
    return view(name, tensor, dtype=dtype, stream=stream_handle(None, tensor))
