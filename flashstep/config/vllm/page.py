"""The tables of docs/from-vllm.md: ``python -m flashstep.config.vllm.page docs/from-vllm.md`` writes them anew.

The text between two marks is replaced; what stands around it is written by hand.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from flashstep.config.vllm.commands import COMMANDS, VARIABLES
from flashstep.config.vllm.flags import ON, Flag, Shape, Standing
from flashstep.config.vllm.line import RENAMED
from flashstep.config.vllm.table import TABLE
from flashstep.config.vllm.works import WORKS

BEGIN = "<!-- tables: python -m flashstep.config.vllm.page docs/from-vllm.md -->"
END = "<!-- end of tables -->"


def tables() -> str:
    """All of vLLM's flags, commands and variables, as Markdown."""
    return "\n".join([*_works(), *_others(), *_commands(), *_variables()])


def with_tables(page: str) -> str:
    """``page`` with its tables as they must be."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables()}\n{END}{tail}"


def _works() -> Iterator[str]:
    yield f"## {Standing.WORKS.value}\n"
    yield "| vLLM | here |\n|---|---|"
    for name, remark in sorted(WORKS.items()):
        yield f"| `--{name}` | {remark or 'the same'} |"
    for name, renamed in sorted(RENAMED.items()):
        key = f", `{renamed.key}`" if renamed.key else ""
        values = "".join(f"; {_switch(name, theirs)} is `{ours}`" for theirs, ours in renamed.values.items())
        yield f"| `--{name}` | `--{renamed.ours}`{key}{values} |"
    yield "| `--model` | MODEL |"
    yield ""


def _switch(name: str, value: str) -> str:
    return f"`--{name}`" if value == ON else f"`--no-{name}`"


def _others() -> Iterator[str]:
    intros = {
        Standing.ALWAYS: "Taken as it stands here, or with a value in brackets: it asks for what is so. Any other is refused.",
        Standing.LATER: "Refused; taken with the value in brackets.",
        Standing.NEVER: "Refused; taken with the value in brackets.",
    }
    for standing, intro in intros.items():
        yield f"## {standing.value}\n\n{intro}\n"
        yield "| vLLM | here | use |\n|---|---|---|"
        for (reason, instead), flags in _by_reason(standing).items():
            yield f"| {', '.join(_shown(flag) for flag in flags)} | {reason} | {instead} |"
            for flag in flags:
                for key, known in flag.keys.items():
                    allowed = ", ".join(json.dumps(value) for value in known.taken)
                    yield f"| `--{flag.name}.{key}` [{allowed}] | {known.reason} | |"
        yield ""


def _by_reason(standing: Standing) -> dict[tuple[str, str], list[Flag]]:
    found: dict[tuple[str, str], list[Flag]] = {}
    for flag in TABLE.values():
        if flag.standing is standing:
            found.setdefault((flag.reason, flag.instead), []).append(flag)
    return found


def _shown(flag: Flag) -> str:
    """A flag with what is taken; of a switch that is refused the form that is."""
    if flag.shape is Shape.SWITCH:
        values = flag.taken if flag.standing is Standing.ALWAYS else (ON,)
        return " or ".join(_switch(flag.name, value) for value in values)
    allowed = f" [{', '.join(flag.taken)}]" if flag.taken else ""
    return f"`--{flag.name}`{allowed}"


def _commands() -> Iterator[str]:
    yield "## Other commands\n\n| vLLM | here |\n|---|---|"
    for words, here in COMMANDS.items():
        yield f"| `vllm {words}` | {here} |"
    yield ""


def _variables() -> Iterator[str]:
    yield "## Environment variables\n"
    yield (
        "None of vLLM's is read. Behind `flashstep vllm serve` those that are set are named. `VLLM_API_KEY` without a "
        "key among the flags is refused, behind `flashstep serve` too: "
        "a server without the key that was meant would be worse than none.\n"
    )
    yield "| vLLM | here |\n|---|---|"
    for name, here in VARIABLES.items():
        yield f"| `{name}` | {here} |"


def main(file: Path) -> None:
    file.write_text(with_tables(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
