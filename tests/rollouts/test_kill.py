"""The contract "Restart": SIGKILL at any moment loses nothing that was acknowledged and trains nothing twice.

A child process drives a ledger at full speed and prints a line for every fact once the ledger has returned; the
parent kills it after a random number of lines and compares what the ledger knows with what was printed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from asyncrl.rollouts.ledger import Ledger
from asyncrl.rollouts.recovery import recover
from asyncrl.rollouts.slots import Slots
from tests.rollouts.books import SIZE, make_sample

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import sys
from asyncrl.rollouts.ledger import Ledger
from asyncrl.rollouts.recovery import recover
from tests.rollouts.books import SIZE, make_group, make_sample

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

ledger = Ledger(sys.argv[1], segment_bytes=4000)
recovery = recover(ledger, ledger.next_version())
for pending in recovery.pending:  # as the controller would: only what is missing
    for index in pending.missing:
        ledger.sample(make_sample(pending.ordinal, index, recovery.version))
        say("sample", pending.ordinal, index)
    known = {sample.index for sample in pending.samples if sample.reward is not None}
    for index in set(range(SIZE)) - known:
        ledger.scored(pending.ordinal, index, reward=1.0)
    say("finished", pending.ordinal)
buffered = sorted([group.ordinal for group in recovery.finished] + [pending.ordinal for pending in recovery.pending])
while True:
    ordinal, version = ledger.next_ordinal(), ledger.next_version()
    ledger.dispatched(make_group(ordinal), "g0", size=SIZE, version=version, cursor={"position": ordinal + 1})
    say("dispatched", ordinal)
    with ledger.transaction():
        for index in range(SIZE):
            ledger.sample(make_sample(ordinal, index, version))
    for index in range(SIZE):
        say("sample", ordinal, index)
    for index in range(SIZE):
        ledger.scored(ordinal, index, reward=1.0)
    say("finished", ordinal)
    buffered.append(ordinal)
    if len(buffered) >= 2:
        batch, buffered = buffered[:2], buffered[2:]
        ledger.cut(version, batch)
        say("cut", version, *batch)
        ledger.step(version, "trained", {})
        say("step", version)
"""


def run_until_killed(path, lines: int) -> list[list[str]]:
    command = [sys.executable, "-c", CHILD, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        said = []
        for line in child.stdout:
            said.append(line.split())
            if len(said) == lines:
                child.kill()
        # what stood in the pipe was said before the kill; a torn last line was not
        assert child.wait() == -9
    return [words for words in said if words]


@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random_moments(tmp_path, seed):
    random = Random(seed)
    samples, finished, cuts = set(), set(), {}
    for _ in range(4):
        said = run_until_killed(tmp_path, random.randint(1, 120))
        samples |= {(int(words[1]), int(words[2])) for words in said[:-1] if words[0] == "sample"}
        finished |= {int(words[1]) for words in said[:-1] if words[0] == "finished"}
        cuts |= {int(words[1]): [int(word) for word in words[2:]] for words in said[:-1] if words[0] == "cut"}
        with Ledger(tmp_path) as ledger:
            recovery = recover(ledger, 0)
            assert recovery.lost == recovery.abandoned == []
            known = {version: [group.ordinal for group in groups] for version, groups in ledger.cuts_since(0)}
            assert cuts.items() <= known.items()
            trained = [ordinal for batch in known.values() for ordinal in batch]
            assert len(trained) == len(set(trained))
            buffered = {group.ordinal for group in recovery.finished}
            assert finished <= buffered | set(trained)
            partial = {(group.ordinal, s.index) for group in recovery.pending for s in group.samples}
            whole = {(ordinal, index) for ordinal in buffered | set(trained) for index in range(SIZE)}
            assert samples <= partial | whole
            for group in recovery.finished:
                for sample in group.samples:
                    want = make_sample(group.ordinal, sample.index)
                    assert sample.token_ids.tolist() == want.token_ids.tolist()
            Slots.restore(2, 1, 1, recovery.slots).check_conservation()
            assert recovery.cursor in (None, {"position": ledger.next_ordinal()})
