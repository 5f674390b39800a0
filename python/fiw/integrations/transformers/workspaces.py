"""One workspace for each thread and device: a workspace takes one thread at a time."""

import threading

import torch

import fiw


class _Workspaces(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[torch.device, fiw.FlashInferWorkspace] = {}


_workspaces = _Workspaces()


def workspace(device: torch.device | str) -> fiw.FlashInferWorkspace:
    """The workspace that this thread's calls on `device` go through, made at its first use."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    found = _workspaces.by_device.get(device)
    if found is None:
        found = fiw.FlashInferWorkspace.create(device)
        if found is None:
            raise fiw.UnavailableError(f"device: {device} needs fiw built with FIW_CUDA=ON")
        _workspaces.by_device[device] = found
    return found
