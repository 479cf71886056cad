"""A measurement for tests of experiments: a process with the flags of ``Recording`` that keeps one entry and knows no engine.

``python -m tests.bench.arm VALUE [--fail-round FILE] [--silent] [--wait S] [--began FILE] [--exit CODE]`` and the flags of
``Recording``.
"""

import argparse
import datetime
import shlex
import sys
import time
from pathlib import Path

import msgspec

from flashstep.bench.ledger import append
from tests.bench.entries import MACHINE, run


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("value", type=float)
    parser.add_argument("--fail-round", type=Path)
    parser.add_argument("--silent", action="store_true")
    parser.add_argument("--wait", type=float, default=0.0)
    parser.add_argument("--began", type=Path)
    parser.add_argument("--exit", type=int, default=0)
    for flag in ("--ledger", "--label", "--plan"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--round", type=int, required=True)
    given = parser.parse_args()
    if given.silent:
        return 0
    if (
        given.fail_round is not None
        and given.fail_round.exists()
        and given.round == int(given.fail_round.read_text())
    ):
        print("step 17 of 100", file=sys.stderr)
        print("RuntimeError: the [red]server[/red] died", file=sys.stderr)
        return 3
    entry = run(
        given.label,
        given.round,
        given.value + given.round % 3,
        subject={"value": given.value},
        plan=given.plan,
    )
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    command = shlex.join(["flashstep", *sys.argv[1:]])
    entry = msgspec.structs.replace(entry, origin=msgspec.structs.replace(MACHINE, date=now, command=command))
    try:
        print(f"arm {given.label}: waiting", file=sys.stderr, flush=True)
        if given.began is not None:
            given.began.touch()
        time.sleep(given.wait)
    except KeyboardInterrupt:
        append(Path(given.ledger), msgspec.structs.replace(entry, complete=False, faults=("interrupted",)))
        return 130
    append(Path(given.ledger), entry)
    return given.exit


if __name__ == "__main__":
    sys.exit(main())
