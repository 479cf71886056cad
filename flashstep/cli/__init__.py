"""The command line: the composition root, one module a command.

Parses flags into frozen options (tyro refuses unknown ones and names near matches), runs the command, and turns what a user
can cause into one message and an exit code: 0 done, 1 the answer is no, 2 the command line or a file is wrong, 130 interrupted.
What a command composes is imported when it runs: starting a server costs its process no torch.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from flashstep.cli.bench import Bench
from flashstep.cli.budget import Budget
from flashstep.cli.chat import Chat
from flashstep.cli.check import Check
from flashstep.cli.eval import Eval
from flashstep.cli.generate import Generate
from flashstep.cli.kernels import Kernels
from flashstep.cli.serve import Serve
from flashstep.cli.terminal import INTERRUPTED, OUT
from flashstep.cli.vllm import about, own_arguments
from flashstep.config.env import limit_spinning

USAGE_ERROR = 2

Command = (
    Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Chat, tyro.conf.subcommand("chat")]
    | Annotated[Check, tyro.conf.subcommand("check")]
    | Annotated[Budget, tyro.conf.subcommand("budget")]
    | Annotated[Kernels, tyro.conf.subcommand("kernels")]
    | Annotated[Eval, tyro.conf.subcommand("eval")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code."""
    given = sys.argv[1:] if argv is None else argv
    if (told := about(given)) is not None:
        OUT.print(told)
        return 0
    try:
        arguments = own_arguments(given)
    except ValueError as error:
        sys.stderr.write(f"flashstep: {error}\n")
        return USAGE_ERROR
    command = tyro.cli(
        Command,
        prog="flashstep",
        description="An exact, readable inference engine for the DeepSeek-V4.1-Flash architecture. A line written for vLLM: "
        "flashstep vllm serve ... (docs/from-vllm.md).",
        args=arguments,
        config=(tyro.conf.EnumChoicesFromValues, tyro.conf.OmitSubcommandPrefixes),
    )
    limit_spinning()
    try:
        return command.run()
    except ValueError as error:
        sys.stderr.write(f"flashstep: {error}\n")
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
