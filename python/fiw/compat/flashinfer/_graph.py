"""The caller's buffers of wrappers with use_cuda_graph=True."""

from __future__ import annotations

import torch


class FixedBuffers:
    """Filled by each plan(), as FlashInfer fills them; their sizes fix the batch size and other capacities.

    Optional ones may be None until plan() has something for them.
    """

    def __init__(self, required: dict[str, torch.Tensor | None], optional: dict[str, torch.Tensor | None]) -> None:
        for name, buffer in required.items():
            if not isinstance(buffer, torch.Tensor):
                raise ValueError(f"{name} is {buffer}, expected a tensor with use_cuda_graph=True")
        self._buffers = {name: buffer for name, buffer in (required | optional).items() if buffer is not None}

    def check_length(self, name: str, other: str, more: int) -> None:
        """`name` has `more` elements than `other`."""
        length, expected = len(self._buffers[name]), len(self._buffers[other]) + more
        if length != expected:
            raise ValueError(f"{name} has {length} elements, expected {expected}, by the length of {other}")

    def fill(self, exact: dict[str, torch.Tensor], at_most: dict[str, torch.Tensor], non_blocking: bool) -> None:
        """Copies values into the buffers of their names; `exact` ones fill them, the others may leave a rest."""
        values = exact | at_most
        for name, value in values.items():
            if name not in self._buffers:
                raise ValueError(f"{name} is None, expected a tensor, as this plan with use_cuda_graph=True needs it")
            length = len(self._buffers[name])
            if len(value) > length or (name in exact and len(value) != length):
                expected = length if name in exact else f"at most {length}"
                raise ValueError(f"{len(value)} elements for {name}, expected {expected}, the size of the buffer")
        for name, value in values.items():
            self._buffers[name][: len(value)].copy_(value, non_blocking=non_blocking)
