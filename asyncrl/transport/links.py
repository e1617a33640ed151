"""Links between processes: a ``Listener`` is dialed by many ``Dialer``s.

    listener = Listener("controller", SCHEMA)
    endpoint = await listener.start()                  # tcp://127.0.0.1:PORT, the port chosen by the system
    dialer = Dialer("gen/0", SCHEMA, endpoint)
    await dialer.start()
    await dialer.send("sample", {"ordinal": 3}, [token_ids, logprobs])

    message = await listener.recv(deadline_s=30, waiting_for="a sample")
    ...                                                # make its effect durable
    listener.done(message)                             # now gen/0 may forget it

What holds, in both directions:

- a message that ``send`` accepted is delivered once and in order to the peer process, across lost connections;
- it is kept, and counts against the peer's credit, until the peer's consumer calls ``done``. If the *receiving* process
  is restarted, everything not done is delivered to its successor. ``(peer, session, seq)`` of a message stays the same,
  so that a consumer that was killed between making an effect durable and ``done`` can tell; ``cursors`` lets a
  Listener drop such repeats itself;
- if the *sending* process is restarted its successor is a new incarnation: what the receiver already has stays in its
  queue, then come ``$left`` and ``$joined``, then the successor's messages. A consumer that answers ``$joined`` with
  how far it got lets the successor continue without loss or repeat;
- a link is one queue each way: what must not wait behind bulk that waits for credit belongs on a link of its own;
- a peer that says nothing for ``dead_after_s`` is taken for dead, and a single message says nothing until all of it has
  crossed: cut payloads so that one crosses in a fraction of that;
- **buffers are sent from where they lie**: leave one unchanged until the message is acknowledged
  (``send(..., wait="acked")`` returns then). To reuse it sooner send a copy.
"""

from __future__ import annotations

from asyncrl.transport.dialer import Dialer
from asyncrl.transport.errors import DeadlineExpired, PeerLost, ProtocolError, TransportError
from asyncrl.transport.listener import Listener

__all__ = ["DeadlineExpired", "Dialer", "Listener", "PeerLost", "ProtocolError", "TransportError"]
