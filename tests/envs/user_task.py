"""A user's task whose scorer does to a completion what the completion says."""

import os
import signal
import time


def task(split, index, completion=None):
    if completion is None:
        return {"prompt": f"{split} question {index}", "answer": str(index)}
    return act(split, index, completion)


def act(split, index, completion):
    word, _, rest = completion.partition(" ")
    if word == "hang":
        while True:
            time.sleep(1)
    if word == "raise":
        raise ValueError(rest)
    if word == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "exit":
        os._exit(int(rest))
    if word == "sysexit":
        raise SystemExit(rest)
    if word == "return":
        return {"none": None, "text": "1.0", "nan": float("nan"), "inf": float("inf"), "true": True}[rest]
    if word == "print":
        print("x" * 100_000, flush=True)
        os.write(1, b"y" * 1000)
    if word == "split":
        return float(split == rest)
    return float(completion.strip() == str(index)) + index
