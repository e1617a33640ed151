import fcntl
import io
import os
import pty
import re
import struct
import termios
import threading

import pytest

from asyncrl.report.console import Console, ConsoleThread, clean, fit, short, span, terminal_width


class Screen(io.StringIO):
    """The few terminal functions that the console uses, and wrapping; ``rows`` is everything ever on screen."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.width, self.rows, self.column = width, [""], 0

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|.", text, re.S):
            if token == "\r":
                self.column = 0
            elif token == "\n":
                self.rows.append("")
                self.column = 0
            elif token == "\x1b[K":
                self.rows[-1] = self.rows[-1][: self.column]
            elif token.endswith("m"):
                continue
            else:
                assert not token.startswith("\x1b"), f"unknown code {token!r}"
                if self.column == self.width:
                    self.rows.append("")
                    self.column = 0
                self.rows[-1] = self.rows[-1][: self.column] + token + self.rows[-1][self.column + 1 :]
                self.column += 1
        return super().write(text)


def live(screen: Screen, **environ: str) -> Console:
    return Console(screen, "auto", width=lambda: screen.width, environ={"TERM": "xterm", **environ})


def test_one_live_line_is_drawn_over_and_messages_stay_above_it():
    screen = Screen()
    console = live(screen)
    console.status(["step 1", "reward 0.1"])
    console.message("generator/0 restarted", warning=True)
    console.status(["step 2", "reward 0.2"])
    console.message("two\nlines")
    console.close()
    console.message("after the end")
    assert screen.rows == ["generator/0 restarted", "two", "lines", "step 2  reward 0.2", "after the end", ""]


@pytest.mark.parametrize("width", [1, 2, 7, 20, 200])
def test_the_live_line_never_wraps_at_any_width(width):
    screen = Screen(width)
    console = live(screen)
    for step in range(3):
        console.status([f"step {step}/100", "reward 0.123", "accuracy 0.456", "left 0:10"])
    assert len(screen.rows) == 1
    assert len(screen.rows[0]) < max(2, width)


@pytest.mark.parametrize("narrow", [1, 11, 39])
def test_a_resized_terminal_keeps_every_message(narrow):
    screen = Screen(40)
    console = live(screen)
    console.message("kept")
    console.status(["step 1", "reward 0.1", "left 0:10"])
    screen.width = narrow
    console.message("b")
    console.status(["step 2", "reward 0.1", "left 0:10"])
    screen.width = 80
    console.message("c")
    assert screen.rows[:1] == ["kept"]
    assert [row for row in screen.rows if row in ("kept", "b", "c")] == ["kept", "b", "c"]
    assert screen.rows[-1] == "step 2  reward 0.1  left 0:10"  # whole again, though it was cut when narrow


def test_no_colour_when_asked_and_never_in_plain_lines():
    for environ, coloured in (({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True)):
        screen = Screen()
        live(screen, **environ).message("careful", warning=True)
        assert ("\x1b[33m" in screen.getvalue()) is coloured
    plain = io.StringIO()
    Console(plain, environ={"TERM": "xterm"}).message("careful", warning=True)
    assert plain.getvalue() == "careful\n"


@pytest.mark.parametrize("term", ["", "dumb"])
def test_a_terminal_without_cursor_control_gets_plain_lines(term):
    assert Console(Screen(), environ={"TERM": term}).mode == "plain"


def test_plain_lines_have_every_step_whole():
    out = io.StringIO()
    console = Console(out)
    for step in (1, 2):
        console.status([f"step {step}", "x" * 300])
    console.close()
    assert out.getvalue() == "".join(f"step {step}  {'x' * 300}\n" for step in (1, 2))


def test_mode_none_prints_nothing_and_an_unknown_mode_is_an_error():
    out = io.StringIO()
    console = Console(out, "none")
    console.message("a")
    console.status(["b"])
    console.close()
    assert out.getvalue() == ""
    with pytest.raises(ValueError, match="fancy"):
        Console(out, "fancy")


def test_control_codes_in_a_message_cannot_move_the_cursor():
    assert clean("a\x1b[2Jb\x1b[31mc\rd\x07\x9b") == "abcd"
    assert clean("a\tb\r\nc") == "a\tb\nc"


def test_text_that_the_stream_cannot_encode_is_escaped():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(stream).message("naïve")
    assert raw.getvalue() == b"na\\xefve\n"


def test_a_closed_pipe_silences_the_console_and_nothing_else():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        console = Console(stream)
        console.message("nobody reads this")
        console.status(["nor this"])
        assert console.mode == "none"
        # what the buffer still holds must not raise when the interpreter closes the stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)


def test_width_of_a_real_terminal_and_of_none():
    master, slave = pty.openpty()
    with os.fdopen(master), os.fdopen(slave, "w") as stream:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 57, 0, 0))
        assert terminal_width(stream) == 57
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        assert terminal_width(stream) == 80
    assert terminal_width(io.StringIO()) == 80


class Stuck(io.StringIO):
    """A terminal stopped with Ctrl-S: writes wait until ``go``."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.waiting = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.waiting.set()
        assert self.go.wait(30)
        return super().write(text)


def test_a_stopped_terminal_blocks_nobody_and_loses_no_message():
    stream = Stuck()
    thread = ConsoleThread(Console(stream, "live", width=lambda: 80, environ={}))
    thread.message("first")
    assert stream.waiting.wait(30)
    for step in range(1000):  # none of this waits, or the test would not come past it
        thread.status([f"step {step}"])
    thread.message("last")
    assert thread.close(deadline_s=0.01) is False
    stream.go.set()
    assert thread.close(deadline_s=30) is True
    text = stream.getvalue()
    assert text.index("first") < text.index("last") < text.index("step 999")
    assert text.count("step ") == 1  # the others would have been drawn over


def test_plain_lines_are_never_thinned_out():
    stream = Stuck()
    thread = ConsoleThread(Console(stream, "plain"))
    for step in range(50):
        thread.status([f"step {step}"])
    stream.go.set()
    assert thread.close(30)
    assert stream.getvalue() == "".join(f"step {step}\n" for step in range(50))


def test_fit_takes_the_leading_parts():
    assert fit(["ab", "cd", "e"], 6) == "ab  cd"
    assert fit(["ab", "toolong", "e"], 6) == "ab"
    assert fit(["abcdef"], 3) == "abc"
    assert fit(["abcdef"], 0) == ""


def test_numbers_and_spans():
    assert [short(x) for x in (None, 0, 812.4, 3149, 2.4e6, 7e9)] == ["-", "0", "812", "3.1k", "2.4M", "7.0G"]
    assert [span(x) for x in (None, 0.4, 42, 3800, 300_000)] == ["-", "0:00", "0:42", "1:03:20", "3d11h"]
