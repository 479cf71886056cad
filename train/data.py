"""The training mix: random dialogues to token documents, documents to packed rows, rows to batches in processes.

One row holds several documents, each starting at a multiple of ``ALIGN`` (so that ratio-2 pairs and candidate blocks
fall as when served alone), isolated by document number, with positions from 0. Fixed seeds give fixed batches.
"""

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from train.chat import chat
from train.corpus import Corpus
from train.dialogue import BOS, EOS, WEIGHT_TEXT, Dialogue, Encoder, Piece, render
from train.problems import drills, word_problem
from train.recall import recall
from train.tools import calculator, other_tools

ALIGN = 8
PAD_ID = 2
SHORT_NOTES, LONG_NOTES = (150, 740), (250, 4500)
OWN_SHARE = (
    10  # one filler paragraph in eleven is a built-in sentence: what evaluation has without the corpus
)
OPEN_ROWS = 24  # rows being filled at a time: more waste less, and mix later

# (kind, share of short documents)
MIX = (
    ("problem", 0.40),
    ("drill", 0.09),
    ("recall", 0.17),
    ("calculator", 0.14),
    ("other", 0.04),
    ("chat", 0.12),
    ("text", 0.04),
)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows. ``ids`` [B,T] int64; ``document`` [B,T] int64: even numbers are documents, odd ones the padding behind
    them; ``weight`` [B,T] float32: loss weight of predicting the NEXT token of the same document."""

    ids: np.ndarray
    document: np.ndarray
    weight: np.ndarray


def draw(
    rng: random.Random, corpus: Corpus, filler: Sequence[tuple[str, int]], *, short: bool, longest: int = 4500
) -> Dialogue | str:
    """One document of the mix: a dialogue, or plain text as a string."""
    if not short:
        low, _ = LONG_NOTES
        tokens = (
            rng.randint(low, longest) if rng.random() < 0.35 else rng.randint(int(longest * 0.8), longest)
        )
        return recall(rng, filler, tokens)
    kind = rng.choices([k for k, _ in MIX], [w for _, w in MIX])[0]
    if kind == "problem":
        return word_problem(rng)
    if kind == "drill":
        return drills(rng)
    if kind == "recall":
        return recall(rng, filler, rng.randint(*SHORT_NOTES))
    if kind == "calculator":
        return calculator(rng)
    if kind == "other":
        return other_tools(rng)
    if kind == "chat":
        return chat(rng, corpus.glosses)
    return rng.choice(corpus.paragraphs)


class Source:
    """An endless stream of token documents of one length class, from one seed."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, *, seed: int, short: bool, row: int) -> None:
        self.rng = random.Random(seed)
        self.corpus = corpus
        self.encoder = Encoder(tokenizer)
        self.short = short
        self.row = row
        own = Corpus.builtin().paragraphs
        repeat = max(1, len(corpus.paragraphs) // (OWN_SHARE * len(own)))
        self.filler = [(text, len(self.encoder.cached(text))) for text in (*corpus.paragraphs, *own * repeat)]

    def document(self) -> tuple[list[int], list[float]]:
        """The next document that fits a row."""
        while True:
            drawn = draw(self.rng, self.corpus, self.filler, short=self.short, longest=self.row - 100)
            pieces = (
                [Piece(BOS, 0.0), Piece(drawn + EOS, WEIGHT_TEXT, written=True)]
                if isinstance(drawn, str)
                else render(drawn)
            )
            ids, weights = self.encoder.document(pieces)
            if len(ids) <= self.row:
                return ids, weights


def pack(documents: Sequence[tuple[list[int], list[float]]], rows: int, row: int) -> Batch:
    """Put given documents into ``rows`` rows of ``row`` tokens by first fit; every document must fit."""
    places: list[list[tuple[list[int], list[float]]]] = [[] for _ in range(rows)]
    used = [0] * rows
    for document in documents:
        size = -(-len(document[0]) // ALIGN) * ALIGN
        index = next(i for i in range(rows) if used[i] + len(document[0]) <= row)
        places[index].append(document)
        used[index] += size
    return _fill(places, row)


def _fill(places: Sequence[Sequence[tuple[list[int], list[float]]]], row: int) -> Batch:
    shape = (len(places), row)
    batch = Batch(np.full(shape, PAD_ID, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.float32))
    for index, documents in enumerate(places):
        start = 0
        for number, (ids, weights) in enumerate(documents):
            end = start + len(ids)
            batch.ids[index, start:end] = ids
            batch.document[index, start:end] = 2 * number
            batch.document[index, end:] = 2 * number + 1
            batch.weight[index, start : end - 1] = weights[1:]
            start = -(-end // ALIGN) * ALIGN
    return batch


class Packer:
    """Batches of ``rows`` x ``row`` tokens from a source: best fit into a few open rows."""

    def __init__(self, source: Source, rows: int) -> None:
        self.source = source
        self.rows = rows
        self.open: list[tuple[int, list[tuple[list[int], list[float]]]]] = []
        self.done: list[list[tuple[list[int], list[float]]]] = []

    def batch(self) -> Batch:
        """The next batch."""
        while len(self.done) < self.rows:
            self._place(self.source.document())
        chosen, self.done = self.done[: self.rows], self.done[self.rows :]
        return _fill(chosen, self.source.row)

    def _place(self, document: tuple[list[int], list[float]]) -> None:
        size = len(document[0])
        fits = [i for i, (used, _) in enumerate(self.open) if used + size <= self.source.row]
        if fits:
            index = max(fits, key=lambda i: self.open[i][0])
            used, documents = self.open[index]
            documents.append(document)
            self.open[index] = (used + -(-size // ALIGN) * ALIGN, documents)
            if self.source.row - self.open[index][0] < 48:
                self.done.append(self.open.pop(index)[1])
        else:
            self.open.append((-(-size // ALIGN) * ALIGN, [document]))
            if len(self.open) > OPEN_ROWS:
                fullest = max(range(len(self.open)), key=lambda i: self.open[i][0])
                self.done.append(self.open.pop(fullest)[1])
