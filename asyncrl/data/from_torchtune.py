"""Says how a torchtune run is done here: ``python -m asyncrl.data.from_torchtune recipe.yaml``.

Prints the command line, then what became of every leaf of the file: the keys it was translated to, why it means nothing
here, or that it has no equivalent and what is nearest. ``key=value`` after the file overrides it, as with ``tune run``.
See docs/torchtune.md. Needs neither torch nor torchtune.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from asyncrl.data.torchtune.leaves import RecipeError
from asyncrl.data.torchtune.printing import report
from asyncrl.data.torchtune.reading import read
from asyncrl.data.torchtune.recipes import launch_of

USER_ERROR_STATUS = 2


def load(path: Path, overrides: list[str]) -> tuple[dict[str, Any], str]:
    """(the configuration with its interpolations resolved, the text of the file). Raises ``RecipeError``."""
    try:
        text = path.read_text()
        found = OmegaConf.create(text)
        if not isinstance(OmegaConf.to_container(found), dict):
            raise RecipeError("is a list, not a configuration\n    -> give the YAML file that tune run takes")
        resolved = OmegaConf.to_container(OmegaConf.merge(found, OmegaConf.from_dotlist(overrides)), resolve=True)
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}\n    -> give the YAML file that tune run takes") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"is not text: {error}\n    -> give the YAML file that tune run takes") from error
    except YAMLError as error:
        raise RecipeError(f"is not YAML: {' '.join(str(error).split())}\n    -> mend the file") from error
    except OmegaConfBaseException as error:
        raise RecipeError(
            f"cannot be resolved: {str(error).splitlines()[0]}\n    -> mend the file, or the keys after it"
        ) from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}, text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m asyncrl.data.from_torchtune", description="says how a torchtune run is done here"
    )
    parser.add_argument("recipe", type=Path, metavar="recipe.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as after tune run --config")
    parser.add_argument("--recipe", dest="name", default="", help="torchtune's name of the recipe, if not in the file")
    parser.add_argument("--ranks", type=int, default=0, help="torchtune's --nproc_per_node")
    parser.add_argument("--samples", type=int, default=0, help="conversations in the data, if it is not here yet")
    parser.add_argument("--mean-tokens", type=int, default=0, help="mean length of a conversation, for packed data")
    given = parser.parse_intermixed_args(arguments)
    try:
        config, text = load(given.recipe, given.overrides)
        launch = launch_of(config, text, given.name, given.ranks)
        reading = read(config, launch, given.samples, given.mean_tokens)
    except RecipeError as error:
        print(f"from_torchtune: {given.recipe}: {error}", file=sys.stderr)
        return USER_ERROR_STATUS
    print(report(reading, reading.finish(), launch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
