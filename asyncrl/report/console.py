"""The terminal: one live line under the messages, or plain lines when the output is not a terminal.

Invariants
    - Nothing is swallowed: every message is printed whole, above the live line; without a terminal each step is a line.
    - The live line is narrower than the terminal, so it stays one row; the width is read at each draw. A terminal made
      narrower in between may leave the old text as a stale row: rows above are never cleared, they may be messages.
    - A terminal that is gone (closed pipe, hang-up) silences the console, never the run.
    - Writing to a terminal may block (Ctrl-S), so the caller talks to ``ConsoleThread``; ``Console`` only draws.
"""

from __future__ import annotations

import os
import queue
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, TextIO

DEFAULT_WIDTH = 80
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Console:
    """Draws on one text stream. Not thread-safe.

    Args:
        stream: where to, usually ``sys.stdout``.
        mode: ``auto`` (live on a capable terminal, else plain), ``live``, ``plain`` or ``none``.
        width: columns of the terminal now; the default asks the operating system.
        environ: ``TERM`` and ``NO_COLOR`` are read from it.
    """

    def __init__(
        self,
        stream: TextIO,
        mode: str = "auto",
        width: Callable[[], int] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        if mode not in ("auto", "live", "plain", "none"):
            raise ValueError(f"report.console must be auto, live, plain or none, not {mode!r}")
        capable = stream.isatty() and environ.get("TERM", "") not in ("", "dumb")
        self._stream = stream
        self.mode = ("live" if capable else "plain") if mode == "auto" else mode
        self._colour = self.mode == "live" and not environ.get("NO_COLOR")
        self._width = width or (lambda: terminal_width(stream))
        self._parts: list[str] = []  # of the live line

    def message(self, text: str, warning: bool = False) -> None:
        """Print ``text`` (any number of lines) above the live line."""
        text = clean(text)
        if self._colour and warning:
            text = f"\x1b[33m{text}\x1b[0m"
        self._write(f"{self._erase()}{text}\n{self._live_line()}")

    def status(self, parts: list[str]) -> None:
        """Show one line made of ``parts``, most important first; those that do not fit a terminal are left out."""
        parts = [one_row(part) for part in parts]
        if self.mode == "plain":
            self._write("  ".join(parts) + "\n")
            return
        erase = self._erase()
        self._parts = parts
        self._write(erase + self._live_line())

    def close(self) -> None:
        """Leave the last live line on the screen and the cursor below it."""
        if self._parts:
            self._parts = []
            self._write("\n")

    def _erase(self) -> str:
        return "\r\x1b[K" if self._parts else ""

    def _live_line(self) -> str:
        return fit(self._parts, self._width() - 1) if self._parts else ""

    def _write(self, text: str) -> None:
        if self.mode == "none" or not text:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):  # reader gone, terminal hung up, stream closed: the files still have it all
            self.mode = "none"


class ConsoleThread:
    """A ``Console`` on its own thread: callers never wait for the terminal.

    Messages queue without bound (they are few and none may be lost); of status lines only the newest is kept when
    the terminal cannot keep up and is live, because it would overwrite the older ones anyway.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._queue: queue.SimpleQueue[tuple[str, Any, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def message(self, text: str, warning: bool = False) -> None:
        self._queue.put(("message", text, warning))

    def status(self, parts: list[str]) -> None:
        self._queue.put(("status", parts, False))

    def close(self, deadline_s: float = 2.0) -> bool:
        """Print what is queued; False if the terminal did not take it within ``deadline_s``."""
        self._queue.put(None)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        newest: list[str] | None = None  # status not drawn yet
        while (item := self._queue.get()) is not None:
            kind, content, warning = item
            if kind == "message":
                self._console.message(content, warning)
            elif self._console.mode == "live":
                newest = content
            else:
                self._console.status(content)
            if newest and self._queue.empty():
                self._console.status(newest)
                newest = None
        if newest:
            self._console.status(newest)
        self._console.close()


def terminal_width(stream: TextIO) -> int:
    """Columns of the terminal behind ``stream``, 80 if it does not say. ``COLUMNS`` is not used: it goes stale."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except (OSError, ValueError):
        return DEFAULT_WIDTH


def clean(text: str) -> str:
    """``text`` without control codes, which would move the cursor; tabs and new lines stay."""
    return _CONTROL.sub("", text.replace("\r\n", "\n"))


def one_row(text: str) -> str:
    """``text`` as printable ASCII on one row, so that its length is its width."""
    return re.sub(r"\s+", " ", clean(text)).encode("ascii", "replace").decode()


def fit(parts: list[str], columns: int) -> str:
    """Leading ``parts`` joined by two blanks in at most ``columns``; the first one is cut if it alone is too wide."""
    line = parts[0][: max(0, columns)]
    for part in parts[1:]:
        if len(line) + 2 + len(part) > columns:
            break
        line = f"{line}  {part}"
    return line


def short(number: float | None) -> str:
    """``number`` in at most five characters: 812, 3.1k, 2.4M; a dash if there is none."""
    if number is None:
        return "-"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"


def span(seconds: float | None) -> str:
    """Seconds as 0:42, 1:03:20 or 2d04h; a dash if unknown."""
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    if hour >= 48:
        return f"{hour // 24}d{hour % 24:02d}h"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"
