"""Custom masks and ALiBi slopes as the calls take them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fiw import _fiw
from fiw._tensors import Indices, Tensor, index_view, optional_view, to_host, view


class PackedMask(NamedTuple):
    """Booleans as bits, on the device of the call: bit `p * kv_len + j` of request r, 1 for visible, is
    `bits[indptr[r] + bit // 8] >> (bit % 8) & 1`, for query p and key j."""

    bits: Any
    """uint8 [bytes]."""
    indptr: Any
    """int32 [batch + 1], byte offsets."""


def pack_mask(booleans: Tensor, qo_lens: Indices, kv_lens: Indices) -> PackedMask:
    """Packs one boolean a (query, key), request after request, into bits; NumPy arrays on the CPU.

    Args:
        booleans: bool or uint8 (nonzero: visible) [sum of qo_lens[r] * kv_lens[r]], or of any shape in that order.
        qo_lens: [batch], queries of each request.
        kv_lens: [batch], keys of each request.
    """
    flat = np.ascontiguousarray(to_host("booleans", booleans)).reshape(-1)
    queries = index_view("qo_lens", qo_lens)
    keys = index_view("kv_lens", kv_lens)
    mask = PackedMask(
        np.empty(_fiw.packed_mask_bytes(queries, keys), np.uint8), np.empty(queries.shape[0] + 1, np.int32)
    )
    _fiw.pack_mask(view("booleans", flat), queries, keys, view("mask", mask.bits), view("mask_indptr", mask.indptr))
    return mask


def alibi_slopes(num_qo_heads: int) -> np.ndarray:
    """The usual ALiBi slopes, float32 [num_qo_heads]."""
    slopes = np.empty(num_qo_heads, np.float32)
    _fiw.alibi_slopes(view("slopes", slopes))
    return slopes


def native_extras(
    sinks: Tensor | None, alibi_slopes: Tensor | None, mask: PackedMask | None, stream: int
) -> _fiw.Extras | None:
    """The inputs that may differ from layer to layer, imported; None where there is none."""
    if sinks is None and alibi_slopes is None and mask is None:
        return None
    bits, indptr = (None, None) if mask is None else mask
    return _fiw.Extras(
        optional_view("sinks", sinks, stream=stream),
        optional_view("alibi_slopes", alibi_slopes, stream=stream),
        optional_view("custom_mask.bits", bits, stream=stream),
        optional_view("custom_mask.indptr", indptr, stream=stream),
    )
