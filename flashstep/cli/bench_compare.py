"""``flashstep bench compare``: two arms, run in turns or read from ledgers, and what may be claimed of them."""

import shlex
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import tyro
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from flashstep.bench.origin import without_secret_flags
from flashstep.cli.extras import require_bench
from flashstep.cli.terminal import NOTES, OUT, note, require_outputs

if TYPE_CHECKING:
    from flashstep.bench.arms import Arms
    from flashstep.bench.claim import Claim
    from flashstep.bench.experiment import Plan, Run, Stated

ALPHA = 0.05
REFUSED = 1


@dataclass(frozen=True, kw_only=True)
class BenchCompare:
    """Hold arm B against arm A and say what may be claimed: one paragraph with its interval, a table, and where the raw data is.

    An arm is a ledger (x.jsonl, or x.jsonl:LABEL), or a quoted flashstep bench or eval command (also another checkout's), which
    is run in turns with the other arm's: A B, B A, A B, ... A plan with metric, level, margin and rounds is written beside the
    ledger first; the same command goes on with an experiment that was interrupted. Exit code 1: the design supports no claim.
    """

    a: tyro.conf.Positional[str]
    """the arm that is compared with"""
    b: tyro.conf.Positional[str]
    """the arm that is judged"""
    metric: str = ""
    """the one that the claim is about, as step_us, ttft_ms:p90 or accuracy; all others stand in a table without words"""
    control: str = ""
    """a third arm of A's build, which shows how far it differs from itself: A runs A's command again; or a ledger"""
    rounds: int | None = None
    """how often each arm runs: even, with a control a multiple of 6 (all orders of three); without it the fewest that can reach
    the level"""
    ledger: Path | None = None
    """file of JSON lines that the runs are kept in"""
    alpha: float | None = None
    """level: how often arms without a difference may be called different (0.05 without it)"""
    margin: str = ""
    """how much worse B may be and still pass: 0.5 (in the metric's unit), 2% (of A) or 1pt (points of accuracy)"""
    plan: Path | None = None
    """the plan that was written before the runs, where it does not lie beside the ledger"""
    plan_only: bool = False
    """write the plan, print each run's command in order, and run nothing"""
    json: Path | None = None
    """write the whole claim to this file"""
    svg: Path | None = None
    """draw rounds, differences and intervals into this file"""
    png: Path | None = None
    """the same as PNG"""

    def run(self) -> int:
        outputs = {"--json": self.json, "--svg": self.svg, "--png": self.png, "--ledger": self.ledger}
        require_outputs(outputs, inputs=self._inputs())
        drawn = self.svg is not None or self.png is not None
        require_bench("scipy", "numpy", *(["matplotlib"] if drawn else []))
        for flag, file, suffix in (("--svg", self.svg, ".svg"), ("--png", self.png, ".png")):
            if file is not None and file.suffix != suffix:
                raise ValueError(f"{flag} is {file}; its name must end in {suffix}")
        from flashstep.bench.arms import is_ledger

        read = [is_ledger(arm) for arm in (self.a, self.b)]
        if read[0] != read[1]:
            raise ValueError(
                "one arm is a ledger and the other a command: run both in turns, or read both from ledgers"
            )
        return self._read() if read[0] else self._run()

    def _inputs(self) -> dict[str, Path | None]:
        """Ledgers and plans: what a claim lives by, and no output may take the place of."""
        from flashstep.bench.arms import is_ledger, ledger_and_label
        from flashstep.bench.experiment import plan_beside

        found = {"--plan": self.plan}
        if self.ledger is not None:
            found["the plan beside --ledger"] = plan_beside(self.ledger)
        for name, arm in (("A", self.a), ("B", self.b), ("--control", self.control)):
            if arm and is_ledger(arm):
                ledger = ledger_and_label(arm)[0]
                found |= {f"the ledger of {name}": ledger, f"the plan of {name}": plan_beside(ledger)}
        return found

    def _read(self) -> int:
        """Both arms from ledgers."""
        from flashstep.bench.arms import arms_of, entries_of, is_ledger, ledger_and_label
        from flashstep.bench.experiment import plan_beside, read_plan

        given = {"--rounds": self.rounds, "--ledger": self.ledger, "--plan-only": self.plan_only or None}
        wrong = [flag for flag, value in given.items() if value is not None]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: the arms are ledgers, and nothing is run; leave it out")
        if self.control and not is_ledger(self.control):
            raise ValueError(f"--control is {self.control!r}; beside arms from ledgers it must be one too")
        arms = arms_of(*(entries_of(arm) for arm in (self.a, self.b, self.control) if arm))
        beside = plan_beside(ledger_and_label(self.a)[0])
        file = self.plan or (beside if beside.exists() else None)
        return self._claim(arms, read_plan(file) if file else None)

    def _run(self) -> int:
        """Both arms by their commands, in turns."""
        from flashstep.bench.arms import arms_of
        from flashstep.bench.experiment import due, held, state
        from flashstep.bench.ledger import read

        plan, ledger = self._planned()
        stated = state(plan, ledger)
        note(f"plan: {stated.file}, SHA-256 {stated.digest}")
        for label, command in plan.arms.items():
            if without_secret_flags([command]) != [command]:
                note(
                    f"arm {label} holds what may be a secret, and so does the plan, which has commands whole: keep it to "
                    "yourself, or use --api-key-file"
                )
        if self.plan_only:
            for run in due(stated, ledger):
                OUT.print(shlex.join(run.argv))
            return 0
        with held(stated.file) as lock:
            interrupted = self._run_all(stated, ledger, lock=lock)
        kept = [entry for entry in read(ledger) if entry.plan == stated.digest] if ledger.exists() else []
        by_arm = [[entry for entry in kept if entry.label == label] for label in plan.arms]
        code = self._claim(arms_of(*by_arm), stated) if all(by_arm) else REFUSED
        if interrupted:
            note("interrupted; the same command goes on from here")
            raise KeyboardInterrupt
        return code

    def _planned(self) -> "tuple[Plan, Path]":
        """What the flags ask for; ``ValueError`` with all that is wrong."""
        from flashstep.bench.experiment import CONTROL, Plan, argv, check_alpha, margin, now
        from flashstep.bench.measure import measure
        from flashstep.bench.stats.design import balanced, fewest_rounds, fewest_runs, order

        wrong: list[str] = []
        alpha = ALPHA if self.alpha is None else self.alpha
        if self.plan is not None:
            wrong.append("--plan reads a plan; running arms write it beside --ledger: leave it out")
        if self.ledger is None:
            wrong.append("--ledger is missing: the runs are kept there")
        fewest, is_accuracy, number = 2, False, 3 if self.control else 2
        try:
            check_alpha(alpha)
            is_accuracy = measure(self.metric).is_accuracy
            fewest = (
                balanced(fewest_runs(alpha), arms=number)
                if is_accuracy
                else fewest_rounds(alpha, arms=number)
            )
        except ValueError as error:
            wrong.append(f"--metric or --alpha: {error}")
        rounds = fewest if self.rounds is None else self.rounds
        if rounds < fewest:
            wrong.append(
                f"--rounds is {rounds}: no result could reach the level {alpha:g}; it takes {fewest}"
            )
        arms = {"A": self.a, "B": self.b}
        if self.control:
            arms[CONTROL] = self.a if self.control == "A" else self.control
        checks: list[Callable[[], object]] = [
            lambda: order(list(arms), rounds=rounds),
            lambda: self.margin and margin(self.margin, is_accuracy=is_accuracy),
            *(partial(argv, command) for command in dict.fromkeys(arms.values())),
        ]
        for check in checks:
            try:
                check()
            except ValueError as error:
                wrong.append(str(error))
        if wrong or self.ledger is None:
            raise ValueError("; ".join(wrong))
        plan = Plan(date=now(), metric=self.metric, alpha=alpha, margin=self.margin, rounds=rounds, arms=arms)
        return plan, self.ledger

    def _run_all(self, stated: "Stated", ledger: Path, *, lock: int) -> bool:
        """Whether a Ctrl-C ended it (or a SIGTERM or SIGHUP, which would leave the run without us)."""
        from flashstep.bench.experiment import due, run_all

        whole = len(stated.plan.schedule)
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[said]}", markup=False),
            console=NOTES,
        )
        before = {
            name: signal.signal(name, signal.default_int_handler) for name in (signal.SIGTERM, signal.SIGHUP)
        }
        with bar:
            task = bar.add_task("", total=whole, completed=whole - len(due(stated, ledger)), said="")
            try:
                for run in run_all(
                    stated,
                    ledger,
                    lock=lock,
                    said=lambda _, line: bar.update(task, said=line[:60]),
                    done=lambda _: bar.update(task, advance=1, said=""),
                ):
                    bar.update(task, description=_due(run))
                    if not NOTES.is_terminal:
                        note(run.words)
            except KeyboardInterrupt:
                return True
            finally:
                for name, handler in before.items():
                    signal.signal(name, handler)
        return False

    def _claim(self, arms: "Arms", stated: "Stated | None") -> int:
        """Judge, show and write."""
        from flashstep.bench.arms import Question
        from flashstep.bench.claim import as_builtins, judge
        from flashstep.bench.experiment import check_alpha, margin
        from flashstep.bench.measure import measure, shared_measures
        from flashstep.cli.claim_tables import parts

        plan = stated.plan if stated else None
        check_alpha(ALPHA if self.alpha is None else self.alpha)
        if plan is not None:
            self._check_plan(plan)
        name = self.metric or (plan.metric if plan else "")
        if not name:
            has = ", ".join(item.metric for item in shared_measures(arms.all)) or "none in common"
            raise ValueError(f"--metric is missing: say which one the claim is about; the runs have {has}")
        allowed = self.margin or (plan.margin if plan else "")
        asked = measure(name)
        question = Question(
            measure=asked,
            alpha=plan.alpha if plan else ALPHA if self.alpha is None else self.alpha,
            margin=margin(allowed, is_accuracy=asked.is_accuracy) if allowed else None,
            stated=stated,
        )
        claim = judge(arms, question)
        OUT.print(claim.paragraph)
        for part in parts(claim):
            OUT.print(part)
        if self.json is not None:
            self.json.write_bytes(
                msgspec.json.format(msgspec.json.encode(as_builtins(claim)), indent=1) + b"\n"
            )
        self._draw(claim)
        return REFUSED if claim.says == "refused" and claim.not_inferior is None else 0

    def _check_plan(self, plan: "Plan") -> None:
        """``ValueError`` where flags ask for another question than the plan."""
        given = {"metric": self.metric or None, "alpha": self.alpha, "margin": self.margin or None}
        differ = [
            f"--{name} {value}, and the plan says {getattr(plan, name)!r}"
            for name, value in given.items()
            if value is not None and value != getattr(plan, name)
        ]
        if differ:
            raise ValueError(f"{'; '.join(differ)}: what was planned cannot change after the runs")

    def _draw(self, claim: "Claim") -> None:
        files = [file for file in (self.svg, self.png) if file is not None]
        if not files:
            return
        from flashstep.bench.claim_picture import draw

        for file in files:
            draw(claim, file)


def _due(run: "Run") -> str:
    return f"round {run.round}, arm {run.arm}"
