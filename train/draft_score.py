"""How many drafts stand: by task, on reference text and on text sampled from the target at temperature 1, and reliability.

Sampled text comes from ``train.rollout`` run to its end. Greedy drafts are a point mass, so a draft stands exactly when it is the
token that the target drew: walking each answer from its first token gives the steps that a server would make. Takes any
target forward and the draft's weights; held-out cases from ``train.cases``.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from flashstep.config.model import ModelConfig
from oracle import dspark
from oracle.dspark import Anchors
from oracle.model import Weights
from train.cases import Case, call_cases, problem_cases, recall_cases
from train.chat import chat
from train.corpus import Corpus
from train.data import ALIGN, PAD_ID
from train.dialogue import Encoder, render
from train.functions import QUANTISED, plain
from train.rollout import EOS_ID, Texts, advance

ROOM = 64  # tokens by which a sampled answer may outgrow the reference
ITERATIONS = 96
ANCHORS_A_TIME = 4096
BINS = 10

Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # ids, documents -> logits, features


@dataclasses.dataclass(frozen=True)
class Answer:
    """Where one case lies: tokens ``first`` to ``end`` (exclusive) of row ``row`` are its reference answer."""

    row: int
    first: int
    end: int


@dataclasses.dataclass(frozen=True)
class Packed:
    """A batch of cases of one task, with room behind each answer."""

    texts: Texts
    answers: tuple[Answer, ...]


def chat_cases(count: int, corpus: Corpus, *, seed: int = 1) -> list[Case]:
    """Small talk and facts; their questions are few, so many of them occur in training too."""
    rng = random.Random(f"chat {seed}")
    return [Case("chat", chat(rng, corpus.glosses), "") for _ in range(count)]


def cases_by_task(tokenizer: Tokenizer, corpus: Corpus, *, small: bool) -> dict[str, list[Case]]:
    """Held-out cases; ``small`` for a rehearsal on a CPU."""
    counts = (6, 3, 3, 6) if small else (240, 96, 96, 300)
    found = {
        "problem": problem_cases(counts[0], seed=11),
        "call": call_cases(counts[1], seed=11),
        "recall 512": recall_cases(counts[2], tokenizer, corpus, length=512, seed=11),
        "chat": chat_cases(counts[3], corpus, seed=11),
    }
    if not small:
        found["recall 4096"] = recall_cases(48, tokenizer, corpus, length=4096, seed=11)
    return found


def pack(
    cases: Sequence[Case], encoder: Encoder, *, rows: int, row: int, device: torch.device, seed: int
) -> list[Packed]:
    """Batches of ``rows`` x ``row`` tokens holding every case, each with ``ROOM`` tokens behind it."""
    rng = np.random.default_rng(seed)
    lines: list[list[tuple[list[int], list[int]]]] = []
    used: list[int] = []
    for case in cases:
        prompt, answer = encoder.prompt_and_answer(render(case.dialogue))
        size = len(prompt) + len(answer) + ROOM
        assert size <= row, f"a {case.kind} case has {size} tokens with its room, a row {row}"
        index = next((i for i, u in enumerate(used) if u + size <= row), len(used))
        if index == len(used):
            used.append(0)
            lines.append([])
        lines[index].append((prompt, answer))
        used[index] += -(-size // ALIGN) * ALIGN
    return [_batch(lines[i : i + rows], rows, row, rng, device) for i in range(0, len(lines), rows)]


def _batch(
    lines: Sequence[Sequence[tuple[list[int], list[int]]]],
    rows: int,
    row: int,
    rng: np.random.Generator,
    device: torch.device,
) -> Packed:
    ids, own = np.full((rows, row), PAD_ID, np.int64), np.zeros((rows, row), bool)
    documents = np.ones((rows, row), np.int64)
    answers = []
    for line, parts in enumerate(lines):
        start = 0
        for number, (prompt, answer) in enumerate(parts):
            first, end = start + len(prompt), start + len(prompt) + len(answer)
            ids[line, start:end] = prompt + answer
            documents[line, start : end + ROOM] = 2 * number
            documents[line, end + ROOM :] = 2 * number + 1
            own[line, first - 1 : end + ROOM - 1] = True
            answers.append(Answer(line, first, end))
            start = -(-(end + ROOM) // ALIGN) * ALIGN
    arrays = (ids, documents, own, own, rng.random(ids.shape, np.float32), np.zeros((), bool))
    return Packed(Texts(*(torch.from_numpy(a).to(device) for a in arrays)), tuple(answers))


def sampled(texts: Texts, forward: Forward) -> tuple[Texts, Tensor]:
    """(texts with the model's own answers, settled bool [B, T])."""
    for _ in range(ITERATIONS):
        following, settled, _ = advance(texts, forward(texts.ids, texts.documents)[0])
        done = bool((following == texts.ids).all())
        texts = texts._replace(ids=following)
        if done:
            break
    return texts, settled


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One block a row of the arrays: ``stand`` bool [M, K] greedy drafts equal to the text, ``share`` sum min(p, q) under
    teacher forcing, ``likely`` p of the draft's best token, ``sure`` the confidence. Anchors are (row, position) pairs."""

    row: np.ndarray
    position: np.ndarray
    stand: np.ndarray
    share: np.ndarray
    likely: np.ndarray
    sure: np.ndarray


@torch.no_grad()
def outcome(
    config: ModelConfig,
    weights: Weights,
    texts: Texts,
    where: tuple[Tensor, Tensor],
    logits_BTV: Tensor,
    features_BTG: Tensor,
) -> Outcome:
    """Drafts at the anchors ``where`` (rows, positions), given the text as it is."""
    options = dspark.Options(functions=plain())
    total, block = texts.ids.shape[1], config.dspark_block_size
    flat_ids, flat_logits = texts.ids.flatten(), logits_BTV.flatten(0, 1)
    parts: list[list[np.ndarray]] = []
    for start in range(0, len(where[0]), ANCHORS_A_TIME):
        row, position = (t[start : start + ANCHORS_A_TIME] for t in where)
        anchors = Anchors(sequence=row, position=position, token=texts.ids[row, position])
        made = dspark.draft(
            config, weights, features_BTG, anchors, numerics=QUANTISED, documents_BT=texts.documents,
            options=options,
        )  # fmt: skip
        steps = torch.arange(block, device=row.device)
        inside = (position[:, None] + steps + 1).clamp(max=total - 1)
        places = (row * total)[:, None] + inside
        given, sure = dspark.markov(config, weights, made, flat_ids[places - 1], numerics=QUANTISED)
        p, q = flat_logits[places - 1].softmax(-1), given.softmax(-1)
        best = q.argmax(-1)
        likely = p.gather(-1, best.unsqueeze(-1)).squeeze(-1)
        share = torch.minimum(p, q).sum(-1)
        found = (best == flat_ids[places], share, likely, sure.sigmoid())
        parts.append([t.float().cpu().numpy() for t in found])
    stand, share, likely, sure = (np.concatenate(a) for a in zip(*parts, strict=True))
    return Outcome(where[0].cpu().numpy(), where[1].cpu().numpy(), stand > 0, share, likely, sure)


def _anchors(spans: Sequence[tuple[int, int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """All positions of (row, first, end): anchors from ``first`` to the token before the last."""
    rows = [r for r, first, end in spans for _ in range(first, end - 1)]
    positions = [n for _, first, end in spans for n in range(first, end - 1)]
    return torch.tensor(rows, device=device), torch.tensor(positions, device=device)


def answer_ends(packed: Packed, ids: np.ndarray, settled: np.ndarray) -> list[tuple[int, int, int]]:
    """(row, first, end) of each sampled answer: up to its EOS, or as far as it is settled."""
    spans = []
    for answer in packed.answers:
        stop = answer.end + ROOM
        line = ids[answer.row, answer.first : stop]
        ends = np.flatnonzero(line == EOS_ID)
        length = int(ends[0]) + 1 if len(ends) else len(line)
        loose = np.flatnonzero(~settled[answer.row, answer.first : answer.first + length])
        spans.append((answer.row, answer.first, answer.first + (int(loose[0]) if len(loose) else length)))
    return spans


def walk(
    stand: np.ndarray, firsts: Sequence[tuple[int, int, int]], rows: np.ndarray, positions: np.ndarray
) -> list[int]:
    """Drafts that stood in each step a server would make; drafts behind the last token do not count."""
    place = {(int(r), int(n)): i for i, (r, n) in enumerate(zip(rows, positions, strict=True))}
    taken = []
    for row, first, end in firsts:
        n = first
        while n < end - 1:
            room = end - 1 - n
            block = stand[place[row, n]][:room]
            count = len(block) if block.all() else int(block.argmin())
            taken.append(count)
            n += count + 1
    return taken


class Scores:
    """Collected over the batches of a task."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.reference: list[np.ndarray] = []  # sum min(p, q) of anchors whose whole block is the answer's
        self.likely: list[np.ndarray] = []
        self.steps: list[int] = []
        self.pairs: list[np.ndarray] = []  # (confidence, stood, sum min(p, q)) given that all earlier stood
        self.sums: list[np.ndarray] = []  # sum min(p, q) along sampled text

    def add_reference(self, found: Outcome, ends: np.ndarray) -> None:
        """Blocks of reference text; ``ends`` [M] is where each anchor's answer ends."""
        whole = found.position + self.block < ends
        self.reference.append(found.share[whole])
        self.likely.append(found.likely[whole])

    def add_sampled(self, found: Outcome, spans: Sequence[tuple[int, int, int]], ends: np.ndarray) -> None:
        """Blocks of sampled text."""
        self.steps += walk(found.stand, spans, found.row, found.position)
        inside = found.position[:, None] + np.arange(1, self.block + 1) < ends[:, None]
        earlier = np.cumprod(np.pad(found.stand[:, :-1], ((0, 0), (1, 0)), constant_values=True), 1) > 0
        seen = inside & earlier
        self.pairs.append(np.stack([a[seen] for a in (found.sure, found.stand, found.share)], 1))
        self.sums.append(found.share[found.position + self.block < ends])

    def summary(self) -> dict[str, Any]:
        """Lengths and rates, as plain numbers."""
        shares, likely, sums = (np.concatenate(a) for a in (self.reference, self.likely, self.sums))
        steps = np.array(self.steps)
        pairs = np.concatenate(self.pairs)
        return {
            "anchors": len(shares),
            "length_forced": _expected(shares),
            "length_forced_greedy": _expected(likely),
            "by_place": [round(float(v), 3) for v in shares.cumprod(1).mean(0)],
            "length_forced_sampled_text": _expected(sums),
            "steps": len(steps),
            "length_sampled": round(float(1 + steps.mean()), 3),
            "histogram": np.bincount(steps, minlength=self.block + 1).tolist(),
            "by_place_sampled": [round(float((steps > i).mean()), 3) for i in range(self.block)],
            "confidence_mean": round(float(pairs[:, 0].mean()), 3),
            "stood_mean": round(float(pairs[:, 1].mean()), 3),
        }


def _expected(shares: np.ndarray) -> float:
    """One plus the expected number of accepted drafts of rates [M, K]."""
    return round(float(1 + shares.cumprod(1).sum(1).mean()), 3) if len(shares) else float("nan")


def reliability(pairs: np.ndarray) -> list[dict[str, float]]:
    """By confidence in tenths: how many, the mean confidence, the share that stood, the mean sum min(p, q)."""
    place = np.minimum((pairs[:, 0] * BINS).astype(int), BINS - 1)
    rows = []
    for index in range(BINS):
        chosen = pairs[place == index]
        if len(chosen):
            means = chosen.mean(0)
            rows.append(
                {
                    "count": len(chosen),
                    "confidence": round(float(means[0]), 4),
                    "stood": round(float(means[1]), 4),
                    "overlap": round(float(means[2]), 4),
                }
            )
    return rows


def evaluate(
    config: ModelConfig,
    weights: Weights,
    tasks: dict[str, list[Packed]],
    forward: Forward,
) -> dict[str, Any]:
    """Scores by task, and reliability over all of them."""
    found: dict[str, Any] = {}
    pairs: list[np.ndarray] = []
    for name, batches in tasks.items():
        scores = Scores(config.dspark_block_size)
        for packed in batches:
            _score_batch(config, weights, packed, forward, scores)
        found[name] = scores.summary()
        pairs += scores.pairs
    found["reliability"] = reliability(np.concatenate(pairs))
    return found


def _score_batch(
    config: ModelConfig, weights: Weights, packed: Packed, forward: Forward, scores: Scores
) -> None:
    texts, device = packed.texts, packed.texts.ids.device
    spans = [(a.row, a.first, a.end) for a in packed.answers]
    where = _anchors(spans, device)
    scores.add_reference(
        outcome(config, weights, texts, where, *forward(texts.ids, texts.documents)), _ends(spans)
    )
    texts, settled = sampled(texts, forward)
    spans = answer_ends(packed, texts.ids.cpu().numpy(), settled.cpu().numpy())
    spans = [span for span in spans if span[2] - span[1] > 1]
    where = _anchors(spans, device)
    made = outcome(config, weights, texts, where, *forward(texts.ids, texts.documents))
    scores.add_sampled(made, spans, _ends(spans))


def _ends(spans: Sequence[tuple[int, int, int]]) -> np.ndarray:
    return np.array([end for _, first, end in spans for _ in range(first, end - 1)])
