"""What engines read of FlashInfer's wrappers behind their interface, under its names. It cannot be set."""

from __future__ import annotations

import torch

from fiw.compat.flashinfer._graph import FixedBuffers
from fiw.compat.flashinfer._terms import Variant


class ReadByEngines:
    """The options of the last plan(), and the buffer that names the workspace."""

    _buffer: torch.Tensor
    _fixed: FixedBuffers | None

    def _options(self) -> Variant:
        raise NotImplementedError

    @property
    def _float_workspace_buffer(self) -> torch.Tensor:
        return self._buffer

    @property
    def _causal(self) -> bool:
        return self._options().causal

    @property
    def _window_left(self) -> int:
        return self._options().window_left

    @property
    def _logits_soft_cap(self) -> float:
        return self._options().logits_soft_cap

    @property
    def _sm_scale(self) -> float | None:
        return self._options().sm_scale


def fixed_buffer(name: str) -> property:
    """The buffer that a wrapper with use_cuda_graph=True was given as `name`; else None."""

    def read(self: ReadByEngines) -> torch.Tensor | None:
        return None if self._fixed is None else self._fixed.get(name)

    return property(read)
