"""A workspace's memory from PyTorch's own pool, so that both share what the device has.

from fiw.integrations.torch import CachingAllocator

ws = fiw.FlashInferWorkspace.create("cuda", allocator=CachingAllocator("cuda"))
"""

from __future__ import annotations

import contextlib

import torch

_ALIGNMENT = {"cpu": 64, "cuda": 512}  # of PyTorch's own blocks


class CachingAllocator:
    """A `fiw.Allocator` whose blocks are tensors: `torch.cuda.memory_allocated` and the like count them."""

    def __init__(self, device: torch.device | str | int) -> None:
        self._device = torch.device(device)
        self._blocks: dict[int, tuple[torch.Tensor, int]] = {}

    def allocate(self, num_bytes: int, alignment: int, stream: int) -> int:
        spare = max(0, alignment - _ALIGNMENT.get(self._device.type, 1))
        with torch.cuda.stream(self._stream(stream)) if stream else contextlib.nullcontext():
            block = torch.empty(num_bytes + spare, dtype=torch.uint8, device=self._device)
        address = -(-block.data_ptr() // alignment) * alignment
        self._blocks[address] = block, stream
        return address

    def free(self, address: int, num_bytes: int, stream: int) -> None:
        block, of = self._blocks.pop(address)
        if stream != of:
            block.record_stream(self._stream(stream))

    def _stream(self, stream: int) -> torch.cuda.ExternalStream:
        return torch.cuda.ExternalStream(stream, self._device)
