"""Packing of booleans into bits, as custom masks are passed."""

from __future__ import annotations

import torch


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Packs `x` [n], nonzero for true, into uint8 [ceil(n / 8)]; the last byte is padded with zeros."""
    if bitorder not in ("big", "little"):
        raise ValueError(f"bitorder is {bitorder!r}, expected 'big' or 'little'")
    x = x.to(torch.bool)
    bits = torch.nn.functional.pad(x, (0, -x.numel() % 8)).view(-1, 8)
    exponents = torch.arange(8, dtype=torch.uint8, device=x.device)
    weights = torch.ones_like(exponents) << (exponents.flip(0) if bitorder == "big" else exponents)
    return (bits * weights).sum(dim=1, dtype=torch.uint8)


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """Packs each segment `x[indptr[i] : indptr[i + 1]]` from a byte of its own on.

    Returns the bytes and, int32 [len(indptr)], where each segment's begin.
    """
    lengths = indptr.diff()
    byte_indptr = torch.zeros_like(indptr)
    byte_indptr[1:] = ((lengths + 7) // 8).cumsum(0)
    segments = torch.repeat_interleave(torch.arange(len(lengths), device=indptr.device), lengths)
    shifts = 8 * byte_indptr[:-1] - indptr[:-1] + indptr[0]
    places = torch.arange(len(segments), device=indptr.device) + shifts[segments]
    padded = torch.zeros(8 * int(byte_indptr[-1]), dtype=torch.bool, device=x.device)
    padded[places.to(x.device)] = x[int(indptr[0]) : int(indptr[-1])].to(torch.bool)
    return packbits(padded, bitorder), byte_indptr.to(torch.int32)
