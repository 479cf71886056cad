"""Batches made by worker processes, in an order that depends only on the seed and the number of workers."""

import multiprocessing
import queue
from collections.abc import Iterator
from multiprocessing.queues import Queue
from pathlib import Path

from tokenizers import Tokenizer

from train.corpus import Corpus
from train.data import Batch, Packer, Source

DEPTH = 6


def _work(
    out: "Queue[Batch]", corpus: Corpus, tokenizer: str, seed: int, short: bool, row: int, rows: int
) -> None:
    packer = Packer(Source(corpus, Tokenizer.from_file(tokenizer), seed=seed, short=short, row=row), rows)
    while True:
        out.put(packer.batch())


class Loader:
    """``workers`` processes that each make every n-th batch of one length class."""

    def __init__(
        self, corpus: Corpus, tokenizer: Path, *, seed: int, short: bool, row: int, rows: int, workers: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.queues: list[Queue[Batch]] = [context.Queue(DEPTH) for _ in range(workers)]
        self.processes = [
            context.Process(
                target=_work, args=(q, corpus, str(tokenizer), seed * 1000 + i, short, row, rows), daemon=True
            )
            for i, q in enumerate(self.queues)
        ]
        for process in self.processes:
            process.start()
        self._next = self._batches()

    def _batches(self) -> Iterator[Batch]:
        while True:
            for place, source in enumerate(self.queues):
                while True:
                    try:
                        yield source.get(timeout=20)
                        break
                    except queue.Empty:
                        assert self.processes[place].is_alive(), "a data process ended"

    def batch(self) -> Batch:
        """The next batch; waits for its worker."""
        return next(self._next)

    def close(self) -> None:
        """End the workers."""
        for process in self.processes:
            process.terminate()
