"""A user's task whose scorer does what the completion says; otherwise the reward is the index, and 1 more if right."""

import os
import signal
import subprocess
import sys
import time

RETURNS = {"none": None, "text": "1.0", "nan": float("nan"), "inf": float("inf"), "true": True, "huge": 10**400}


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def task(split, index, completion=None):
    if completion is None:
        return {"prompt": f"{split} question {index}", "answer": str(index)}
    word, _, rest = completion.partition(" ")
    if word in ACTIONS:
        return ACTIONS[word](rest)
    if word == "split":
        return float(split == rest)
    return float(completion.strip() == str(index)) + index


def hang(_):
    while True:
        time.sleep(1)


def hang_with_child(path):
    """A child process of the scorer, its pid in a file, then a hang."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(path + ".part", "w") as file:
        file.write(str(child.pid))
    os.rename(path + ".part", path)
    hang("")


def fail(text):
    raise ValueError(text)


def fail_unprintably(_):
    raise Unprintable


def leave(code):
    raise SystemExit(code)


def loud(_):
    print("x" * 100_000, flush=True)
    os.write(1, b"y" * 1000)
    subprocess.run(["echo", "from a child"], check=True)
    return 1.0


def impatient(_):
    """Limits itself with SIGALRM, which only a main thread may."""

    def stop(*_):
        raise TimeoutError("my own limit")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    hang("")


def pending_alarm(_):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return 1.0


def fork(_):
    """Two processes return from here; the child's answer must not be taken for the next item's."""
    return 1.0 if os.fork() else 99.0


def fork_and_die(_):
    """Dies, while a child that it forked holds its pipes open."""
    if os.fork() == 0:
        time.sleep(600)
    os._exit(7)


ACTIONS = {
    "hang": hang,
    "child": hang_with_child,
    "raise": fail,
    "unprintable": fail_unprintably,
    "segfault": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda code: os._exit(int(code)),
    "sysexit": leave,
    "return": lambda name: RETURNS[name],
    "print": loud,
    "impatient": impatient,
    "alarm": pending_alarm,
    "wait": lambda seconds: time.sleep(float(seconds)) or 1.0,
    "fork": fork,
    "forkdie": fork_and_die,
    "pid": lambda _: float(os.getpid()),
    "read": lambda _: float(len(sys.stdin.read())),
}
