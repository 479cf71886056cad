"""Which checkpoint a command means: a folder, a name in the Hugging Face cache, or the tiny model that comes with the package."""

import re
from importlib import resources
from pathlib import Path
from typing import Annotated

import tyro

from flashstep.config.errors import ConfigError

TINY_NAME = "flashstep-tiny"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# A positional argument of every command. None is the embedded tiny model.
Model = Annotated[
    Path | None,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="[MODEL]",
        help="checkpoint folder (released layout), or ORG/NAME in the Hugging Face cache; without it the embedded tiny model",
    ),
]


def tiny_model() -> Path:
    """The folder of the embedded tiny model, inside the installed package."""
    return Path(str(resources.files("flashstep") / "tiny"))


def resolve(model: Path | None, revision: str | None = None) -> Path:
    """The checkpoint folder; ``ConfigError`` if there is none. ``revision`` is of a name in the Hugging Face cache."""
    folder = tiny_model() if model is None else model.expanduser()
    if _is_name(model):
        folder = _cached(str(model), revision)
    elif revision is not None:
        raise ConfigError(
            "--revision", ["it is of a name in the Hugging Face cache (ORG/NAME), and a folder has none"]
        )
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


def _is_name(model: Path | None) -> bool:
    return (
        model is not None and not model.expanduser().is_dir() and HUB_NAME.fullmatch(str(model)) is not None
    )


def _cached(name: str, revision: str | None) -> Path:
    """The snapshot of ``name`` in the Hugging Face cache. Nothing is downloaded: a checkpoint may have hundreds of GB."""
    from huggingface_hub import snapshot_download  # takes half a second to import
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError as error:
        which = "" if revision is None else f" --revision {revision}"
        problem = f"it is no folder, and not in the Hugging Face cache; to have it there: `hf download {name}{which}`"
        raise ConfigError(name, [problem]) from error


def served_name(model: Path | None, folder: Path) -> str:
    """The name under which ``model``, found in ``folder``, is served unless another is chosen."""
    if folder == tiny_model():
        return TINY_NAME
    return str(model) if _is_name(model) else folder.resolve().name
