"""The one error that a user's configuration can raise: every problem found, each with its key and its remedy."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

USER_ERROR_STATUS = 2
SPEAK_S = 60.0  # what local rank 0 has to find the same problems, on a machine that does other things too


@dataclass(frozen=True)
class Problem:
    """``key`` is the dotted key as it is typed on the command line."""

    key: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}\n    -> {self.remedy}"


class ConfigError(Exception):
    """One or more problems with what the user asked for; never a bug, so it is shown without a traceback."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))


@contextmanager
def exit_on_config_error() -> Iterator[None]:
    """Turns a ConfigError into a message on stderr and exit status 2.

    Every rank of a node finds the same problems, so local rank 0 speaks for all. The others wait for torchrun to end
    them: the end of any rank makes it end all, rank 0 before it has spoken too. Called from the main thread.
    """
    try:
        yield
    except ConfigError as error:
        if int(os.environ.get("LOCAL_RANK", "0")) != 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(SPEAK_S)  # one that is still here then was the only one to find something
        count = len(error.problems)
        heading = "1 problem" if count == 1 else f"{count} problems"
        text = f"{heading} in the configuration; nothing was started\n{error}"
        print(f"asyncrl: {text}", file=sys.stderr, flush=True)
        tell_torchrun(text)
        sys.exit(USER_ERROR_STATUS)


class RunFailed(Exception):
    """An expected end of a run, for example an expired deadline: the text is the reason and, if any, the remedy."""


class RunInterrupted(RunFailed):
    """The user or a scheduler ended the run (Ctrl-C, SIGTERM)."""


def tell_torchrun(reason: str) -> None:
    """Has torchrun end its own report of the failure with ``reason``, which is otherwise far above in the output.

    The format is that of ``torch.distributed.elastic.multiprocessing.errors``, which would import torch.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": reason, "timestamp": str(int(time.time()))}
        with open(path, "w") as file:
            json.dump({"message": {"message": reason, "extraInfo": details}}, file)
