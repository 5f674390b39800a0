"""The custom mask of a batch, from what plan() is given: booleans, bits, or where the items of its requests lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

import fiw
from fiw.compat.flashinfer._terms import host_int32
from fiw.compat.flashinfer.quantization import segment_packbits


@dataclass(frozen=True)
class MultiItem:
    """Requests of a prefix and several items to score: an item sees the prefix and itself, but no other item.

    Every item follows a token that delimits it. After the prefix, each token has its place in its item, counted from 1;
    delimiters have 0, and see nothing but the prefix.
    """

    prefix_lens: np.ndarray
    """[batch]."""
    places: np.ndarray
    """Request r's begin at r * stride."""
    stride: int
    max_item_lens: np.ndarray
    """[batch]."""

    @staticmethod
    def of(
        prefix_len_ptr: torch.Tensor | None,
        token_pos_in_items_ptr: torch.Tensor | None,
        token_pos_in_items_len: int | torch.Tensor,
        max_item_len_ptr: torch.Tensor | None,
    ) -> MultiItem | None:
        arguments = {
            "prefix_len_ptr": prefix_len_ptr,
            "token_pos_in_items_ptr": token_pos_in_items_ptr,
            "max_item_len_ptr": max_item_len_ptr,
        }
        given = {name: host_int32(name, value) for name, value in arguments.items() if value is not None}
        if not given:
            return None
        for name in arguments:
            if name not in given:
                raise ValueError(f"{name} is None, expected a tensor, as {next(iter(given))} is given")
        for name, values in given.items():
            if values.min(initial=0) < 0:
                raise ValueError(f"{name} has {values.min()}, expected no negative value")
        prefix_lens, places, max_item_lens = given.values()
        return MultiItem(prefix_lens, places, int(token_pos_in_items_len), max_item_lens)

    def visible(self, qo_lens: np.ndarray, kv_lens: np.ndarray) -> np.ndarray:
        """What a mask of these items lets through, request after request, [qo_len, kv_len] each, flat."""
        for name, values in (("prefix_len_ptr", self.prefix_lens), ("max_item_len_ptr", self.max_item_lens)):
            if len(values) != len(qo_lens):
                raise ValueError(f"{name} has {len(values)} elements, expected batch_size = {len(qo_lens)}")
        parts = [self._of_request(r, int(qo_lens[r]), int(kv_lens[r])).reshape(-1) for r in range(len(qo_lens))]
        return np.concatenate([np.empty(0, dtype=bool), *parts])

    def _of_request(self, r: int, qo_len: int, kv_len: int) -> np.ndarray:
        prefix_len, start = int(self.prefix_lens[r]), r * self.stride
        after = max(kv_len - prefix_len, 0)
        if start + after > len(self.places):
            expected = f"at least {start + after}: request {r} has {after} tokens after its prefix"
            raise ValueError(f"token_pos_in_items_ptr has {len(self.places)} elements, expected {expected}")
        if after > self.stride and len(self.prefix_lens) > 1:
            expected = f"at least {after}, the tokens of request {r} after its prefix"
            raise ValueError(f"token_pos_in_items_len is {self.stride}, expected {expected}")
        own = self.places[start : start + after]
        longest = int(own.max(initial=0))
        if longest > self.max_item_lens[r]:
            expected = f"at least {longest}, the last place in token_pos_in_items_ptr"
            raise ValueError(f"max_item_len_ptr[{r}] is {self.max_item_lens[r]}, expected {expected}")
        # A token sees as many keys back as its place says. Those of the prefix are all in one item.
        places = np.concatenate([np.arange(1, kv_len - after + 1), own])
        keys, queries = np.arange(kv_len), np.arange(max(kv_len - qo_len, 0), kv_len)[:, None]
        visible = np.zeros((qo_len, kv_len), dtype=bool)
        visible[qo_len - len(queries) :] = (keys <= queries) & (
            (keys < prefix_len) | (keys > queries - places[queries])
        )
        return visible


def packed_mask(
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    items: MultiItem | None,
    qo_lens: np.ndarray,
    kv_lens: np.ndarray,
    device: torch.device,
) -> fiw.PackedMask | None:
    """The batch's mask, each request's bits from a byte of their own on, as segment_packbits gives them."""
    if items is not None:
        if custom_mask is not None or packed_custom_mask is not None:
            raise ValueError("prefix_len_ptr and a custom mask are given, expected one of them")
        custom_mask = torch.from_numpy(items.visible(qo_lens, kv_lens))
    lengths = torch.from_numpy(qo_lens.astype(np.int64) * kv_lens)
    indptr = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    if packed_custom_mask is not None:
        byte_indptr = torch.nn.functional.pad(((lengths + 7) // 8).cumsum(0), (1, 0)).to(torch.int32)
        found, expected = packed_custom_mask.numel(), int(byte_indptr[-1])
        if found < expected:
            raise ValueError(f"packed_custom_mask has {found} bytes, expected at least {expected}")
        return fiw.PackedMask(packed_custom_mask.to(device), byte_indptr.to(device))
    if custom_mask is None:
        return None
    if custom_mask.numel() != int(indptr[-1]):
        raise ValueError(f"custom_mask has {custom_mask.numel()} elements, expected qo_len * kv_len each: {indptr[-1]}")
    bits, byte_indptr = segment_packbits(custom_mask.reshape(-1), indptr.to(custom_mask.device), bitorder="little")
    return fiw.PackedMask(bits.to(device), byte_indptr.to(device))
