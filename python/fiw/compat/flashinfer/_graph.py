"""The caller's buffers of wrappers with use_cuda_graph=True."""

from __future__ import annotations

import torch


class FixedBuffers:
    """Filled by each plan(), as FlashInfer fills them; `exact` ones fix the batch size, the others a capacity.

    Buffers that are None may stay so until plan() has something for them.
    """

    def __init__(self, required: dict[str, torch.Tensor | None], optional: dict[str, torch.Tensor | None]) -> None:
        for name, buffer in required.items():
            if not isinstance(buffer, torch.Tensor):
                raise ValueError(f"{name} is {buffer}, expected a tensor with use_cuda_graph=True")
        self._buffers = required | optional

    def check_length(self, name: str, length: int) -> None:
        if len(self._buffers[name]) != length:
            raise ValueError(f"{name} has {len(self._buffers[name])} elements, expected {length}, by the batch size")

    def fill(self, exact: dict[str, torch.Tensor], at_most: dict[str, torch.Tensor], non_blocking: bool) -> None:
        values = exact | at_most
        for name, value in values.items():
            buffer = self._buffers[name]
            if buffer is None:
                raise ValueError(f"{name} is None, expected a tensor, as this plan with use_cuda_graph=True needs it")
            if len(value) > len(buffer) or (name in exact and len(value) != len(buffer)):
                expected = len(buffer) if name in exact else f"at most {len(buffer)}"
                raise ValueError(f"{len(value)} elements for {name}, expected {expected}, the size of the buffer")
        for name, value in values.items():
            self._buffers[name][: len(value)].copy_(value, non_blocking=non_blocking)
