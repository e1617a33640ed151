"""From the command line to a typed Config, with errors that name the key and the remedy.

The schema reaches Hydra as plain values (``register_schema``), so that a mistake in a YAML file is not one of Hydra's
messages about nodes but one of ours, and all mistakes are reported together by ``resolve``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrl.config.errors import ConfigError, Problem
from asyncrl.config.files import from_dict, to_dict
from asyncrl.config.schema import Config
from asyncrl.config.typed import free_keys, known_keys, unknown_key

REPOSITORY = Path(__file__).resolve().parents[2]


def register_schema() -> None:
    """Makes the schema's defaults known to Hydra as the config ``schema``; below a free node any key may be set."""
    OmegaConf.register_new_resolver("asyncrl_scratch", scratch_dir, replace=True)
    node = OmegaConf.create(to_dict(Config()))
    for key in free_keys(Config):
        OmegaConf.set_struct(OmegaConf.select(node, key), False)
    ConfigStore.instance().store(name="schema", node=node)


@cache
def scratch_dir() -> str:
    """A folder for what Hydra insists on writing about a sweep; ``discard_scratch_dir`` removes it."""
    return tempfile.mkdtemp(prefix="asyncrl-hydra-")


def discard_scratch_dir() -> None:
    """Removes the folder once Hydra has written to it, as a failed run ends without clean-up."""
    if scratch_dir.cache_info().currsize:
        shutil.rmtree(scratch_dir(), ignore_errors=True)
        scratch_dir.cache_clear()


def config_groups(conf: Path) -> dict[str, list[str]]:
    """Hydra's config groups below ``conf`` (``experiment``, ``env``, ...) and the names of their choices."""
    folders = [path for path in conf.iterdir() if path.is_dir()]
    return {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}


def check_overrides(arguments: Iterable[str], groups: Mapping[str, list[str]]) -> None:
    """Raises ConfigError for arguments whose key, or whose choice of a group, does not exist, before Hydra composes.

    ``groups``: see ``config_groups``.
    """
    parser = OverridesParser.create()
    keys, free = known_keys(Config), free_keys(Config)
    problems = []
    for argument in arguments:
        if argument.startswith("-") or ("=" not in argument and not argument.startswith("~")):
            continue  # an option of Hydra or the value of one
        try:
            (override,) = parser.parse_overrides([argument])
        except OverrideParseException as error:
            reason = str(error).splitlines()[0]
            problems.append(Problem(argument, f"cannot be read: {reason}", "quote the value: 'key=\"value\"'"))
            continue
        if problem := _override_problem(override, keys, free, groups):
            problems.append(problem)
    if problems:
        raise ConfigError(problems)


def _override_problem(
    override: Override, keys: list[str], free: list[str], groups: Mapping[str, list[str]]
) -> Problem | None:
    key = override.key_or_group
    if key in groups:
        if override.type is OverrideType.CHANGE and key == "experiment":
            value = override.get_value_element_as_str()
            return Problem(key, "no experiment is chosen yet, so there is none to change", f"write +{key}={value}")
        return _unknown_choice(override, groups[key])
    if key.split(".")[0].split("/")[0] == "hydra" or key in keys or any(key.startswith(node + ".") for node in free):
        return None
    return unknown_key(key, [*keys, *groups])


def _unknown_choice(override: Override, choices: list[str]) -> Problem | None:
    swept = override.is_sweep_override()
    for value in override.sweep_string_iterator() if swept else [override.value()]:
        if isinstance(value, str) and value.removesuffix(".yaml") not in choices:
            return Problem(override.key_or_group, f"there is no {value}", "choose one of: " + ", ".join(choices))
    return None


def resolve(composed: DictConfig) -> Config:
    """The typed Config of what Hydra composed, its paths made absolute. Raises ConfigError."""
    try:
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = error.full_key or "configuration"
        raise ConfigError([Problem(key, str(error).splitlines()[0], "set it, or fix what it refers to")]) from None
    assert isinstance(values, dict)
    config = from_dict({str(key): value for key, value in values.items()})
    if config.model.path:
        config.model.path = str(locate(config.model.path))
    if config.model.adapter:
        config.model.adapter = str(locate(config.model.adapter))
    for source in (*config.sft.data, *config.sft.heldout):
        source.path = str(locate(source.path)) if source.path else ""
    if config.resume:
        config.resume = str(Path(config.resume).resolve())
    return config


def locate(path: str) -> Path:
    """An absolute path: relative ones are looked for in the working directory, then in the repository."""
    here = Path(os.path.abspath(Path(path).expanduser()))
    shipped = REPOSITORY / path
    return shipped if shipped.exists() and not here.exists() else here
