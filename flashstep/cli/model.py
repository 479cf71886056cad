"""Which checkpoint a command means: the folder given, or the tiny model that comes with the package."""

from importlib import resources
from pathlib import Path
from typing import Annotated

import tyro

from flashstep.config.errors import ConfigError

TINY_NAME = "flashstep-tiny"
# A positional argument of every command. None is the embedded tiny model.
Model = Annotated[
    Path | None,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="[MODEL]", help="checkpoint folder (released layout); without it the embedded tiny model"
    ),
]


def tiny_model() -> Path:
    """The folder of the embedded tiny model, inside the installed package."""
    return Path(str(resources.files("flashstep") / "tiny"))


def resolve(model: Path | None) -> Path:
    """The checkpoint folder; ``ConfigError`` if there is none."""
    folder = tiny_model() if model is None else model.expanduser()
    if not folder.is_dir():
        raise ConfigError(
            str(folder),
            [
                "it is no folder; MODEL is the path of a checkpoint on disk (config.json, tokenizer.json, safetensors)"
            ],
        )
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if missing:
        raise ConfigError(str(folder), [f"it has no {name}" for name in missing])
    return folder


def served_name(folder: Path) -> str:
    """The name under which a checkpoint is served unless another is chosen."""
    return TINY_NAME if folder == tiny_model() else folder.resolve().name
