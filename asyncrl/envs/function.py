'''A user's own task: one Python function.

``env.kind=function env.function=package.module:task`` or ``env.function=path/to/file.py:task`` names it:

    def task(split: str, index: int, completion: str | None = None):
        """split is "train" or "heldout"; index counts from 0 to env.size - 1 (env.heldout_size - 1)."""
        left, right = index % 10, index // 10 % 10
        if completion is None:
            return {"prompt": f"{left}+{right}="}
        return 1.0 if completion.strip() == str(left + right) else 0.0

Without a completion it returns the item: a dict with ``prompt`` (text) or ``messages`` (a list of {role, content}) and
whatever else it likes, if JSON can hold it (the ledger keeps it beside the completions). With one it returns the
reward, a number. The same split and index must always give the same item, in every process: draw from
``random.Random(index)``, never from the global generator. Keeping held-out questions out of the training split is the
function's part. Its name, its file's bytes and the first item make the fingerprint: a run resumes on the same source.
'''

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.config.schema import EnvConfig
from asyncrl.envs.types import EnvError, Item, Split, as_number

KEY = "env.function"
_CALLS = (("train", 0), ("train", 0, "completion"))
_FORM = "def task(split, index, completion=None)"
_EXAMPLE = "write package.module:function or path/to/file.py:function"
ROLES = ("system", "user", "assistant")


class FunctionEnv:
    """One split of a user's function."""

    def __init__(self, cfg: EnvConfig, split: Split) -> None:
        """Raises ``EnvError`` when the function cannot be found or does not take the three arguments."""
        if cfg.size < 1:
            raise EnvError("env.size", f"{cfg.size} training items", "give at least 1")
        self._cfg, self._split = cfg, split
        self._size = cfg.size if split == "train" else max(cfg.heldout_size, 0)
        self._function = find_function(cfg.function)

    def __len__(self) -> int:
        return self._size

    def item(self, index: int) -> Item:
        if not 0 <= index < self._size:
            raise IndexError(f"item {index} of a {self._split} split of {self._size} items")
        call = f"{self._cfg.function}({self._split!r}, {index})"
        try:
            made = self._function(self._split, index)
        except Exception as error:
            raise EnvError(KEY, f"{call} raised {type(error).__name__}: {error}", "mend the function") from error
        messages, data = checked_item(made, call)
        return Item(f"{self._split}:{index}", index, messages, {"index": index, "data": data})

    def score(self, text: str, entry: dict[str, Any]) -> float:
        value = self._function(self._split, entry["index"], text)
        return as_number(value, f"{self._cfg.function} with a completion")

    def fingerprint(self) -> str:
        cfg = self._cfg
        sizes = [cfg.size] if self._split == "train" else [cfg.heldout_size]
        source = inspect.getsourcefile(inspect.unwrap(self._function))
        code = hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else ""
        first = self.item(0).messages if self._size else []
        identity = [cfg.kind, cfg.function.rpartition(":")[2], code, self._split, sizes, first]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def find_function(
    name: str, key: str = KEY, calls: Sequence[tuple[Any, ...]] = _CALLS, form: str = _FORM
) -> Callable[..., Any]:
    """The function that ``name``, the value of ``key``, names, imported. It takes the arguments of all ``calls``.

    Raises ``EnvError`` saying what about the name, the module or the function is wrong; ``form`` is how to write it.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise EnvError(key, f"{name!r} names no function" if name else "is empty, but env.kind is function", _EXAMPLE)
    module = _import(place, key)
    function = getattr(module, attribute, None)
    if function is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(attribute, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"functions there: {', '.join(names) or 'none'}"
        raise EnvError(key, f"{place} has no {attribute}", hint)
    if not callable(function):
        raise EnvError(key, f"{name} is a {type(function).__name__}, not a function", _EXAMPLE)
    _check_signature(function, name, key, calls, form)
    return function


def _import(place: str, key: str) -> ModuleType:
    try:
        return _import_file(Path(place), key) if place.endswith(".py") else importlib.import_module(place)
    except EnvError:
        raise
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise EnvError(
                key,
                f"there is no module {error.name}",
                "put its folder on PYTHONPATH, or give the file: path/to/file.py:function",
            ) from error
        raise EnvError(key, f"importing {place} failed: {error}", f"install or add {error.name}") from error
    except Exception as error:
        raise EnvError(key, f"importing {place} failed: {type(error).__name__}: {error}", "mend the module") from error


def _import_file(path: Path, key: str) -> ModuleType:
    """A file as a module named after its full path; its own folder is importable, as when Python runs it."""
    path = path.resolve()
    if not path.is_file():
        raise EnvError(key, f"there is no file {path}", "the path is relative to the folder the run is started in")
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _check_signature(
    function: Callable[..., Any], name: str, key: str, calls: Sequence[tuple[Any, ...]], form: str
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none; calling will tell
        return
    for arguments in calls:
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise EnvError(
                key,
                f"{name}{signature} cannot be called with {len(arguments)} arguments: {error}",
                f"write {form}",
            ) from error


def checked_item(made: Any, call: str) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """(messages, the other data) of what the function returned; ``call`` is how it was called, for the errors."""
    remedy = 'return a dict with "prompt" (text) or "messages" (a list of {"role", "content"})'
    if not isinstance(made, dict):
        raise EnvError(KEY, f"{call} returned {type(made).__name__} {made!r:.80}", remedy)
    if ("prompt" in made) == ("messages" in made):
        found = ", ".join(map(repr, made)) or "nothing"
        raise EnvError(KEY, f'{call} must return one of "prompt" and "messages", not {found}', remedy)
    data = {key: value for key, value in made.items() if key not in ("prompt", "messages")}
    try:
        plain = json.loads(json.dumps(data))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvError(KEY, f"{call} returned data that JSON cannot hold: {error}", "return plain values") from error
    if "messages" in made:
        return _checked_messages(made["messages"], call, remedy), plain
    if not isinstance(made["prompt"], str) or not made["prompt"]:
        raise EnvError(KEY, f"{call}: prompt is {type(made['prompt']).__name__} {made['prompt']!r:.80}", remedy)
    return [{"role": "user", "content": made["prompt"]}], plain


def _checked_messages(messages: Any, call: str, remedy: str) -> list[dict[str, str]]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise EnvError(KEY, f"{call}: messages is {type(messages).__name__} {messages!r:.80}", remedy)
    for number, message in enumerate(messages):
        good = isinstance(message, dict) and set(message) == {"role", "content"}
        if not good or message["role"] not in ROLES or not isinstance(message["content"], str):
            raise EnvError(
                KEY, f"{call}: messages[{number}] is {message!r:.80}", f"role is one of {', '.join(ROLES)}; {remedy}"
            )
    return [dict(message) for message in messages]
