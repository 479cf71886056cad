"""Train the embedded tiny model: ``python -m train.tiny --out DIR`` (one H200 in minutes, or CPUs in hours).

Three stages: short rows; short and long rows alternating; the same with the model's own sparse selection and every
quantiser. Fixed seeds; progress with loss, tokens/s and time left; checkpoints while it runs; a loss curve at the end.
"""

import argparse
import dataclasses
import json
import queue
import threading
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.engram.token_map import TokenMap
from oracle import checkpoint
from train.cases import call_cases, problem_cases, recall_cases
from train.compare import compare
from train.corpus import DEFAULT_FILE, Corpus, build, fetch
from train.data import Batch
from train.dialogue import Encoder
from train.functions import compiler
from train.loader import Loader
from train.score import pack_cases, score
from train.shape import SMOKE, TINY, config_json
from train.step import STATISTICS, Inputs, Trainer, Variant, mode_of, sampled_rows, to_device

SHORT_ROW, LONG_ROW = 768, 4608
STAGES = ("A", "B", "C")
SHARES = (0.38, 0.38, 0.24)  # of the steps
WARM_UP = 60
DECAY_FROM = 0.55  # of the run; then the rate falls to 0
LOG_EVERY = 20
SAVE_SECONDS = 60
INDEX_ROWS = {SHORT_ROW: 64, LONG_ROW: 128}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the command line asks for."""

    out: Path
    steps: int
    wall: float  # seconds from the start to the end of training; the schedule runs ahead of its steps if they are slow
    short_rows: int
    long_rows: int
    seed: int
    workers: int
    device: torch.device
    compile: bool
    graphs: bool
    shares: tuple[float, ...]
    decay_from: float
    smoke: bool
    evaluate: bool
    compare: bool


class Feed:
    """Batches of both classes, moved to the device ahead of time by a thread."""

    def __init__(self, plan: Plan, corpus: Corpus, tokenizer: Path) -> None:
        short = max(1, plan.workers * 2 // 3)
        self.loaders = {
            SHORT_ROW: Loader(
                corpus,
                tokenizer,
                seed=plan.seed + 1,
                short=True,
                row=SHORT_ROW,
                rows=plan.short_rows,
                workers=short,
            ),
        }
        if plan.long_rows:
            self.loaders[LONG_ROW] = Loader(
                corpus, tokenizer, seed=plan.seed + 2, short=False, row=LONG_ROW, rows=plan.long_rows,
                workers=max(1, plan.workers - short),
            )  # fmt: skip
        self.device = plan.device
        self.ready: dict[int, queue.Queue[Inputs]] = {row: queue.Queue(3) for row in self.loaders}
        for row in self.loaders:
            threading.Thread(target=self._move, args=(row, plan.seed), daemon=True).start()

    def _move(self, row: int, seed: int) -> None:
        rng = np.random.default_rng(seed + row)
        while True:
            batch: Batch = self.loaders[row].batch()
            self.ready[row].put(to_device(batch, sampled_rows(batch, INDEX_ROWS[row], rng), self.device))

    def inputs(self, row: int) -> Inputs:
        """The next batch of rows of ``row`` tokens."""
        return self.ready[row].get(timeout=120)

    def close(self) -> None:
        """End the workers."""
        for loader in self.loaders.values():
            loader.close()


def stage_of(progress: float, shares: tuple[float, ...]) -> str:
    """The stage at a share of the run."""
    bound = 0.0
    for name, share in zip(STAGES, shares, strict=True):
        bound += share
        if progress < bound:
            return name
    return STAGES[-1]


def rate_of(progress: float, step: int, decay_from: float) -> float:
    """Share of the full learning rate: warm-up, constant, linear to 0."""
    return min(1.0, (step + 1) / WARM_UP) * min(1.0, max(0.0, (1 - progress) / (1 - decay_from)))


def variant_of(plan: Plan, stage: str, step: int) -> Variant:
    """Short rows in stage A, then short and long alternating; quantised in stage C."""
    long = stage != "A" and step % 2 == 1 and plan.long_rows > 0
    rows, row = (plan.long_rows, LONG_ROW) if long else (plan.short_rows, SHORT_ROW)
    return Variant(rows, row, stage == "C")


class Evaluation:
    """Held-out cases, packed once, scored by the trainer's own forward."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, corpus: Corpus) -> None:
        self.encoder = Encoder(tokenizer)
        self.problems = problem_cases(336 if not plan.smoke else 24)
        short = self.problems + call_cases(96 if not plan.smoke else 8)
        self.kinds = [case.kind for case in short]
        self.short = pack_cases(short, self.encoder, rows=plan.short_rows, row=SHORT_ROW)
        self.long = None
        if plan.long_rows and not plan.smoke:
            self.long = pack_cases(
                recall_cases(32, tokenizer, corpus), self.encoder, rows=plan.long_rows, row=LONG_ROW
            )

    def __call__(self, trainer: Trainer, *, quantised: bool) -> dict[str, str]:
        """Scores by kind, as text."""

        def forward(ids: Tensor, documents: Tensor) -> Tensor:
            inputs = Inputs(ids, documents, ids, ids)  # weight and rows are not read
            return trainer.forward(inputs, quantised=quantised, trace=None)

        found = {}
        result = score(*self.short, forward, trainer.device)
        for kind in ("problem", "call"):
            marks = [e for e, k in zip(result.exact, self.kinds, strict=True) if k == kind]
            found[kind] = f"{sum(marks)}/{len(marks)}"
        found["tokens"] = f"{result.tokens:.2%}"
        if self.long is not None:
            found["recall"] = str(score(*self.long, forward, trainer.device))
        return found


class Run:
    """The loop: schedule, log, checkpoints."""

    def __init__(self, plan: Plan, trainer: Trainer, feed: Feed, evaluation: Evaluation | None) -> None:
        self.plan, self.trainer, self.feed, self.evaluation = plan, trainer, feed, evaluation
        self.log = (plan.out / "log.jsonl").open("a", encoding="utf-8")
        self.console = Console(width=160)
        self.spent = 0.0  # seconds of stepping, compilation left out
        self.begun = time.time()
        self.saved = time.time()

    def record(self, **fields: object) -> None:
        """One line of the log file, at once on the disk."""
        self.log.write(json.dumps(fields) + "\n")
        self.log.flush()

    def save(self, name: str = "packed.pt") -> None:
        """The weights as a checkpoint stores them, replaced in one move."""
        target = self.plan.out / name
        torch.save(self.trainer.parameters.packed(), target.with_suffix(".part"))
        target.with_suffix(".part").replace(target)
        self.saved = time.time()

    def assess(self, label: str, *, quantised: bool) -> None:
        """Scores (and the comparison of paths) at the end of a stage."""
        if self.evaluation is None:
            return
        start = time.time()
        scores = self.evaluation(self.trainer, quantised=quantised)
        self.console.print(f"[{label}] {scores} ({time.time() - start:.0f} s)", markup=False)
        self.record(label=label, scores=scores)
        if self.plan.compare:
            lines = compare(
                self.trainer, self.evaluation.problems, self.evaluation.encoder, quantised=quantised,
                rows=self.plan.short_rows, row=SHORT_ROW, no_grad_compiled=self.plan.compile and not quantised,
            )  # fmt: skip
            for line in lines:
                self.console.print(f"[{label}] {line}", markup=False)
            self.record(label=label, compare=lines)

    def warm_up(self) -> int:
        """Compile and capture every variant by three real updates each; the number of updates done."""
        self.trainer.set_rate(1 / WARM_UP)
        step = 0
        for stage, long in (("A", 0), ("B", 1), ("C", 0), ("C", 1)):
            variant = variant_of(self.plan, stage, long)
            while variant not in self.trainer.graphs:
                self.trainer.run(variant, self.feed.inputs(variant.row), graphs=True).tolist()
                step += 1
            self.console.print(
                f"{mode_of(variant)} is compiled and captured, {time.time() - self.begun:.0f} s", markup=False
            )
        return step

    def train(self) -> None:
        """All steps of the plan."""
        plan = self.plan
        stage = stage_of(0.0, plan.shares)
        step = first = self.warm_up() if plan.graphs else 0
        start = clock = time.time()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        tokens, mark = 0, 0.0
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task(f"stage {stage}", total=1.0, note="")
            while (
                progress := max(step / plan.steps, (time.time() - start) / (plan.wall - start + self.begun))
            ) < 1:
                if (now := stage_of(progress, plan.shares)) != stage:
                    self.assess(f"end of stage {stage}", quantised=stage == "C")
                    stage, clock = now, time.time()
                variant = variant_of(plan, stage, step)
                self.trainer.set_rate(rate_of(progress, step - first, plan.decay_from))
                statistics = self.trainer.run(variant, self.feed.inputs(variant.row), graphs=plan.graphs)
                tokens += variant.rows * variant.row
                if step % LOG_EVERY in (0, 1):
                    values = dict(zip(STATISTICS, statistics.tolist(), strict=True))
                    self.spent += time.time() - clock
                    clock = time.time()
                    speed = tokens / max(1e-9, self.spent - mark)
                    self.record(
                        step=step,
                        stage=stage,
                        row=variant.row,
                        seconds=round(self.spent, 2),
                        speed=round(speed),
                        **values,
                    )
                    note = (
                        f"{mode_of(variant)} step {step} loss {values['loss']:.3f} "
                        f"right {values['accuracy']:.1%} {speed / 1e3:.0f}k tokens/s"
                    )
                    bar.update(task, description=f"stage {stage}", completed=progress, note=note)
                    if step % (LOG_EVERY * 10) < 2:
                        self.console.print(
                            f"{note} index {values['index']:.3f} load {values['load']:.1f} {self.spent:.0f} s",
                            markup=False,
                        )
                        tokens, mark = 0, self.spent
                if time.time() - self.saved > SAVE_SECONDS:
                    self.save()
                    clock = time.time()
                step += 1
        self.save()
        self.assess("end of stage C", quantised=True)


def curve(out: Path) -> None:
    """The loss of short and long rows over the steps, as a picture."""
    import matplotlib.pyplot as plt  # an optional dependency: only training draws

    records = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    figure, axis = plt.subplots(figsize=(8, 4.5))
    for row, name in ((SHORT_ROW, "short rows"), (LONG_ROW, "long rows")):
        points = [(r["step"], r["loss"]) for r in records if r.get("row") == row]
        if points:
            axis.plot(*zip(*points, strict=True), label=name, linewidth=0.8)
    axis.set(xlabel="step", ylabel="weighted cross entropy", yscale="log")
    axis.legend()
    figure.tight_layout()
    figure.savefig(out / "loss.png", dpi=110)


def parse() -> tuple[Plan, argparse.Namespace]:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m train.tiny", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=None, help="updates in all (default 5000; smoke: 60)")
    parser.add_argument(
        "--wall", type=float, default=None, help="cap on the seconds from start to end of training"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument(
        "--corpus", type=Path, default=DEFAULT_FILE, help="made by apt if absent (not in a smoke run)"
    )
    parser.add_argument("--tokenizer", type=Path, default=Path("flashstep/tiny/tokenizer.json"))
    parser.add_argument(
        "--smoke", action="store_true", help="a half-size model for a minute, with built-in text"
    )
    parser.add_argument(
        "--start", type=Path, default=None, help="checkpoint folder (released layout) to continue from"
    )
    parser.add_argument(
        "--stages", default=None, help="shares of the steps in stages A, B and C, for example 0,0.7,0.3"
    )
    parser.add_argument(
        "--decay-from", type=float, default=DECAY_FROM, help="share of the run from which the rate falls to 0"
    )
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--no-evaluation", action="store_true")
    parser.add_argument(
        "--compare", action="store_true", help="compare numerics and code paths after each stage"
    )
    o = parser.parse_args()
    device = torch.device(o.device)
    gpu = device.type == "cuda"
    plan = Plan(
        out=o.out,
        steps=o.steps or (60 if o.smoke else 5000),
        wall=o.wall or float("inf"),
        short_rows=48 if gpu else 2 if o.smoke else 8,
        long_rows=8 if gpu else 0 if o.smoke else 1,
        seed=o.seed,
        workers=o.workers or (12 if gpu else 2),
        device=device,
        compile=gpu and not o.no_compile,
        graphs=gpu and not o.no_graphs,
        shares=tuple(float(share) for share in o.stages.split(",")) if o.stages else SHARES,
        decay_from=o.decay_from,
        smoke=o.smoke,
        evaluate=not o.no_evaluation,
        compare=o.compare,
    )
    return plan, o


def main() -> None:
    """Data, model, training, files."""
    plan, o = parse()
    plan.out.mkdir(parents=True, exist_ok=True)
    if plan.smoke and not o.corpus.exists():
        corpus = Corpus.builtin()
    else:
        corpus = (
            Corpus.read(o.corpus)
            if o.corpus.exists()
            else build(fetch(o.corpus.parent / "packages"), o.corpus)
        )
    tokenizer = Tokenizer.from_file(str(o.tokenizer))
    config = ModelConfig.parse(config_json(tokenizer, SMOKE if plan.smoke else TINY))
    torch.backends.cuda.matmul.allow_tf32 = False  # mHC and the router are fp32: no TF32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    token_map = torch.tensor(TokenMap.build(tokenizer).ids)
    trainer = Trainer(
        config, token_map, seed=plan.seed, device=plan.device, compile_=compiler() if plan.compile else None
    )
    if o.start:
        trainer.parameters.take(checkpoint.load(o.start).weights)
    feed = Feed(plan, corpus, o.tokenizer)
    evaluation = Evaluation(plan, tokenizer, corpus) if plan.evaluate else None
    run = Run(plan, trainer, feed, evaluation)
    run.console.print(f"{trainer.parameters.count / 1e6:.2f} M parameters, {plan}", markup=False)
    try:
        run.train()
        curve(plan.out)
    finally:
        feed.close()


if __name__ == "__main__":
    main()
