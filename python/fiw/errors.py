"""The exceptions of the library: one class for each status of the C ABI, all of them `Error`."""

from __future__ import annotations

import enum


class Status(enum.IntEnum):
    """The outcomes that a caller branches on; values are those of `fiw_status`."""

    INVALID_ARGUMENT = 10
    UNSUPPORTED = 11
    CLOSED = 20
    BUSY = 21
    STALE_PLAN = 22
    FAILED = 23
    OUT_OF_MEMORY = 30
    WORKSPACE_TOO_SMALL = 31
    UNAVAILABLE = 40
    NO_DEVICE = 41
    BACKEND = 42
    INTERNAL = 90


class Error(Exception):
    """What every call raises. Nothing has been launched or changed when an argument is to blame.

    Attributes:
        code: the `Status`.
        reason: why, a value of `fiw_reason` in `fiw.h` (100s: page tables, 200s: tensors, 300s: parameters, ...).
        index: the offending request or rank; -1 when the error is not about one.
        bytes_required: bytes that would have sufficed, else 0.
        backend_code: the `cudaError_t` or `ncclResult_t` behind a `BackendError`, else 0.
    """

    code: Status

    def __init__(
        self, message: str, reason: int = 0, *, index: int = -1, bytes_required: int = 0, backend_code: int = 0
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.index = index
        self.bytes_required = bytes_required
        self.backend_code = backend_code


class InvalidArgumentError(Error, ValueError):
    """An argument is wrong; the message names it, its value and what was expected."""

    code = Status.INVALID_ARGUMENT


class UnsupportedError(Error, NotImplementedError):
    """Legal, but no kernel of this build or device does it."""

    code = Status.UNSUPPORTED


class ClosedError(Error, RuntimeError):
    """The workspace was closed."""

    code = Status.CLOSED


class BusyError(Error, RuntimeError):
    """Another thread is in a call on the same workspace; nothing was changed."""

    code = Status.BUSY


class StalePlanError(Error, RuntimeError):
    """A captured graph met a page table that its plan was not made for."""

    code = Status.STALE_PLAN


class FailedError(Error, RuntimeError):
    """A sticky device fault marked the workspace failed; only `close` still works."""

    code = Status.FAILED


class OutOfMemoryError(Error, MemoryError):
    """No memory; `bytes_needed` were asked for, where known."""

    code = Status.OUT_OF_MEMORY

    @property
    def bytes_needed(self) -> int:
        return self.bytes_required


class WorkspaceTooSmallError(Error, MemoryError):
    """A workspace of fixed size; `bytes_needed` would do."""

    code = Status.WORKSPACE_TOO_SMALL

    @property
    def bytes_needed(self) -> int:
        return self.bytes_required


class UnavailableError(Error, RuntimeError):
    """The backend is not compiled in."""

    code = Status.UNAVAILABLE


class NoDeviceError(Error, RuntimeError):
    """There is no such device."""

    code = Status.NO_DEVICE


class BackendError(Error, RuntimeError):
    """CUDA or NCCL reported an error: `backend_code`."""

    code = Status.BACKEND


class InternalError(Error, RuntimeError):
    """A fault of the library's own."""

    code = Status.INTERNAL


_CLASSES: dict[int, type[Error]] = {
    int(cls.code): cls
    for cls in (
        InvalidArgumentError,
        UnsupportedError,
        ClosedError,
        BusyError,
        StalePlanError,
        FailedError,
        OutOfMemoryError,
        WorkspaceTooSmallError,
        UnavailableError,
        NoDeviceError,
        BackendError,
        InternalError,
    )
}


def from_fields(status: int, reason: int, message: str, index: int, bytes_required: int, backend_code: int) -> Error:
    """The exception for the fields of a `fiw_error`; the extension calls it."""
    return _CLASSES[status](message, reason, index=index, bytes_required=bytes_required, backend_code=backend_code)
