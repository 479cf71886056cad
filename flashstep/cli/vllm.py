"""``flashstep vllm ...`` and vLLM's flags behind ``flashstep serve``: lines written for vLLM become ours, or are refused.

A refused line starts nothing: one message names each flag that has no counterpart, why, and what to use instead.
"""

from collections.abc import Sequence

import msgspec

import flashstep
from flashstep.cli.terminal import note
from flashstep.config.engine_options import EngineOptions
from flashstep.config.env import set_variables
from flashstep.config.errors import ConfigError
from flashstep.config.server import ServerOptions
from flashstep.config.vllm.commands import API_KEY, COMMANDS, VARIABLES, answer
from flashstep.config.vllm.line import Translation, translate
from flashstep.config.vllm.reading import VERSION

HELP = {"-h", "--help"}
OTHER_DEFAULTS = {  # where a flag that is left out means something else in vLLM
    "host": "every interface",
    "max-num-seqs": "1024 on a large GPU",
    "max-num-batched-tokens": "8192 on a large GPU",
    "prefix-hit-policy": "bounded (--swa-bounded-replay)",
}


def own_arguments(arguments: Sequence[str]) -> list[str]:
    """``arguments`` of the program in flags of ours; ``ConfigError`` with all that cannot be meant here."""
    match list(arguments):
        case ["vllm", "serve", *rest]:
            return ["serve", *(rest if HELP & set(rest) else _pasted(rest))]
        case ["vllm", *words]:
            told = f"{' '.join(['vllm', *words])} is not known" if words else "vllm needs a command"
            raise ValueError(answer(words) or f"{told}; known behind vllm are {_known()}")
        case ["serve", *rest] if not HELP & set(rest):
            translation = translate(rest)
            _refuse([*translation.problems, *_key_problems(translation)])
            return ["serve", *translation.arguments]
        case unchanged:
            return unchanged


def about(arguments: Sequence[str]) -> str | None:
    """What ``--version``, and ``--help`` behind ``vllm``, print; None if ``arguments`` ask for neither."""
    match list(arguments):
        case ["--version"] | ["vllm", "-v" | "--version"]:
            return f"flashstep {flashstep.__version__} (takes the command line of vLLM {VERSION})"
        case ["vllm", "-h" | "--help"]:
            return (
                "usage: flashstep vllm serve MODEL [vLLM's flags]\n\nStarts `flashstep serve` with what the flags mean here, or"
                f" says which have no counterpart (docs/from-vllm.md). Known behind vllm are {_known()}; all but serve print"
                " what to run instead."
            )
        case _:
            return None


def _known() -> str:
    return ", ".join(["serve", *COMMANDS])


def _key_problems(translation: Translation) -> list[str]:
    """A server without the key that was meant would be worse than none."""
    if API_KEY not in set_variables(API_KEY) or {"api-key", "api-key-file"} & translation.names:
        return []
    return [
        f"{API_KEY} is set, and not read here: say {VARIABLES[API_KEY]}, or unset it to serve without a key"
    ]


def _pasted(rest: Sequence[str]) -> list[str]:
    """The arguments of a ``vllm serve`` line: with vLLM's name for the model, and a word about what is read nowhere."""
    translation = translate(rest)
    _refuse([*translation.problems, *_key_problems(translation)])
    for name in set_variables("VLLM_"):
        if name != API_KEY:
            note(
                f"{name} is set and not read here; in its place: {VARIABLES.get(name, 'flags (docs/from-vllm.md)')}"
            )
    note(f"left out, and not what vLLM takes: {_other_defaults(translation)} (docs/from-vllm.md)")
    if translation.model is None or "served-model-name" in translation.names:
        return translation.arguments
    return [*translation.arguments, "--served-model-name", translation.model]


def _other_defaults(translation: Translation) -> str:
    defaults = {
        item.name.replace("_", "-"): item.default
        for options in (EngineOptions, ServerOptions)
        for item in msgspec.structs.fields(options)
    }
    parts = []
    for name, theirs in OTHER_DEFAULTS.items():
        if name not in translation.names:
            value = getattr(defaults[name], "value", defaults[name])
            parts.append(f"--{name} is {value} (vLLM: {theirs})")
    return ", ".join(parts) or "nothing"


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("the command line", problems)
