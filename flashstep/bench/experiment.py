"""An experiment: a plan that is written before the first run, and the runs of its arms in balanced order.

A plan is a small JSON file beside the ledger; its SHA-256 (``sha256sum`` gives the same) is handed to every run and stands in
every ledger entry, so that metric, level, margin and number of rounds cannot be chosen after the results: another plan has
another hash, and the runs would not carry it. Starts processes; knows no statistic.
"""

import contextlib
import datetime
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from flashstep.bench.ledger import Entry, read
from flashstep.bench.origin import without_secret_flags
from flashstep.bench.stats.design import order

FORMAT = 2
ALPHAS = (0.0001, 0.5)  # the levels that a claim may have
CONTROL = "control"
OURS = ("--ledger", "--label", "--round", "--plan")  # flags that every run gets
GRACE_S = 60.0  # for an interrupted run to keep what it has
LOOK_S = 0.2
MOST_READ = 65_536  # bytes
TOLD_LINES = 40  # of a failed command's stderr


class Margin(msgspec.Struct, frozen=True, kw_only=True):
    """How much worse B may be: in the metric's unit, or ``of_a``: a share of A's mean."""

    value: float
    of_a: bool

    def amount(self, mean_a: float) -> float:
        return self.value * abs(mean_a) if self.of_a else self.value


def margin(text: str, *, is_accuracy: bool) -> Margin:
    """Of ``0.5`` (in the metric's unit), ``2%`` (of A's mean) or ``1pt`` (percentage points of an accuracy)."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(%|pt)?", text.strip())
    if not found or not float(found[1]):
        raise ValueError(
            f"the margin is {text!r}; it must be above 0, as 0.5 (in the metric's unit), 2% (of A) or 1pt (points of accuracy)"
        )
    if found[2] == "pt" and not is_accuracy:
        raise ValueError(
            f"the margin is {text!r}; points are of accuracy: give it in the metric's unit, or in % of A"
        )
    if is_accuracy and found[2] is None and float(found[1]) >= 1:
        raise ValueError(f"the margin is {text!r} of an accuracy between 0 and 1; is {found[1]}pt meant?")
    return Margin(value=float(found[1]) / (100 if found[2] else 1), of_a=found[2] == "%")


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is decided before the first run. ``arms`` are the commands by label, in the order A, B, control."""

    date: str
    metric: str
    alpha: float
    margin: str
    rounds: int
    arms: dict[str, str]
    format: int = FORMAT

    @property
    def schedule(self) -> list[tuple[int, str]]:
        return order(list(self.arms), rounds=self.rounds)


class Stated(NamedTuple):
    """A plan with the SHA-256 of its file."""

    plan: Plan
    digest: str
    file: Path


def plan_beside(ledger: Path) -> Path:
    return ledger.with_name(ledger.stem + ".plan.json")


def read_plan(file: Path) -> Stated:
    """``ValueError`` if it is none."""
    try:
        data = file.read_bytes()
        plan = msgspec.json.decode(data, type=Plan)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is no plan: {error}") from None
    wrong = [] if plan.format == FORMAT else [f"format {plan.format}; this flashstep reads {FORMAT}"]
    if list(plan.arms) not in (["A", "B"], ["A", "B", CONTROL]):
        wrong.append(
            f"its arms are {', '.join(plan.arms)}; they must be A, B and perhaps {CONTROL}, in this order"
        )
    for check in (lambda: check_alpha(plan.alpha), lambda: plan.schedule):
        try:
            check()
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError(f"{file}: {'; '.join(wrong)}")
    return Stated(plan, hashlib.sha256(data).hexdigest(), file)


def check_alpha(alpha: float) -> None:
    """``ValueError`` where it is no level."""
    if not ALPHAS[0] <= alpha <= ALPHAS[1]:
        raise ValueError(f"the level is {alpha}; it must be {ALPHAS[0]} to {ALPHAS[1]}")


@contextlib.contextmanager
def held(file: Path) -> Generator[int]:
    """The plan for this process and the runs that get the lock (a descriptor); ``ValueError`` where another experiment has it.

    It ends with the last of them: a run that outlives a killed compare is never measured beside.
    """
    with file.open("rb") as plan:
        try:
            fcntl.flock(plan, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another flashstep bench compare, or a run that one left behind, is at the experiment of {file}"
            ) from None
        yield plan.fileno()


def state(plan: Plan, ledger: Path) -> Stated:
    """Write ``plan`` beside ``ledger``, or go on with the same one that stands there.

    ``ValueError`` where another one stands there and has runs; without any it is written anew.
    """
    file = plan_beside(ledger)
    if file.exists():
        stated = read_plan(file)
        names = [name for name in Plan.__struct_fields__ if name != "date"]
        differ = [
            f"{name} is {getattr(stated.plan, name)!r} there and {getattr(plan, name)!r} here"
            for name in names
            if getattr(stated.plan, name) != getattr(plan, name)
        ]
        if differ and _kept(stated, ledger):
            raise ValueError(
                f"{file} was written before the runs of {ledger} and says otherwise: {'; '.join(differ)}. "
                "Go on as it says, or begin another ledger"
            )
        if not differ:
            return stated
    if ledger.exists() and ledger.stat().st_size:
        raise ValueError(
            f"{ledger} has entries and no plan of theirs in {file}: a plan stands before its runs; begin another ledger"
        )
    text = msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"
    try:
        with file.open("xb") as new:
            new.write(text)
    except FileExistsError:
        with held(file):
            file.write_bytes(text)
    return read_plan(file)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def argv(command: str) -> list[str]:
    """The words of an arm's command; ``ValueError`` where it cannot be an arm. ``flashstep`` is this one if PATH has none."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"the command {command!r} cannot be read: {error}") from None
    if not words:
        raise ValueError("an arm's command is empty")
    given = [word for word in words if word.partition("=")[0] in OURS]
    if given:
        raise ValueError(f"{', '.join(given)} in {command!r}: each run gets its own; leave them out")
    if any(word.partition("=")[0] == "--runs" for word in words):
        raise ValueError(
            f"--runs in {command!r}: each round is one run of each arm; leave it out, and give --rounds"
        )
    if shutil.which(words[0]) is None:
        if words[0] != "flashstep":
            raise ValueError(f"there is no program {words[0]!r} to run {command!r}")
        words = [sys.executable, "-m", "flashstep", *words[1:]]
    return words


def without_place(command: str) -> str:
    """``command`` as its arm was given, without the flags that each run gets."""
    words, kept, skip = shlex.split(command), [], False
    for word in words:
        if not skip and word.partition("=")[0] not in OURS:
            kept.append(word)
        skip = not skip and word in OURS
    return shlex.join(kept)


def is_of(command: str, recorded: str) -> bool:
    """Whether ``recorded`` (an origin's command: "flashstep" and what followed the program) is a run of an arm's ``command``.

    ``command`` ends in it, or is a shell's (sh -c '...' arm) whose text has it word for word, with "$@" behind it.
    """
    planned, words = without_secret_flags(shlex.split(command)), shlex.split(without_place(recorded))[1:]
    if not words:
        return False
    whole = f'flashstep {shlex.join(words)} "$@"'
    return (len(words) < len(planned) and planned[-len(words) :] == words) or any(whole in w for w in planned)


class Run(NamedTuple):
    """One run that is due."""

    round: int
    arm: str
    argv: list[str]

    @property
    def words(self) -> str:
        return f"round {self.round}, arm {self.arm}: {shlex.join(without_secret_flags(self.argv))}"


class RunFailed(ValueError):
    """An arm's command did not keep a complete result; the message shows it with the end of its stderr."""


def due(stated: Stated, ledger: Path) -> list[Run]:
    """The runs without a complete entry yet, in the plan's order, with their whole commands."""
    ended = {(entry.round, entry.label) for entry in _kept(stated, ledger) if entry.complete}
    return [
        Run(r, arm, _command(stated, ledger, r, arm))
        for r, arm in stated.plan.schedule
        if (r, arm) not in ended
    ]


def _command(stated: Stated, ledger: Path, r: int, arm: str) -> list[str]:
    place = ["--ledger", str(ledger.absolute()), "--label", arm, "--round", str(r), "--plan", stated.digest]
    return [*argv(stated.plan.arms[arm]), *place]


def _kept(stated: Stated, ledger: Path) -> list[Entry]:
    if not ledger.exists():
        return []
    return [entry for entry in read(ledger) if entry.plan == stated.digest]


def run_all(
    stated: Stated, ledger: Path, *, lock: int, said: Callable[[Run, str], None], done: Callable[[Run], None]
) -> Iterator[Run]:
    """Run what is due, one after the other, and give each as it begins.

    ``said`` is told the last line that a run wrote to its stderr, some times a second; ``done`` when it has kept its entry.
    ``RunFailed`` ends it; ``KeyboardInterrupt`` is passed on to the run, which keeps what it has, and raised again. ``lock`` is
    what ``held`` gave.
    """
    if read_plan(stated.file).digest != stated.digest:
        raise ValueError(f"{stated.file} was changed since it was read")
    for run in due(stated, ledger):
        yield run
        before = len(_kept(stated, ledger))
        with tempfile.TemporaryDirectory(prefix="flashstep-arm-") as folder:
            told = Told(Path(folder) / "stdout", Path(folder) / "stderr")
            code = _finish(run, told, said, lock=lock)
            new = [
                entry
                for entry in _kept(stated, ledger)[before:]
                if (entry.round, entry.label) == (run.round, run.arm)
            ]
            if code or not new or not all(entry.complete for entry in new):
                raise RunFailed(_failure(run, code, new, told))
        done(run)


class Told(NamedTuple):
    """Where a run's output lies while it runs."""

    out: Path
    err: Path


def _finish(run: Run, told: Told, said: Callable[[Run, str], None], *, lock: int) -> int:
    """The exit code of ``run``. It has a session of its own, so that only we decide what a Ctrl-C does to it."""
    with told.out.open("wb") as out, told.err.open("wb") as err:
        process = subprocess.Popen(
            run.argv,
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(lock,),
        )
    try:
        while True:
            try:
                return process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                said(run, (_end(told.err) or [""])[-1])
    except BaseException:
        _signal(process, signal.SIGINT)
        try:
            process.wait(GRACE_S)
        finally:
            if process.poll() is None:
                _signal(process, signal.SIGKILL)
                process.wait()
        raise


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the run and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end(file: Path) -> list[str]:
    """The last lines of what was written."""
    with file.open("rb") as written:
        written.seek(max(file.stat().st_size - MOST_READ, 0))
        text = written.read().decode(errors="replace")
    return text.replace("\r", "\n").strip().splitlines()[-TOLD_LINES:]


def _failure(run: Run, code: int, new: Sequence[Entry], told: Told) -> str:
    faults = [fault for entry in new for fault in entry.faults]
    if code:
        why = f"exit code {code}"
    elif new:
        why = "its entry is not complete"
    else:
        why = "it ended well and kept no entry; is it a flashstep bench or eval command?"
    end = _end(told.err) or _end(told.out)
    stands = any(entry.complete for entry in new)
    lines = [
        f"{run.words}",
        f"{why}{': ' if faults else ''}{'; '.join(faults)}",
        *(f"  | {line}" for line in end),
    ]
    rest = "what ran before it is kept; the same command goes on from here"
    if stands:
        rest = (
            "its entry is complete and stands: it is not run again, because a run is not repeated for how it came out. "
            "The same command goes on after it"
        )
    return "\n".join([*lines, rest])
