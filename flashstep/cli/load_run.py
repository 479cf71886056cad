"""What the commands that load a server have in common: the flags that say how it is asked, and how a run is kept.

Takes flags; gives clients, and an exit code: 0 for a whole run, 1 for one that ended early or failed too often, 130 after Ctrl-C
or SIGTERM. The ledger's entry and the raw file are there in all three cases. Knows no workload.
"""

import math
import os
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from flashstep.bench.ledger import Entry
from flashstep.bench.origin import Origin, origin
from flashstep.cli.outputs import output_problems
from flashstep.cli.recording import Recording
from flashstep.cli.terminal import INTERRUPTED, OUT, note
from flashstep.config.objects import read_object

if TYPE_CHECKING:
    from flashstep.bench.load.client import Client
    from flashstep.bench.load.stopping import Stopping

NOT_VALID = 1
EXAMPLE = '{"top_k": 1}'


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How a server is asked."""

    model: str | None = None
    """model to ask for; without it the first that the server lists"""
    api_key: str | None = None
    """sent as a bearer token; others on this machine see it with `ps`, unlike that of --api-key-file"""
    api_key_file: Path | None = None
    """file whose first line is the key"""
    header: tuple[str, ...] = ()
    """further HTTP headers, NAME=VALUE each"""
    extra_body: str = "{}"
    """further fields of every request, a JSON object such as '{"temperature": 1}'"""
    ignore_eos: bool = True
    """ask for answers of the whole length (servers that do not know the field may refuse it)"""
    ready_check_timeout_sec: float = 600.0
    """longest wait for the server to be there; 0 does not wait"""
    raw: Path | None = None
    """the file of every chunk's time, a line a request; without it in LEDGER.raw/"""

    def problems(self, ours: set[str]) -> Iterator[str]:
        """All that is wrong, in sentences; ``ours`` are the fields of a request that are no one's to give."""
        wrong: list[str] = []
        pairs("--header", self.header, "=", wrong)
        yield from wrong
        extra, problems = read_object(self.extra_body, example=EXAMPLE)
        yield from (f"--extra-body: {problem}" for problem in problems)
        yield from (f"--extra-body has {name}, which the plan sets" for name in sorted(ours & extra.keys()))
        if not 0 <= self.ready_check_timeout_sec < math.inf:
            yield f"--ready-check-timeout-sec is {self.ready_check_timeout_sec}; it is at least 0"
        if self.raw is not None and self.raw.exists():
            yield f"--raw is {self.raw}, which is there already; name a new file"
        else:
            yield from output_problems({"--raw": self.raw})
        if self.api_key is not None and self.api_key_file is not None:
            yield "--api-key and --api-key-file: give one of both"
        try:
            self._key()
        except ValueError as error:
            yield str(error)

    def extra(self) -> dict[str, Any]:
        return dict(read_object(self.extra_body, example=EXAMPLE)[0])

    def client(self, url: str, *, timeout_s: float) -> "Client":
        from flashstep.bench.load.client import Client

        return Client(
            url, api_key=self._key(), timeout_s=timeout_s, headers=pairs("--header", self.header, "=", [])
        )

    def _key(self) -> str | None:
        if self.api_key_file is None:
            return self.api_key
        try:
            lines = self.api_key_file.read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-key-file {self.api_key_file} cannot be read: {error}") from None
        if not lines:
            raise ValueError(f"--api-key-file {self.api_key_file} holds no key")
        return lines[0]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. ``is_valid``: enough was answered to say something of the server (H4)."""

    entry: Entry
    is_valid: bool


Measure = Callable[["Stopping", Callable[[Any], None] | None, Origin], Awaitable[Run]]


def run_load(command: Coroutine[Any, Any, int]) -> int:
    """The exit code of ``command`` in an event loop that adds least to the times."""
    import uvloop

    return uvloop.run(command)


async def keep_run(measure: Measure, *, raw: Path | None, recording: Recording) -> int:
    """``measure``, told how to be stopped, where records go and where figures come from; its faults shown and its entry kept.

    Until all is kept, Ctrl-C and SIGTERM end the run and nothing else.
    """
    from flashstep.bench.load.raw import RawFile
    from flashstep.bench.load.stopping import Stopping

    run_id, ledger = uuid.uuid4().hex[:12], recording.ledger
    raw = raw or recording.raw_file(f"{run_id}.jsonl")
    with Stopping() as stopping:
        with ExitStack() as stack:
            file = None if raw is None else stack.enter_context(RawFile(raw))
            run = await measure(stopping, None if file is None else file.take, origin())
        name, faults = None, run.entry.faults
        if file is not None:
            note(f"every chunk's time is in {file.path}")
            name = os.path.relpath(file.path, ledger.parent) if ledger else str(file.path)
            faults = (*faults, file.fault) if file.fault else faults
        for fault in faults:
            OUT.print(f"FAULT: {fault}")
        entry = msgspec.structs.replace(run.entry, id=run_id, raw=name, faults=faults)
        try:
            recording.keep(entry)
        except OSError as error:
            note(f"FAULT: {error}")
            return NOT_VALID
    if stopping.is_asked and not entry.complete:
        return INTERRUPTED
    return 0 if entry.complete and run.is_valid else NOT_VALID


def pairs(flag: str, given: tuple[str, ...], sign: str, wrong: list[str]) -> dict[str, str]:
    """NAME and VALUE of each text; what is none is added to ``wrong``."""
    found: dict[str, str] = {}
    for text in given:
        name, found_sign, value = text.partition(sign)
        if not (name and found_sign and value):
            wrong.append(f"{flag}: {name!r} is not NAME{sign}VALUE")
        elif name in found:
            wrong.append(f"{flag} names {name} twice")
        found[name] = value
    return found
