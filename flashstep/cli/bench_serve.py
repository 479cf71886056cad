"""``flashstep bench serve``: load over HTTP against any OpenAI-compatible server, and what its users would see."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import tyro

from flashstep.bench.origin import Origin
from flashstep.cli.extras import require_bench
from flashstep.cli.load_progress import LoadProgress
from flashstep.cli.load_run import Asking, Run, keep_run, pairs, run_load
from flashstep.cli.load_tables import show
from flashstep.cli.recording import Recording
from flashstep.cli.terminal import OUT

if TYPE_CHECKING:
    from flashstep.bench.load.prompts import PromptFile, RandomPrompts
    from flashstep.bench.load.serve import Prepared
    from flashstep.bench.load.stopping import Stopping
    from flashstep.bench.load.workload import Workload

NUM_PROMPTS = 100
INPUT_LEN, OUTPUT_LEN = "512", "128"
ONE_TURN, NO_PAUSE = "1", "0"
OURS = {
    "model",
    "messages",
    "prompt",
    "stream",
    "stream_options",
    "n",
}  # of a request's fields: the plan's own
SLOS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True)
class BenchServe:
    """Send requests to an OpenAI-compatible server at a rate, or so many at a time, and measure what comes back.

    Prompts are random words of exact lengths (as the server counts them), or lines of --prompts FILE. Warm-ups, and the few
    requests that learn how the server counts, are in no figure. The exit code is 1 if over 10% of the requests failed or the
    plan was not sent to its end.
    """

    url: str
    """the server, with or without /v1"""
    endpoint: Literal["chat", "completions"] = "chat"
    """/v1/chat/completions or /v1/completions"""
    prompts: Path | None = None
    """JSON lines instead of random words: {"prompt": ...}, {"messages": [...]} or {"turns": [{"user": ..., "answer": ...}]}"""
    input_len: str | None = None
    """tokens of a prompt as the server counts them, template included: N, or LOW:HIGH (random words; 512)"""
    output_len: str | None = None
    """tokens of an answer: N, or LOW:HIGH (random words; 128); with --prompts N, for lines that name none"""
    prefix_len: int = 0
    """of them, tokens at the beginning that are the same in all prompts (random words)"""
    turns: str = ONE_TURN
    """turns of a session: N, or LOW:HIGH (random words)"""
    think_time_ms: str = NO_PAUSE
    """pause before each turn but the first: N, or LOW:HIGH (random words)"""
    history: Literal["recorded", "live"] = "recorded"
    """whose answer stands in a session's next prompt: one written beforehand (the same prompts in every run), or the server's"""
    num_prompts: int | None = None
    """sessions to send; without it and --duration-s 100, or all lines of --prompts"""
    duration_s: float | None = None
    """begin nothing more after so many seconds"""
    request_rate: float = math.inf
    """sessions a second; inf begins all at once, or as --max-concurrency lets them"""
    burstiness: float = 1.0
    """of arrivals at a rate: 1 is Poisson, less is burstier, more is more even (gamma)"""
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    """instead of --request-rate, a rate that changes along the run"""
    ramp_up_start_rps: float = 0.0
    """the ramp's rate at the beginning"""
    ramp_up_end_rps: float = 0.0
    """the ramp's rate at the end"""
    max_concurrency: int | None = None
    """most sessions at once (each has one request at a time); without it no limit"""
    temperature: float | None = 0.0
    """of every request; None leaves it to the server. Above 0 each request has a seed of its own, the same in every run"""
    continuous_usage: bool = True
    """ask for the count of tokens on every event, where the server knows that (else at the end): more bytes, exact token times"""
    seed: int = 0
    """of prompts, lengths, arrivals and sampling"""
    goodput: tuple[str, ...] = ()
    """limits that a good request keeps, in ms: ttft:200 tpot:20 e2el:3000"""
    num_warmups: int = 1
    """requests before the run that are in no figure"""
    timeout_s: float = 600.0
    """longest wait for one whole answer"""
    probe_request_rate: float = 0.0
    """small requests a second beside the load, with figures of their own"""
    dry_run: bool = False
    """print the plan, a JSON line for each request, and send none of it (the server is asked for lengths of words only)"""
    asking: tyro.conf.OmitArgPrefixes[Asking] = field(default_factory=Asking)
    recording: tyro.conf.OmitArgPrefixes[Recording] = field(default_factory=Recording)

    def run(self) -> int:
        require_bench("aiohttp")
        self.recording.check()
        return run_load(self._measured(self._workload()))

    async def _measured(self, workload: "Workload") -> int:
        from flashstep.bench.load.serve import entry, measure, prepare

        watch = LoadProgress()
        async with self.asking.client(self.url, timeout_s=self.timeout_s) as client:
            ready_s = self.asking.ready_check_timeout_sec
            prepared = await prepare(client, workload, model=self.asking.model, ready_s=ready_s, watch=watch)
            if self.dry_run:
                _print_plan(prepared)
                return 0

            async def run(stopping: "Stopping", take: Callable[[Any], None] | None, where: Origin) -> Run:
                outcome = await measure(client, prepared, watch=watch, stopping=stopping, take=take)
                show(outcome, OUT)
                return Run(entry=entry(outcome, where), is_valid=outcome.summary.is_valid)

            return await keep_run(run, raw=self.asking.raw, recording=self.recording)

    def _workload(self) -> "Workload":
        """What the flags ask for; ``ValueError`` with all that is wrong with them."""
        from flashstep.bench.load.arrivals import Arrivals
        from flashstep.bench.load.bodies import Shape
        from flashstep.bench.load.workload import Workload

        arrivals = Arrivals(
            rate=self.request_rate,
            burstiness=self.burstiness,
            ramp=self.ramp_up_strategy,
            start_rate=self.ramp_up_start_rps,
            end_rate=self.ramp_up_end_rps,
        )
        wrong = [*self._out_of_range(), *arrivals.problems(), *self.asking.problems(OURS)]
        source, slos_ms = self._source(wrong), _slos(self.goodput, wrong)
        if self.num_prompts is None and self.duration_s is not None and self.prompts is None:
            wrong += self._flood()
        if wrong or source is None:
            raise ValueError("; ".join(wrong))
        endless = self.num_prompts is None and self.duration_s is None and self.prompts is None
        shape = Shape(
            model=self.asking.model or "",
            endpoint=self.endpoint,
            temperature=self.temperature,
            ignore_eos=self.asking.ignore_eos,
            seed=self.seed,
            extra=self.asking.extra(),
            history=self.history,
            counting="each event" if self.continuous_usage else "at the end",
        )
        return Workload(
            source=source,
            shape=shape,
            arrivals=arrivals,
            max_concurrency=self.max_concurrency,
            num_prompts=NUM_PROMPTS if endless else self.num_prompts,
            duration_s=self.duration_s,
            num_warmups=self.num_warmups,
            probe_rate=self.probe_request_rate,
            slos_ms=slos_ms,
            seed=self.seed,
        )

    def _flood(self) -> list[str]:
        """With nothing to hold them back, requests without end would begin at once."""
        paced = self.ramp_up_strategy is not None or self.request_rate != math.inf
        if self.dry_run and not paced:
            return ["--dry-run with --duration-s prints without end: give a rate or --num-prompts"]
        held = self.max_concurrency is not None or paced
        return (
            []
            if held
            else ["--duration-s alone sends without end: give a rate, --max-concurrency or --num-prompts"]
        )

    def _out_of_range(self) -> list[str]:
        least = {
            "prefix_len": 0,
            "num_prompts": 1,
            "max_concurrency": 1,
            "num_warmups": 0,
            "probe_request_rate": 0,
            "seed": 0,
            "temperature": 0,
        }
        wrong = [
            f"--{name.replace('_', '-')} is {value}; it is at least {low}"
            for name, low in least.items()
            if (value := getattr(self, name)) is not None and not low <= value < math.inf
        ]
        for name in ("duration_s", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                wrong.append(f"--{name.replace('_', '-')} is {value:g}; it is above 0 and finite")
        if not self.url.startswith(("http://", "https://")):
            wrong.append(f"--url is {self.url!r}; it begins with http:// or https://")
        return wrong

    def _source(self, wrong: list[str]) -> "RandomPrompts | PromptFile | None":
        """Where prompts come from; what is wrong is added to ``wrong``."""
        from flashstep.bench.load.lengths import Range
        from flashstep.bench.load.prompts import PromptError, RandomPrompts, read_prompts

        texts = {
            "--input-len": self.input_len or INPUT_LEN,
            "--output-len": self.output_len or OUTPUT_LEN,
            "--turns": self.turns,
            "--think-time-ms": self.think_time_ms,
        }
        ranges: dict[str, Range] = {}
        for flag, text in texts.items():
            try:
                ranges[flag] = Range.parse(text, least=0 if flag == "--think-time-ms" else 1)
            except ValueError as error:
                wrong.append(f"{flag}: {error}")
        if len(ranges) < len(texts):
            return None
        if self.prompts is None:
            return RandomPrompts(
                input_len=ranges["--input-len"],
                output_len=ranges["--output-len"],
                prefix_len=self.prefix_len,
                turns=ranges["--turns"],
                think_ms=ranges["--think-time-ms"],
            )
        given = {
            "--input-len": self.input_len is not None,
            "--prefix-len": self.prefix_len != 0,
            "--turns": self.turns != ONE_TURN,
            "--think-time-ms": self.think_time_ms != NO_PAUSE,
        }
        wrong += [
            f"{flag} is for random words; --prompts has its own"
            for flag, is_given in given.items()
            if is_given
        ]
        output = ranges["--output-len"]
        if output.low != output.high:
            wrong.append(f"--output-len is {self.output_len}; with --prompts it is one number")
        try:
            file = read_prompts(
                self.prompts,
                output_len=output.low if self.output_len else None,
                chat=self.endpoint == "chat",
                needs_answers=self.history == "recorded",
            )
        except PromptError as error:
            wrong.append(str(error))
            return None
        if self.num_prompts is not None and self.num_prompts > len(file.sessions):
            wrong.append(
                f"--num-prompts is {self.num_prompts}; {self.prompts} has {len(file.sessions)} lines"
            )
        return file


def _slos(given: tuple[str, ...], wrong: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, text in pairs("--goodput", given, ":", wrong).items():
        try:
            limit = float(text)
        except ValueError:
            limit = 0.0
        if name not in SLOS:
            wrong.append(f"--goodput: {name!r} is none of {', '.join(SLOS)}")
        elif not 0 < limit < math.inf:
            wrong.append(f"--goodput: {name}:{text} is no limit; it is in ms, above 0")
        found[name] = limit
    return found


def _print_plan(prepared: "Prepared") -> None:
    """A JSON line for each request: when its session begins, the pause before it, its body. A live answer is "(live answer)"."""
    workload = prepared.workload
    for at_s, session in workload.plan(prepared.words):
        for index, turn in enumerate(session.turns):
            call = workload.shape.call(session, index, ["(live answer)"] * index)
            line = {
                "key": call.key,
                "session_at_s": at_s,
                "think_s": turn.think_s,
                "path": call.path,
                "body": call.body,
            }
            OUT.print(msgspec.json.encode(line).decode())
