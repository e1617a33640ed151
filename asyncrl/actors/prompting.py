"""Prompts for the controller: items of the environment, tokenised once with the model's own chat template."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.errors import RunFailed
from asyncrl.config.schema import Config
from asyncrl.envs import load_env
from asyncrl.envs.types import Env, Item
from asyncrl.rollouts.prompts import PromptCursor, PromptError
from asyncrl.rollouts.types import Prompt


class PromptSource:
    """Training prompts in a seeded order, the held-out prompts, and the way back from token ids to text.

    Items whose prompt and ``sampling.max_tokens`` do not fit ``generator.max_model_len`` are passed over, never cut,
    and counted: training items in ``cursor.too_long``, held-out ones by ``heldout``. ``room``: most tokens of a prompt.
    """

    def __init__(self, cfg: Config, tokenizer: Any) -> None:
        """Raises ``RunFailed`` for a tokenizer that cannot make prompts of messages."""
        if not tokenizer.chat_template:
            raise RunFailed(f"{cfg.model.path} has no chat template; put one there as chat_template.jinja")
        self._tokenizer = tokenizer
        self.room = cfg.generator.max_model_len - max(cfg.sampling.max_tokens, cfg.eval.max_tokens)
        self._train: Env = load_env(cfg.env, "train")
        self._heldout: Env = load_env(cfg.env, "heldout")
        self.cursor = PromptCursor(size=len(self._train), seed=cfg.seed)

    @property
    def fingerprints(self) -> dict[str, str]:
        """What identifies the data; a resumed run must find the same."""
        return {"train": self._train.fingerprint(), "heldout": self._heldout.fingerprint()}

    def next(self) -> tuple[Prompt, int]:
        """The next training prompt that fits, and its epoch.

        Raises ``RunFailed`` when no prompt of a whole epoch fits.
        """
        try:
            epoch, prompt = self.cursor.next_prompt(self.item, self.room)
        except PromptError as error:
            raise RunFailed(str(error)) from error
        return prompt, epoch

    def restore(self, state: dict[str, Any]) -> None:
        """Go on behind the prompt at which ``state`` was taken."""
        self.cursor = PromptCursor.restore(self.cursor.size, self.cursor.seed, state)

    def item(self, index: int) -> Prompt:
        """Training item ``index``, tokenised."""
        return self._tokenise(self._train.item(index))

    def heldout(self) -> tuple[list[Prompt], int]:
        """The held-out prompts that fit (none with ``env.heldout_size=0``), and how many do not.

        Raises ``RunFailed`` when there are some and none fits.
        """
        prompts = [self._tokenise(self._heldout.item(index)) for index in range(len(self._heldout))]
        fitting = [p for p in prompts if len(p.token_ids) <= self.room]
        if prompts and not fitting:
            raise RunFailed(f"no held-out prompt fits {self.room} tokens; raise generator.max_model_len")
        return fitting, len(prompts) - len(fitting)

    def text(self, token_ids: NDArray[np.int32]) -> str:
        """What the ids say, special tokens left out."""
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)

    def _tokenise(self, item: Item) -> Prompt:
        encoded = self._tokenizer.apply_chat_template(item.messages, add_generation_prompt=True, return_dict=True)
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        return Prompt(item.item_id, item.index, ids, item.entry)
