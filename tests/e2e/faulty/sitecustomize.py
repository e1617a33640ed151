"""Faults on purpose, for tests only: ends or breaks a process of a run at a named point of its code.

Python imports this file in every process that has its folder on PYTHONPATH; ``tests/e2e/faults.py`` writes the plan
that it reads. The faults of a plan happen in its order, each once in the whole run, whichever process gets there: a
marker file in the plan's folder tells all processes which have happened. Nothing of the product knows about it.
"""

from __future__ import annotations

import errno
import functools
import inspect
import json
import os
import signal
import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any


class Fault:
    """Number ``number`` of the plan; ``calls`` counts calls of its function in this process."""

    def __init__(self, number: int, folder: Path, plan: dict[str, Any]) -> None:
        self.number, self.folder, self.calls = number, folder, 0
        self.module, _, self.function = plan["at"].partition(":")
        self.after, self.nth, self.do, self.text = plan["after"], plan["nth"], plan["do"], plan["text"]
        self.always = plan["always"]

    def due(self) -> bool:
        """Whether it happens at this call; then it has happened."""
        if any(not (self.folder / str(earlier)).exists() for earlier in range(self.number)):
            return False
        self.calls += 1
        if self.always:
            return self.calls >= self.nth
        if self.calls != self.nth:
            return False
        try:
            os.close(os.open(self.folder / str(self.number), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def happen(self) -> None:
        match self.do:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill parent":
                os.kill(os.getppid(), signal.SIGKILL)
                signal.pause()  # our own end follows
            case "raise":
                raise RuntimeError(self.text)
            case "no space":
                raise OSError(errno.ENOSPC, "No space left on device")
            case "hold":
                threading.Event().wait()

    def wrap(self, module: Any) -> None:
        owner, _, name = self.function.rpartition(".")
        holder = functools.reduce(getattr, filter(None, owner.split(".")), module)
        setattr(holder, name, self.around(getattr(holder, name)))

    def around(self, function: Any) -> Any:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                if not self.after and self.due():
                    self.happen()
                result = await function(*args, **kwargs)
                if self.after and self.due():
                    self.happen()
                return result

            return awaited

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not self.after and self.due():
                self.happen()
            result = function(*args, **kwargs)
            if self.after and self.due():
                self.happen()
            return result

        return called


class Finder:
    """Wraps the functions that the plan names as soon as their module has been imported."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        here = [fault for fault in self.faults if fault.module == name]
        spec = PathFinder.find_spec(name, path) if here else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for fault in here:
                fault.wrap(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "ASYNCRL_TEST_FAULTS" in os.environ:
    plan = Path(os.environ["ASYNCRL_TEST_FAULTS"])
    faults = [Fault(number, plan.parent, each) for number, each in enumerate(json.loads(plan.read_text()))]
    sys.meta_path.insert(0, Finder(faults))  # type: ignore[arg-type]
