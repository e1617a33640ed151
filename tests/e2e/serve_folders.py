"""Greedy answers of vLLM from model folders as they lie: ``python -m tests.e2e.serve_folders OUT FOLDER...``.

Reads questions, one a line, from stdin and writes to OUT the token ids of the answers, a list a folder. Nothing of our
weight transfer takes part. Each folder is served by a fork, so that vLLM is imported once.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path

from asyncrl.actors.engine import prepare_environment
from asyncrl.config.schema import GeneratorConfig

MAX_TOKENS = 12


def answer(folder: str, questions: list[str], out: Path) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(model=folder, enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=1 << 26, seed=0)
    chats = [[{"role": "user", "content": question}] for question in questions]
    results = engine.chat(chats, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), use_tqdm=False)
    out.write_text(json.dumps([list(result.outputs[0].token_ids) for result in results]))


def main(out: Path, folders: list[str]) -> int:
    prepare_environment(GeneratorConfig(threads=1), "generator/export")
    import vllm.entrypoints.llm  # noqa: F401 - before the forks

    questions = sys.stdin.read().splitlines()
    answers = []
    for folder in folders:
        process = multiprocessing.get_context("fork").Process(target=answer, args=(folder, questions, out))
        process.start()
        process.join()
        if process.exitcode:
            return 1
        answers.append(json.loads(out.read_text()))
    out.write_text(json.dumps(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
