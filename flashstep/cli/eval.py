"""``flashstep eval``: accuracy on questions with known answers, of a server or of a checkpoint in this process."""

import asyncio
import dataclasses
import datetime
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashstep.bench.ledger import Entry
from flashstep.bench.origin import origin
from flashstep.bench.quality.answers import AnswerFile
from flashstep.bench.quality.extract import Rule
from flashstep.bench.quality.prompts import Asked, Plan, chosen
from flashstep.bench.quality.questions import QuestionSet, read
from flashstep.bench.quality.run import Arm, Counted, Session
from flashstep.bench.quality.score import Circumstances, Score, wilson
from flashstep.cli.extras import require_bench
from flashstep.cli.model import resolve
from flashstep.cli.recording import EngineFlags, Recording, told_options
from flashstep.cli.terminal import NOTES, OUT, note
from flashstep.config.engine_options import EngineOptions, changed_options
from flashstep.config.objects import read_object

INCOMPLETE = 1
TELL_EVERY_S = 30.0  # where no bar can be shown


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Measure accuracy: few-shot questions from a JSONL file, every answer kept, one ledger entry for each run.

    The file has "question" and "answer" in each line, as public GSM8K ("... #### 42") has them; or name a set that the tiny model
    was not trained on: word-problems, recall, calls. Only real acceptance and real routing are scored.
    """

    questions: tyro.conf.Positional[str] = "word-problems"
    """a file of JSON lines, or word-problems, recall, calls"""
    model: Path | None = None
    """checkpoint folder to load here; without it, and without --url, the embedded tiny model"""
    url: str | None = None
    """ask this OpenAI-compatible server instead, such as http://127.0.0.1:8000"""
    served_model: str | None = None
    """model to ask for at --url; without it the first that the server lists"""
    api_key: str | None = None
    """of the server at --url; others on this machine see it with `ps`"""
    api: Literal["chat", "completions"] = "chat"
    """chat asks in messages; completions continues "Question: ... Answer:" """
    rule: Rule | None = None
    """how an answer is read: hashes (#### 42), boxed, number (the last one), exact, contains, call; else as the set is meant"""
    num_fewshot: int = 0
    """examples before each question"""
    examples: str | None = None
    """file or set of the examples; without it they are the first questions, which are then not asked"""
    limit: int | None = None
    """ask only the first so many"""
    runs: int = 1
    """ask everything so many times, with other draws each time"""
    draws: int = 0
    """seed of the draws, where the temperature is above 0; run r of round n has this + n + r"""
    temperature: float = 0.0
    """0 takes the most probable token"""
    top_p: float = 1.0
    """sample only from the most probable tokens that make up this probability"""
    max_tokens: int = 512
    """most tokens of one answer, reasoning included"""
    thinking: Literal["default", "on", "off"] = "default"
    """let the model reason before it answers (chat_template_kwargs of a server)"""
    extra_body: str | None = None
    """JSON object of further fields for each request to --url"""
    concurrency: int = 8
    """requests to --url at a time"""
    timeout_s: float = 600.0
    """longest wait for one answer of --url"""
    job: str | None = None
    """name of the process or server that several runs shared: compare exchanges runs within it only"""
    answers: Path | None = None
    """keep every answer in this file, as it comes; without it a new file in LEDGER.raw/, or here"""
    resume: bool = False
    """go on with --answers where it stopped: only what has no answer is asked"""
    recording: tyro.conf.OmitArgPrefixes[Recording] = field(default_factory=Recording)
    options: EngineFlags = field(default_factory=EngineOptions)

    def run(self) -> int:
        plan = self._plan()
        found = read(self.questions, rule=self.rule)
        examples = None if self.examples is None else read(self.examples, rule=found.rule)
        asked = chosen(found, plan, examples)
        arm = self._served(asked, plan) if self.url is not None else self._local(asked, plan)
        path = self._path(found.name)
        settings = self._settings(found, examples, asked, plan)
        runs = range(self.recording.round, self.recording.round + plan.runs)
        of = Circumstances(
            origin=origin(),
            settings=settings,
            subject=arm.subject,
            seed=plan.seed,
            job=self.job,
            raw=os.path.relpath(path, self.recording.ledger.parent if self.recording.ledger else "."),
        )
        header = {"settings": settings, "subject": arm.subject, "runs": list(runs)}
        with AnswerFile(path, header, resume=self.resume) as kept:
            note(
                f"{len(asked.questions)} questions of {found.name}, read by {found.rule.value}; answers: {path}"
            )
            session = Session(arm, kept, asked, found.rule, plan, of)
            try:
                scores = [self._one(session, number) for number in runs]
            except KeyboardInterrupt:
                note(f"interrupted; what was answered is kept, and --answers {path} --resume goes on")
                raise
        OUT.print(table(scores, runs))
        if all(each.answered == each.asked for each in scores):
            return 0
        note(f"incomplete: --answers {path} --resume asks what has no answer")
        return INCOMPLETE

    def _one(self, session: Session, number: int) -> Score:
        """One run, with a bar; its entry is kept under its number."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=NOTES, transient=True, disable=not NOTES.is_terminal) as bar:
            task = bar.add_task(f"run {number}", total=len(session.asked.questions))

            told_s = time.monotonic()

            def progress(counted: Counted) -> None:
                nonlocal told_s
                words = f"run {number}: {counted.right} right, {counted.failed} failed"
                bar.update(task, completed=counted.done, description=words)
                if not NOTES.is_terminal and time.monotonic() > told_s + TELL_EVERY_S:
                    told_s = time.monotonic()
                    note(f"{words}, {counted.done} of {len(session.asked.questions)}")

            def keep(entry: Entry) -> None:
                dataclasses.replace(self.recording, round=number).keep(entry)

            score, entry = session.run(number, keep=keep, progress=progress)
        for fault in entry.faults if entry is not None else ("it was complete before",):
            note(f"run {number}: {fault}")
        return score

    # ---- what answers --------------------------------------------------------------------------------------------

    def _served(self, asked: Asked, plan: Plan) -> Arm:
        require_bench("aiohttp")
        from flashstep.bench.load.client import without_user
        from flashstep.bench.quality import served

        assert self.url is not None
        shown, _ = without_user(self.url)
        server = served.Server(
            url=self.url,
            model=self.served_model,
            api_key=self.api_key,
            concurrency=self.concurrency,
            timeout_s=self.timeout_s,
            extra=read_extra(self.extra_body),
        )
        known = asyncio.run(served.describe(server))
        _refuse(asyncio.run(served.falsity(server)))
        note(f"{known.model} at {shown}; which drafts stand: {known.rejection}")
        subject = {
            "url": shown,
            "model": known.model,
            "server": known.version,
            "rejection_sample_method": known.rejection,
        }
        return Arm(
            lambda questions, run, take: asyncio.run(
                served.ask(server, asked, plan, questions, run=run, model=known.model, take=take)
            ),
            subject,
            lambda: asyncio.run(served.falsity(server)),
        )

    def _local(self, asked: Asked, plan: Plan) -> Arm:
        config = self.options.checked().engine(resolve(self.model))
        _refuse(config.falsifies)
        drafts = config.speculative
        rejection = "no drafts" if drafts is None else drafts.rejection_sample_method.value
        from flashstep.cli.eval_local import ask
        from flashstep.cli.local import LocalModel

        local = LocalModel(config)
        note(f"{config.model} in this process; which drafts stand: {rejection}")
        return Arm(
            lambda questions, run, take: ask(local, asked, plan, questions, run=run, take=take),
            {
                "model": str(config.model),
                "engine": told_options(self.options),
                "rejection_sample_method": rejection,
            },
            lambda: (),
        )

    # ---- flags ---------------------------------------------------------------------------------------------------

    def _plan(self) -> Plan:
        """Everything that the flags say wrong is one ``ValueError``."""
        plan = Plan(
            api=self.api,
            num_fewshot=self.num_fewshot,
            limit=self.limit,
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            thinking={"default": None, "on": True, "off": False}[self.thinking],
            runs=self.runs,
            seed=self.draws,
        )
        inputs = {"the questions": Path(self.questions), "--examples": Path(self.examples or self.questions)}
        kept = self.recording.problems({"--answers": self.answers}, inputs=inputs)
        if wrong := [*plan.problems(), *self._problems(), *kept]:
            raise ValueError("; ".join(wrong))
        return plan

    def _problems(self) -> list[str]:
        least = {"--concurrency": self.concurrency, "--timeout-s": self.timeout_s}
        wrong = [f"{flag} is {value}; it must be above 0" for flag, value in least.items() if not value > 0]
        if self.resume and self.answers is None:
            wrong.append("--resume goes on with a file: give it as --answers")
        elif self.answers is not None and self.answers.is_file() != self.resume:
            wrong.append(
                f"--resume: there is no file {self.answers} to go on with"
                if self.resume
                else f"--answers {self.answers} is there already: go on with it by --resume, or name another"
            )
        if self.url is None:
            served = {
                "--served-model": self.served_model,
                "--api-key": self.api_key,
                "--extra-body": self.extra_body,
            }
            return wrong + [
                f"{flag} is for a server: give --url" for flag, value in served.items() if value is not None
            ]
        if self.model is not None:
            wrong.append(
                "give --model or --url, not both: a server has its own model (--served-model names it)"
            )
        if given := changed_options(self.options):
            wrong.append(
                f"{', '.join(given)}: engine options mean nothing with --url; the server has its own"
            )
        return wrong

    def _path(self, name: str) -> Path:
        """The file of answers; one without --answers has the time in its name, so that no run meets another's."""
        if self.answers is not None:
            return self.answers
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S-%f")
        label = "".join(letter if letter.isalnum() else "-" for letter in self.recording.label)
        file = f"{'-'.join(part for part in (name, label, stamp) if part)}.answers.jsonl"
        return self.recording.raw_file(file) or Path(file)

    def _settings(
        self, found: QuestionSet, examples: QuestionSet | None, asked: Asked, plan: Plan
    ) -> dict[str, Any]:
        return {
            "questions": found.name,
            "questions_sha256": found.digest,
            "asked": len(asked.questions),
            "rule": found.rule.value,
            "api": plan.api,
            "num_fewshot": plan.num_fewshot,
            "examples": None if examples is None else f"{examples.name} {examples.digest}",
            "temperature": plan.temperature,
            "top_p": plan.top_p,
            "max_tokens": plan.max_tokens,
            "thinking": self.thinking,
            "extra_body": read_extra(self.extra_body),
            "draws": plan.seed,
        }


def read_extra(text: str | None) -> dict[str, Any]:
    """The object of --extra-body; ``ValueError`` with what is wrong with it."""
    if text is None:
        return {}
    fields, problems = read_object(text, example='{"min_p": 0.1}')
    if problems:
        raise ValueError(f"--extra-body: {'; '.join(problems)}")
    return dict(fields)


def table(scores: Sequence[Score], runs: Sequence[int]) -> Table:
    """One row a run. Unread answers are wrong ones in which the rule found nothing; cut ones met --max-tokens."""
    shown = Table("run")
    for name in ("right", "of", "accuracy", "95% interval", "no answer", "unread", "cut", "tokens"):
        shown.add_column(name, justify="right")
    for run, score in zip(runs, scores, strict=True):
        low, high = wilson(score.right, score.answered)
        shown.add_row(
            str(run),
            str(score.right),
            str(score.answered),
            "-" if score.accuracy is None else f"{score.accuracy:.2%}",
            f"{low:.1%} to {high:.1%}",
            str(score.asked - score.answered),
            str(score.unread),
            str(score.cut),
            str(score.output_tokens),
        )
    return shown


def _refuse(false: tuple[str, ...]) -> None:
    if false:
        raise ValueError(
            f"accuracy needs the model's own answers, and with {' and '.join(false)} no text is; nothing was asked"
        )
