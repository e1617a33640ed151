"""A real generator process between a fake controller and a real weight publisher.

The fake controller is a listener that this test process reads: it knows nothing of slots, ledger or rewards.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from asyncrl.actors.messages import CONTROLLER_SCHEMA, sample_of
from asyncrl.config.files import save_config
from asyncrl.config.schema import Config
from asyncrl.rollouts.types import Sample
from asyncrl.transport.blocking import BlockingListener
from asyncrl.transport.frames import Message
from asyncrl.weights.publisher import SyncReport, WeightPublisher

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 303
EOS = 1


def make_model(tied: bool = True, seed: int = 0) -> Qwen3ForCausalLM:
    """A random Qwen3 of 0.2 M parameters, fp32, on whose output a change of weights shows."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=tied, bos_token_id=None,
        eos_token_id=EOS, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float().eval()


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, prompt: list[int], tokens: np.ndarray, temperature: float):
    """(T,) log-prob of each completion token under ``model`` at this temperature, in float32."""
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCABULARY, length).tolist()


class Rig:
    """Use as a context manager. ``model`` is the trainer's (fp32, in ``eval``); change it and ``push``."""

    def __init__(self, folder: Path, model: PreTrainedModel | None = None, **generator) -> None:
        self.model = model or make_model()
        self.model.save_pretrained(folder / "model")
        self.cfg = Config()
        self.cfg.seed = 17
        self.cfg.model.path = str(folder / "model")
        self.cfg.weights.deadline_s = 30
        for key, value in ({"max_model_len": 384, "max_num_seqs": 64, "memory_share": 0.02} | generator).items():
            setattr(self.cfg.generator, key, value)
        self.config = save_config(self.cfg, folder)
        self.log = folder / "generator.log"
        self.name = "generator/0"
        self.dropped: list[tuple[str, str]] = []
        self.served: list[tuple[str, int, str]] = []
        self.messages: dict[str, list[Message]] = defaultdict(list)
        self.samples: dict[tuple[int, int], Sample] = {}
        self.version = -1

    def __enter__(self) -> Rig:
        self.controller = BlockingListener("controller", CONTROLLER_SCHEMA)
        self.endpoint = self.controller.start()
        self.publisher = WeightPublisher(
            lambda: self.model.named_parameters(),
            wire_dtype="float32",
            chunk_bytes=1 << 16,
            window_bytes=1 << 18,
            deadline_s=self.cfg.weights.deadline_s,
            on_drop=lambda *who: self.dropped.append(who),
            on_served=lambda *what: self.served.append(what),
        )
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self) -> None:
        """Start the generator process and wait until it is ready for weights."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
        environment["PYTHONPATH"] = str(ROOT)
        command = [
            sys.executable, "-m", "asyncrl.actors.generator", "--config", str(self.config), "--name", self.name,
            "--controller", self.endpoint,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.messages.clear()
        self.wait_for_greeting()
        hello = self.until("generator_hello", 30)
        self.start_s = hello.header["start_s"]
        self.controller.send(self.name, "welcome", {"publisher": self.publisher.endpoint})
        self.until("generator_ready", 60)
        self.publisher.wait_for_engines(1, 60)

    def wait_for_greeting(self, deadline_s: float = 240) -> None:
        """Until the generator says hello; its end is noticed at once."""
        end = time.monotonic() + deadline_s
        while not self.messages["generator_hello"]:
            if self.process.poll() is not None:
                raise AssertionError(f"the generator ended; its log ends with\n{self.tail()}")
            assert time.monotonic() < end, f"no greeting within {deadline_s} s"
            with contextlib.suppress(TimeoutError):
                self.handle(self.controller.recv(deadline_s=0.2, waiting_for="the generator"))

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.publisher.close()
        self.controller.close()

    # -- the fake controller ------------------------------------------------------------------------------------------

    def read(self, deadline_s: float) -> None:
        """Handle one message of the generator."""
        try:
            message = self.controller.recv(deadline_s=deadline_s, waiting_for="the generator")
        except TimeoutError:
            raise AssertionError(f"the generator is silent; its log ends with\n{self.tail()}") from None
        self.handle(message)

    def handle(self, message: Message) -> None:
        self.controller.done(message)
        self.messages[message.kind].append(message)
        if message.kind == "sample":
            sample = sample_of(message)
            assert (sample.ordinal, sample.index) not in self.samples, "answered twice"
            self.samples[sample.ordinal, sample.index] = sample

    def tail(self) -> str:
        return self.log.read_text()[-3000:]

    def until(self, kind: str, deadline_s: float = 60) -> Message:
        """The next message of this kind."""
        return self.wait(lambda: self.messages[kind] and self.messages[kind].pop(), deadline_s)

    def wait(self, condition: Callable, deadline_s: float = 60):
        end = time.monotonic() + deadline_s
        while not (result := condition()):
            left = end - time.monotonic() if self.process.poll() is None else 3  # what it said before it ended
            self.read(max(0.01, left))
        return result

    def ask(self, ordinal: int, n: int, prompt: list[int], temperature: float = 1.0, max_tokens: int = 16) -> None:
        header = {
            "ordinal": ordinal, "indices": list(range(n)), "temperature": temperature, "max_tokens": max_tokens
        }  # fmt: skip
        self.controller.send(self.name, "generate", header, [np.array(prompt, "<i4")])

    def take(self, ordinal: int, n: int, deadline_s: float = 60) -> list[Sample]:
        """The samples asked for, by index."""
        keys = [(ordinal, index) for index in range(n)]
        self.wait(lambda: all(key in self.samples for key in keys), deadline_s)
        return [self.samples.pop(key) for key in keys]

    def generate(self, ordinal: int, n: int, prompt: list[int], **terms) -> list[Sample]:
        self.ask(ordinal, n, prompt, **terms)
        return self.take(ordinal, n)

    # -- the trainer --------------------------------------------------------------------------------------------------

    def push(self) -> SyncReport:
        """Publish the model as the next version and wait until the engine serves it."""
        self.version += 1
        self.publisher.publish(self.version)
        report = self.publisher.wait_committed(90)
        assert report is not None
        return report

    def change(self, scale: float = 0.1, seed: int = 1) -> None:
        """Move every parameter."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(
                    scale * torch.randn(parameter.shape, generator=generator) * parameter.std().nan_to_num(0)
                )

    def processes(self) -> list[psutil.Process]:
        """The generator and everything below it."""
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]
