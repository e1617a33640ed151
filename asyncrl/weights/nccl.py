"""A ``Group`` over NCCL's C API.

torch.distributed's NCCL groups do not do for this. Forming one blocks until every rank has come, and nothing ends that
wait; their watchdog ends the whole process when a peer dies, unless an environment variable tells every group of the
process, the trainer's own included, to do without; and they meet in a store that listens on a port of its own. Here the
communicator is non-blocking, so that each wait is a loop with a deadline that ``abort`` can end; nothing watches it;
and the ranks meet by a ticket that travels in the announcement.

NCCL's own connections are not encrypted, whatever ``transport.keys_dir`` says.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time

import torch
from torch import Tensor

from asyncrl.weights.errors import PlaneFailed
from asyncrl.weights.groups import Group

POLL_S = 2e-4
TICKET_BYTES = 128  # NCCL_UNIQUE_ID_BYTES

# nccl.h
_SUCCESS, _INVALID_USAGE, _IN_PROGRESS = 0, 5, 7
_UINT8 = 1
_API_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21400


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * TICKET_BYTES),)


class _Config(ctypes.Structure):
    """``ncclConfig_t`` as of NCCL 2.14, which every later one accepts: what came after keeps its default."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    """The NCCL that torch has loaded. Raises ``PlaneFailed`` if it has none."""
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise PlaneFailed(f"weights.backend=nccl needs the NCCL of a CUDA build of torch: {error}") from error
    comm = ctypes.c_void_p
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    nccl.ncclGetErrorString.argtypes = [ctypes.c_int]
    nccl.ncclGetLastError.restype = ctypes.c_char_p
    nccl.ncclGetLastError.argtypes = [comm]
    nccl.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
    nccl.ncclCommInitRankConfig.argtypes = [
        ctypes.POINTER(comm), ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config)
    ]  # fmt: skip
    nccl.ncclCommGetAsyncError.argtypes = [comm, ctypes.POINTER(ctypes.c_int)]
    nccl.ncclCommAbort.argtypes = [comm]
    nccl.ncclBroadcast.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, comm, ctypes.c_void_p
    ]  # fmt: skip
    return nccl


class NcclGroup(Group):
    def __init__(self, device: torch.device) -> None:
        """Raises ``PlaneFailed`` if ``device`` is not a GPU or there is no NCCL."""
        if device.type != "cuda":
            raise PlaneFailed(f"weights.backend=nccl moves weights between GPUs, not from or to {device}; use zmq")
        self._nccl, self._device = _library(), device
        self._stream = torch.cuda.Stream(device)
        self._lock = threading.Lock()  # around every call on the communicator: abort frees it
        self._comm: ctypes.c_void_p | None = None
        self._aborted = False

    def ticket(self) -> bytes:
        identity = _UniqueId()
        self._require(self._nccl.ncclGetUniqueId(ctypes.byref(identity)), "making a ticket")
        return bytes(identity)

    def open(self, ticket: bytes, rank: int, size: int, deadline_s: float) -> None:
        if len(ticket) != TICKET_BYTES:
            raise PlaneFailed(f"a ticket of {len(ticket)} bytes instead of {TICKET_BYTES}")
        end = time.monotonic() + deadline_s
        config = _Config(ctypes.sizeof(_Config), _API_MAGIC, _CONFIG_VERSION, 0)
        identity, comm = _UniqueId.from_buffer_copy(ticket), ctypes.c_void_p()
        with self._lock, torch.cuda.device(self._device):
            if self._aborted:
                raise PlaneFailed("the NCCL group was given up")
            code = self._nccl.ncclCommInitRankConfig(
                ctypes.byref(comm), size, identity, rank, ctypes.byref(config)
            )  # fmt: skip
            self._comm = comm if comm.value else None
            self._require(code, "forming the group")
        self._settle(end, f"{size} ranks to form an NCCL group", deadline_s)

    def broadcast(self, data: Tensor, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        done = torch.cuda.Event()
        with self._lock, torch.cuda.device(self._device):
            code = self._nccl.ncclBroadcast(
                data.data_ptr(), data.data_ptr(), data.numel(), _UINT8, 0, self._alive(), self._stream.cuda_stream
            )
            self._require(code, "a broadcast")
        self._settle(end, "a broadcast to begin", deadline_s)  # only then is it in the stream
        done.record(self._stream)
        while not done.query():
            self._wait(end, f"{data.numel()} bytes to be broadcast", deadline_s)
        self._state()  # an abort ends the kernel as well

    def abort(self) -> None:
        with self._lock:
            comm, self._comm, self._aborted = self._comm, None, True
        if comm is not None:
            with torch.cuda.device(self._device):
                self._nccl.ncclCommAbort(comm)

    # -- one step of a wait -------------------------------------------------------------------------------------------

    def _settle(self, end: float, what: str, deadline_s: float) -> None:
        """Until the call before is no longer in progress."""
        while self._state() == _IN_PROGRESS:
            self._wait(end, what, deadline_s)

    def _wait(self, end: float, what: str, deadline_s: float) -> None:
        self._state()
        if time.monotonic() > end:
            raise PlaneFailed(f"waited {deadline_s:g} s for {what}")
        time.sleep(POLL_S)

    def _state(self) -> int:
        state = ctypes.c_int()
        with self._lock:
            self._require(self._nccl.ncclCommGetAsyncError(self._alive(), ctypes.byref(state)), "asking for errors")
            self._require(state.value, "the communicator")
        return state.value

    def _alive(self) -> ctypes.c_void_p:
        if self._comm is None:
            raise PlaneFailed("the NCCL group was given up")
        return self._comm

    def _require(self, code: int, what: str) -> None:
        if code in (_SUCCESS, _IN_PROGRESS):
            return
        words = [self._nccl.ncclGetErrorString(code), self._nccl.ncclGetLastError(None)]
        text = "; ".join(word.decode(errors="replace").strip() for word in words if word)
        hint = " (NCCL takes one rank a GPU: trainer and engines need different ones)" if code == _INVALID_USAGE else ""
        raise PlaneFailed(f"NCCL, {what}: {text}{hint}")
