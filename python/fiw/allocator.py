"""Where a workspace takes its memory from, if not from the backend."""

from __future__ import annotations

from typing import Protocol


class Allocator(Protocol):
    """A pool of the caller's for all memory that a workspace takes on its device: scratch, plans, page tables, graph
    sessions. Given to `FlashInferWorkspace.create`, which keeps it for as long as the memory is in use.

    Called from any thread that uses the workspace or drops one of its steps or sessions; must not call the workspace.
    """

    def allocate(self, num_bytes: int, alignment: int, stream: int) -> int | None:
        """The address of `num_bytes` (> 0) bytes on the workspace's device, at a multiple of `alignment`, for work that
        is enqueued on `stream` (`cudaStream_t`, of the current device; 0 on the CPU) from now on.

        None: out of memory. The call then raises OutOfMemoryError, with what this raised, if it did, as its cause.
        """
        ...

    def free(self, address: int, num_bytes: int, stream: int) -> None:
        """Takes back what `allocate` gave. On CUDA, work that `stream` holds already may still use it."""
        ...
