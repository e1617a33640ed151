"""The ``vllm.general_plugins`` entry point: vLLM calls ``register`` in each of its processes.

It makes the weight-transfer backend "zmq" known by name and, inside the processes of one of our generators, asks the
kernel to end the process with its parent: vLLM leaves EngineCore and workers alive when its frontend is killed. For
anything else that vLLM is used for it changes nothing.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

BACKEND = "zmq"
GENERATOR_VARIABLE = "ASYNCRL_GENERATOR"  # set, to the generator's name, by the generator process only
_PR_SET_PDEATHSIG = 1
_forking_pid = 0
_watches_forks = False


def register() -> None:
    """May be called any number of times in any process."""
    _register_backend()
    if os.environ.get(GENERATOR_VARIABLE):
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            end_with_parent(parent.pid)
        _watch_forks()


def end_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when its parent ends; at once if it has ended already.

    Raises ``OSError`` if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it ended before prctl: no signal will come
        os.kill(os.getpid(), signal.SIGKILL)


def _register_backend() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # a second registration of a name raises
        WeightTransferEngineFactory.register_engine(BACKEND, "asyncrl.weights.vllm_backend", "ZmqWeightTransferEngine")


def _watch_forks() -> None:
    """A forked child believes its plugins are loaded already, so ``register`` is not called there."""
    global _watches_forks
    if not _watches_forks:
        _watches_forks = True
        os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def _before_fork() -> None:
    global _forking_pid
    _forking_pid = os.getpid()


def _after_fork() -> None:
    if os.environ.get(GENERATOR_VARIABLE):
        end_with_parent(_forking_pid)
