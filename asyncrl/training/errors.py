"""Errors of the trainer. Each message says what to do about it."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """Base of every error raised by ``asyncrl.training``."""


class ModelError(TrainingError):
    """The model folder cannot be trained as it is: missing files, unknown architecture, unsupported feature."""


class BatchError(TrainingError):
    """The micro-batches break the contract: a sample that cannot be trained, or ranks with unequal counts."""


class CheckpointError(TrainingError):
    """A checkpoint could not be written, or what is on disk is incomplete or damaged."""


class PartialSteps(TrainingError):
    """Too many steps updated only a part of the model, because gradients were not finite."""
