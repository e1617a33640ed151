"""What the controller exchanges with trainers and generators: one schema for its listener and all its dialers.

    generator            controller            trainer
    generator_hello ->                         <- trainer_ready      (rank 0 names the publisher's endpoint)
                     <- welcome                                      (once the publisher is known)
    generator_ready  ->               publish ->                     (linked to the publisher: weights, please)
    committed        ->                                              (live from the first one on)
                     <- generate       batch ->
    sample           ->                        <- step
    generator_failed ->          checkpoint ->  <- saved
                     <- stop            stop -> <- trainer_failed, interrupted, dropped, served

``generate`` asks for samples ``indices`` of group ``ordinal``; a negative ordinal is an evaluation (temperature 0 is
greedy). Each is answered by one ``sample`` per index, even when it could not be made: then ``failure`` says why.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.rollouts.types import Sample
from asyncrl.transport.frames import Kind, Message, ProtocolError, Schema, array_of

CONTROLLER_SCHEMA = Schema(
    {
        # controller -> generator
        "welcome": Kind({"publisher": str}),
        "generate": Kind({"ordinal": int, "indices": list[int], "temperature": float, "max_tokens": int}, buffers=1),
        # generator -> controller
        "generator_hello": Kind({"pid": int, "host": str, "start_s": float}),
        "generator_ready": Kind(),
        "committed": Kind({"version": int, "seconds": float, "bytes": int, "pause_s": float}),
        "sample": Kind(
            {"ordinal": int, "index": int, "finish_reason": str, "failure": str | None, "cached_tokens": int},
            buffers=3,
        ),
        "generator_failed": Kind({"reason": str}),
        # controller -> trainer; all ranks, in the same order
        "batch": Kind({"version": int, "rank": int, "micro": list[int]}, buffers="any"),
        "publish": Kind(),
        "checkpoint": Kind(),
        # trainer -> controller
        "trainer_ready": Kind({"rank": int, "version": int, "publisher": str, "pid": int, "host": str}),
        "step": Kind({"version": int, "skipped": str | None, "metrics": dict[str, Any], "busy_s": float}),
        "saved": Kind({"version": int, "path": str}),
        "dropped": Kind({"generator": str, "reason": str}),  # it missed a deadline of the weight push
        "served": Kind({"generator": str, "version": int, "digest": str}),  # as the engine computed it
        "trainer_failed": Kind({"reason": str}),
        "interrupted": Kind({"signal": str}),  # said before the link closes, which alone would read as a death
        # controller -> everyone
        "stop": Kind({"reason": str}),
    }
)

INTS = "<i4"
FLOATS = "<f4"


def sample_message(sample: Sample, cached_tokens: int = 0) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Header and buffers of a ``sample`` message."""
    header = {
        "ordinal": sample.ordinal,
        "index": sample.index,
        "finish_reason": sample.finish_reason,
        "failure": sample.failure,
        "cached_tokens": cached_tokens,
    }
    columns = ((sample.token_ids, INTS), (sample.logprobs, FLOATS), (sample.versions, INTS))
    return header, [np.ascontiguousarray(values, dtype) for values, dtype in columns]


def sample_of(message: Message) -> Sample:
    """The sample that a ``sample`` message carries; its arrays are read-only views of the message.

    Raises ``ProtocolError`` if the arrays differ in length or hold a log-prob that is no probability's.
    """
    header = message.header
    token_ids, logprobs, versions = (
        array_of(buffer, dtype, [buffer.nbytes // 4])
        for buffer, dtype in zip(message.buffers, (INTS, FLOATS, INTS), strict=True)
    )
    name = f"sample {header['ordinal']}/{header['index']} of {message.peer}"
    if not len(token_ids) == len(logprobs) == len(versions):
        raise ProtocolError(f"{name}: {len(token_ids)} tokens, {len(logprobs)} log-probs, {len(versions)} versions")
    if header["failure"] is None and not np.isfinite(logprobs).all():
        raise ProtocolError(f"{name} is not marked as failed but has a log-prob that is not finite")
    return Sample(
        ordinal=header["ordinal"],
        index=header["index"],
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=header["finish_reason"],
        generator=message.peer,
        failure=header["failure"],
    )
