"""Train the draft of a checkpoint: ``python -m train.dspark --target flashstep/tiny --out DIR`` (one H200 in minutes).

The target stays as it is, at tier N2; three draft layers start from its last layers and learn its distributions, along the
training mix and along text that the target samples itself (``train.rollout``). Writes ``draft.pt`` (stored bytes, for
``train.export --draft``), a log, scores by task with the reliability of the confidence, and two pictures.
"""

import argparse
import dataclasses
import json
import queue
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer

from flashstep.config.model import ModelConfig
from oracle import checkpoint
from train.corpus import DEFAULT_FILE, Corpus, build, fetch
from train.dialogue import Encoder
from train.draft_score import cases_by_task, evaluate, pack
from train.draft_step import STATISTICS, DraftTrainer
from train.functions import compiler
from train.loader import Loader
from train.rollout import Texts, texts_of
from train.shape import with_draft
from train.tiny import LONG_ROW, SHORT_ROW, rate_of

STAGES = 3
LONG_EVERY = 4  # of the steps, one has long rows
VISITS = 3  # steps that see one batch, each with its text one iteration further; a short run with 16 was far too sure of itself
DECAY_FROM = 0.5
LOG_EVERY = 20
SAVE_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Shape:
    """A batch: ``rows`` of ``row`` tokens, ``count`` anchors in each row; ``kept`` batches are in turn at a time."""

    rows: int
    row: int
    count: int
    kept: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the command line asks for."""

    out: Path
    steps: int
    seconds: float
    short: Shape
    long: Shape | None
    seed: int
    workers: int
    device: torch.device
    compile: bool
    graphs: bool
    small: bool


class Turns:
    """Batches of one shape in turn: each is seen ``VISITS`` times, its text a little more the model's own each time."""

    def __init__(self, plan: Plan, shape: Shape, corpus: Corpus, tokenizer: Path, *, long: bool) -> None:
        self.shape, self.device = shape, plan.device
        self.loader = Loader(
            corpus, tokenizer, seed=plan.seed + (12 if long else 11), short=not long, row=shape.row,
            rows=shape.rows, workers=plan.workers,
        )  # fmt: skip
        self.ready: queue.Queue[Texts] = queue.Queue(3)
        self.texts: list[Texts | None] = [None] * shape.kept
        # the first round ends at different times, so that fresh batches come one by one
        self.left = [0] * shape.kept
        self.first = [max(1, (i + 1) * VISITS // shape.kept) for i in range(shape.kept)]
        self.turn = 0
        threading.Thread(target=self._move, args=(plan.seed + shape.row,), daemon=True).start()

    def _move(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while True:
            self.ready.put(texts_of(self.loader.batch(), rng, self.device))

    def next(self) -> Texts:
        """The batch whose turn it is."""
        place = self.turn % len(self.texts)
        self.turn += 1
        if self.left[place] == 0:
            self.left[place] = self.first[place] if self.texts[place] is None else VISITS
            self.texts[place] = self.ready.get(timeout=120)
        self.left[place] -= 1
        found = self.texts[place]
        assert found is not None
        return found

    def close(self) -> None:
        """End the workers."""
        self.loader.close()


class Run:
    """The loop: schedule, log, files."""

    def __init__(self, plan: Plan, trainer: DraftTrainer, turns: list[Turns]) -> None:
        self.plan, self.trainer, self.turns = plan, trainer, turns
        self.log = (plan.out / "log.jsonl").open("w", encoding="utf-8")
        self.console = Console(width=160)
        self.begun = time.time()
        self.curve: list[tuple[int, float]] = []

    def record(self, **fields: object) -> None:
        """One line of the log file, at once on the disk."""
        self.log.write(json.dumps(fields) + "\n")
        self.log.flush()

    def say(self, text: str) -> None:
        """One line to the terminal, with the time since the start."""
        self.console.print(f"{time.time() - self.begun:5.0f} s  {text}", markup=False, highlight=False)

    def save(self) -> None:
        """The draft as a checkpoint stores it, replaced in one move."""
        target = self.plan.out / "draft.pt"
        torch.save(self.trainer.parameters.packed(), target.with_suffix(".part"))
        target.with_suffix(".part").replace(target)

    def _step(self, turns: Turns) -> torch.Tensor:
        return self.trainer.run(turns.next(), count=turns.shape.count, graphs=self.plan.graphs)

    def warm_up(self) -> None:
        """Compile and capture every shape by a few slow updates."""
        self.trainer.set_rate(1 / 60)
        for turns in self.turns:
            for _ in range(4):
                self._step(turns).tolist()
            self.say(f"{turns.shape} is ready")

    def train(self) -> None:
        """All steps of the plan."""
        plan, step = self.plan, 0
        if plan.graphs:
            self.warm_up()
        start = saved = time.time()
        while (progress := max(step / plan.steps, (time.time() - start) / plan.seconds)) < 1:
            self.trainer.set_rate(rate_of(progress, step, DECAY_FROM))
            long = len(self.turns) > 1 and step % LONG_EVERY == LONG_EVERY - 1
            statistics = self._step(self.turns[int(long)])
            if step % LOG_EVERY == 0 or (long and step % (LOG_EVERY * LONG_EVERY) == LONG_EVERY - 1):
                values = dict(zip(STATISTICS, statistics.tolist(), strict=True))
                row = self.turns[int(long)].shape.row
                self.record(step=step, row=row, seconds=round(time.time() - start, 2), **values)
                if not long:
                    self.curve.append((step, values["length"]))
                if step % (10 * LOG_EVERY) == 0:
                    shown = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
                    self.say(f"step {step} ({progress:.0%})  {shown}")
            if time.time() - saved > SAVE_SECONDS:
                self.save()
                saved = time.time()
            step += 1
        self.save()
        self.say(f"{step} steps in {time.time() - start:.0f} s")
        self.record(steps=step, seconds=round(time.time() - start, 1))

    def assess(self, tokenizer: Tokenizer, corpus: Corpus) -> dict[str, Any]:
        """Scores of held-out cases; also written to ``scores.json`` and drawn."""
        plan, trainer, encoder = self.plan, self.trainer, Encoder(tokenizer)
        tasks = {}
        for name, cases in cases_by_task(tokenizer, corpus, small=plan.small).items():
            shape = plan.long if plan.long and name == "recall 4096" else plan.short
            tasks[name] = pack(
                cases, encoder, rows=shape.rows, row=shape.row, device=plan.device, seed=len(tasks)
            )
        with torch.no_grad():
            scores = evaluate(trainer.config, trainer.weights(), tasks, trainer.target_forward)
        (plan.out / "scores.json").write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
        for name, result in scores.items():
            self.say(f"{name}: {json.dumps(result)}")
        return scores


def draw(out: Path, scores: dict[str, Any], curve: list[tuple[int, float]]) -> None:
    """``reliability.svg`` and ``training.svg``."""
    import matplotlib.pyplot as plt  # an optional dependency: only training draws

    bins = scores["reliability"]
    confidence = [b["confidence"] for b in bins]
    figure, axis = plt.subplots(figsize=(6, 4.5))
    axis.plot(confidence, [b["stood"] for b in bins], "o-", label="stood, greedy drafts")
    axis.plot(
        confidence, [b["overlap"] for b in bins], ".-", label="sum of min(p, q), what it was trained on"
    )
    axis.plot([0, 1], [0, 1], "--", color="grey", linewidth=0.8, label="perfect")
    axis.set(xlabel="confidence, mean of a tenth", ylabel="share accepted", xlim=(0, 1), ylim=(0, 1))
    axis.legend()
    figure.tight_layout()
    figure.savefig(out / "reliability.svg")
    figure, axis = plt.subplots(figsize=(8, 4.5))
    axis.plot(*zip(*curve, strict=True), linewidth=0.8)
    axis.set(xlabel="step", ylabel="expected tokens a step, teacher-forced (short rows)", ylim=(1, 6))
    figure.tight_layout()
    figure.savefig(out / "training.svg")


def parse() -> tuple[Plan, argparse.Namespace]:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m train.dspark", description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="checkpoint folder; never changed")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6000, help="updates at most")
    parser.add_argument("--seconds", type=float, default=400, help="of training at most; the rate follows")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=None, help="data processes for each row length")
    parser.add_argument("--corpus", type=Path, default=DEFAULT_FILE, help="made by apt if absent")
    parser.add_argument("--smoke", action="store_true", help="tiny batches and few cases, built-in text")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    o = parser.parse_args()
    device = torch.device(o.device)
    gpu = device.type == "cuda"
    if o.smoke:
        short, long = Shape(1, 768, 24, 2), None
    else:
        rows = 48 if gpu else 4
        short = Shape(rows, SHORT_ROW, 128, 12)
        long = Shape(max(1, rows // 6), LONG_ROW, 768, 6)
    plan = Plan(
        out=o.out,
        steps=o.steps,
        seconds=o.seconds,
        short=short,
        long=long,
        seed=o.seed,
        workers=o.workers or (5 if gpu else 1),
        device=device,
        compile=gpu and not o.no_compile,
        graphs=gpu and not o.no_graphs,
        small=o.smoke,
    )
    return plan, o


def main() -> None:
    """Data, model, training, files."""
    plan, o = parse()
    plan.out.mkdir(parents=True, exist_ok=True)
    if plan.small and not o.corpus.exists():
        corpus = Corpus.builtin()
    else:
        corpus = (
            Corpus.read(o.corpus)
            if o.corpus.exists()
            else build(fetch(o.corpus.parent / "packages"), o.corpus)
        )
    file = o.target / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    loaded = checkpoint.load(o.target)
    data = json.loads((o.target / "config.json").read_text(encoding="utf-8"))
    config = ModelConfig.parse(with_draft(data, STAGES))
    torch.backends.cuda.matmul.allow_tf32 = False  # mHC and the router are fp32: no TF32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.manual_seed(plan.seed)
    assert loaded.token_map is not None, "the target has no Engram layers"
    trainer = DraftTrainer(
        config, loaded.weights, loaded.token_map, seed=plan.seed, device=plan.device,
        compile_=compiler() if plan.compile else None,
    )  # fmt: skip
    turns = [Turns(plan, plan.short, corpus, file, long=False)]
    if plan.long:
        turns.append(Turns(plan, plan.long, corpus, file, long=True))
    run = Run(plan, trainer, turns)
    run.say(f"{trainer.parameters.count / 1e6:.2f} M parameters, {plan}")
    try:
        run.train()
        draw(plan.out, run.assess(tokenizer, corpus), run.curve)
    finally:
        for t in turns:
            t.close()
    run.say("done")


if __name__ == "__main__":
    main()
