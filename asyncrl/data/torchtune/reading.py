"""A torchtune configuration as a run of this project: reads everything, in the order of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.data.torchtune.datasets import read_data, read_heldout
from asyncrl.data.torchtune.leaves import Reading
from asyncrl.data.torchtune.models import read_model, read_tokenizer
from asyncrl.data.torchtune.optimizers import read_loss, read_optimizer
from asyncrl.data.torchtune.plain import read_memory, read_mesh, read_precision, read_rest
from asyncrl.data.torchtune.recipes import Launch
from asyncrl.data.torchtune.steps import batch_of, read_batch, read_steps


def read(config: Mapping[str, Any], launch: Launch, samples: int = 0, mean: int = 0) -> Reading:
    """``samples`` and ``mean`` (tokens of a conversation): what the user knows of the data; 0 for what is not known.

    Raises ``RecipeError`` for ranks that do not divide.
    """
    reading = Reading(config)
    batch = batch_of(reading, launch)
    adapters = read_model(reading)
    data = read_data(reading, samples)
    read_loss(reading, launch)
    length = read_tokenizer(reading, batch.size, 2 if launch.preference else 1, data.max_length)
    sequences = read_batch(reading, batch, data, length, mean)
    read_steps(reading, batch, sequences)
    read_optimizer(reading)
    read_precision(reading, adapters)
    read_memory(reading)
    read_mesh(reading)
    read_heldout(reading)
    read_rest(reading)
    return reading
