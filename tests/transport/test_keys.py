"""CURVE keys: files, the rule for addresses, and who gets in."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.transport.frames import DeadlineExpired, Kind, Schema
from asyncrl.transport.keys import Keys, is_loopback
from asyncrl.transport.links import Dialer, Listener

SCHEMA = Schema({"secret": Kind({"text": str}, buffers=1)})
LONG = 60.0


def test_the_file_is_private_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = Keys.generate()
    keys.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Keys.load(path) == keys
    assert keys.server_secret not in repr(keys) and keys.client_secret not in repr(keys)
    with pytest.raises(FileExistsError):
        Keys.generate().save(path)
    path.chmod(0o640)
    with pytest.raises(PermissionError, match="chmod 600"):
        Keys.load(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"server_public": "x", "client_public": "y", "client_secret": "z"}'])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"keys\.json"):
        Keys.load(path)


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://127.0.0.1:5", True), ("tcp://127.9.9.9:5", True), ("tcp://[::1]:5", True), ("tcp://localhost:5", True),
        ("ipc:///tmp/x", True), ("tcp://0.0.0.0:5", False), ("tcp://*:5", False), ("tcp://10.0.0.1:5", False),
        ("tcp://[::]:5", False), ("tcp://node7:5", False), ("tcp://eth0:5", False), ("tcp://127.0.0.1.org:5", False),
    ],
)  # fmt: skip
def test_only_loopback_goes_without_keys(endpoint: str, local: bool) -> None:
    assert is_loopback(endpoint) is local
    for make in (
        lambda keys: Listener("c", SCHEMA, address=endpoint, keys=keys),
        lambda keys: Dialer("d", SCHEMA, endpoint, keys=keys),
    ):
        make(Keys.generate())
        if local:
            make(None)
        else:
            with pytest.raises(ValueError, match=r"is not loopback: .*python -m asyncrl\.transport\.keys FOLDER"):
                make(None)


def test_unknown_transports_are_refused() -> None:
    with pytest.raises(ValueError, match="expected tcp"):
        Dialer("d", SCHEMA, "udp://127.0.0.1:5")


def test_the_keys_of_the_run_get_in_and_no_others() -> None:
    async def test() -> None:
        keys, others = Keys.generate(), Keys.generate()
        listener = Listener("controller", SCHEMA, address="tcp://0.0.0.0:0", keys=keys, advertise="127.0.0.1")
        endpoint = await listener.start()
        assert endpoint.startswith("tcp://127.0.0.1:") and not endpoint.endswith(":0")
        strangers = [
            others,
            Keys(keys.server_public, others.client_public, others.client_secret),  # knows the listener, is not known
            Keys(others.server_public, keys.client_public, keys.client_secret),
            None,
        ]
        for stranger in strangers:
            dialer = Dialer("gen/0", SCHEMA, endpoint, keys=stranger)
            await dialer.start(wait=False)
            while stranger and not dialer.last_refusal:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            with pytest.raises(DeadlineExpired, match="the CURVE handshake failed" if stranger else "not connected"):
                await dialer.recv(deadline_s=0.1, waiting_for="a way in")
            await dialer.close()
        assert listener.peers == set() and listener.stats()["denied"] >= 1
        async with Dialer("gen/0", SCHEMA, endpoint, keys=keys.for_dialers()) as dialer:
            await dialer.send("secret", {"text": "x"}, [bytes(1 << 20)])
            await listener.recv(deadline_s=LONG, waiting_for="gen/0")
            message = await listener.recv(deadline_s=LONG, waiting_for="secret", auto_done=True)
            assert message.header == {"text": "x"} and message.buffers[0] == bytes(1 << 20)
            await dialer.flush(deadline_s=LONG)
        await listener.close()
        with pytest.raises(ValueError, match="for dialers"):
            await Listener("controller", SCHEMA, keys=keys.for_dialers()).start()

    asyncio.run(test())
