"""What the publisher (trainer rank 0) exchanges with the engines' workers and frontends.

    publisher                 worker/G/R                     frontend/G
                              subscribe ->                   subscribe ->
    announce{v} ------------> (allocates staging) ---------> (able to pause)
                              ready ->                       ready ->
    chunk{v} ...  ----------> (staged while it generates; lent or broadcast in place of chunk on other data planes)
    verify{v} digests ------> staged ->
    load{v} ------------------------------------------------> pause, load and compare, finish, resume
                              loaded ->                      committed ->
    dropped{reason} --------> missed a deadline, lost a link ->

``mismatch`` names every tensor whose digest differs from the publisher's or that the engine did not want.
``loaded`` carries the digest of all that the worker handed to the model, computed from those tensors.
Workers are counted by the rank vLLM gives them; an engine takes part once all its workers and its frontend are here.
The frontend subscribes last, once the publisher knows all the workers. One that finds a worker's link missing then is
``dropped`` at once: its worker would not subscribe a second time.
"""

from __future__ import annotations

from asyncrl.transport.frames import Kind, Schema

PUBLISHER_SCHEMA = Schema(
    {
        # engine -> publisher
        "subscribe": Kind({"generator": str, "role": str, "rank": int, "workers": int}),
        "ready": Kind({"version": int}),
        "staged": Kind({"version": int, "seconds": float}),
        "loaded": Kind({"version": int, "digest": str, "load_s": float, "digest_s": float}),
        "mismatch": Kind({"version": int, "reason": str}),
        "committed": Kind({"version": int, "pause_s": float}),
        "failed": Kind({"version": int, "reason": str}),
        # publisher -> engine
        "announce": Kind({"version": int, "bytes": int, "join": bytes}, buffers=1),  # the manifest as JSON
        "chunk": Kind({"version": int, "offset": int}, buffers=1),
        "broadcast": Kind({"version": int, "offset": int, "bytes": int}),  # they come through the engine's group
        # they lie at ``at`` in memory of the publisher's GPU; from handle on: how the CUDA driver finds that memory
        "lent": Kind(
            {
                **{"version": int, "offset": int, "bytes": int, "at": int, "gpu": str},
                **{"handle": bytes, "size": int, "start": int, "counter": bytes, "counter_at": int},
            }
        ),
        "verify": Kind({"version": int}, buffers=1),  # uint64 digests in the manifest's order
        "load": Kind({"version": int}),
        "dropped": Kind({"reason": str}),
    }
)


def worker_name(generator: str, rank: int) -> str:
    """``generator/3`` and rank 0 make ``worker/3/0``."""
    return f"worker/{_short(generator)}/{rank}"


def frontend_name(generator: str) -> str:
    """``generator/3`` makes ``frontend/3``."""
    return f"frontend/{_short(generator)}"


def _short(generator: str) -> str:
    return generator.removeprefix("generator/")
