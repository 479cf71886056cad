"""What loads of experts come to: how evenly parts share them, and loads for other numbers of rows (torch-free).

Takes and gives int64 counts [layers, experts]: sums are rows times chosen experts, and no expert has more than one pair of a row.
Knows no file and no device.
"""

from collections.abc import Sequence

import numpy as np


def part_loads(counts_LE: np.ndarray, *, parts: int) -> np.ndarray:
    """[layers, parts]: each part holds its run of consecutive experts, without replicas (as ``parallel.layout`` deals them)."""
    layers, experts = counts_LE.shape
    if experts % parts:
        raise ValueError(f"{parts} parts cannot share {experts} experts equally")
    return counts_LE.reshape(layers, parts, experts // parts).sum(2)


def balancedness(counts_LE: np.ndarray, *, parts: int) -> float | None:
    """Mean over largest load of the parts, 1 where all are equal; None without rows.

    Over several layers both are summed first: layers run one after the other, and each waits for its fullest part.
    """
    loads_LP = part_loads(counts_LE, parts=parts)
    fullest = loads_LP.max(1).sum()
    return float(loads_LP.mean(1).sum() / fullest) if fullest else None


class Evenness:
    """Balancedness of steps that come one after the other: each, runs of ``window`` added up, and all added up."""

    def __init__(self, *, parts: int, window: int = 0) -> None:
        self.by_step: list[float] = []
        self._by_window: list[float] = []
        self._parts = parts
        self._window = window
        self._sum_LE: np.ndarray | None = None  # of the window that is open
        self._total_LE: np.ndarray | None = None
        self._open = 0

    def add(self, counts_LE: np.ndarray) -> None:
        """A step; one without rows is none."""
        value = balancedness(counts_LE, parts=self._parts)
        if value is None:
            return
        self.by_step.append(value)
        self._total_LE = counts_LE if self._total_LE is None else self._total_LE + counts_LE
        self._sum_LE = counts_LE if self._sum_LE is None else self._sum_LE + counts_LE
        self._open += 1
        if self._open == self._window:
            self._by_window += self._last()
            self._sum_LE, self._open = None, 0

    def _last(self) -> list[float]:
        value = None if self._sum_LE is None else balancedness(self._sum_LE, parts=self._parts)
        return [] if value is None else [value]

    @property
    def by_window(self) -> list[float]:
        """The last may be shorter."""
        return self._by_window + self._last()

    @property
    def total_LE(self) -> np.ndarray:
        assert self._total_LE is not None, "there was no step"
        return self._total_LE

    @property
    def whole(self) -> float:
        value = balancedness(self.total_LE, parts=self._parts)
        assert value is not None
        return value


def touched(*, rows: int, experts: int, chosen: int) -> float:
    """How many of ``experts`` some row chooses, in the mean, where each of ``rows`` chooses ``chosen`` at random."""
    return experts * (1 - (1 - chosen / experts) ** rows)


def uniform(*, rows: int, layers: int, experts: int, chosen: int, seed: Sequence[int]) -> np.ndarray:
    """Loads as equal as they can be, on as many experts as routing at random touches in the mean.

    These lie evenly apart, so that parts share them evenly too, behind an offset that is drawn for each layer.
    """
    pairs = rows * chosen
    active = min(max(round(touched(rows=rows, experts=experts, chosen=chosen)), chosen), pairs, experts)
    offset_L = np.random.default_rng(seed).integers(experts, size=layers)
    place_A = np.arange(active)
    expert_LA = (place_A * experts // active + offset_L[:, None]) % experts
    counts_LE = np.zeros((layers, experts), dtype=np.int64)
    counts_LE[np.arange(layers)[:, None], expert_LA] = (
        place_A + 1
    ) * pairs // active - place_A * pairs // active
    return counts_LE


def drawn(counts_LE: np.ndarray, *, rows: int, chosen: int, seed: Sequence[int]) -> np.ndarray:
    """Loads of ``rows`` of the rows that made up ``counts_LE``, drawn without replacement; as many are all of them.

    Each expert's load is distributed as if the true rows were drawn (hypergeometric); which experts a row had together is not
    known, and made up. Where a layer had fewer rows, all of them count as often as they fit in whole, and the rest is drawn: it
    touches no more experts than they did. A layer without any has uniform loads.
    """
    had_L = counts_LE.sum(1) // chosen
    if (had_L == rows).all():
        return counts_LE
    rng = np.random.default_rng(seed)
    result_LE = np.empty_like(counts_LE)
    order_LE = rng.permuted(np.broadcast_to(np.arange(counts_LE.shape[1]), counts_LE.shape), axis=1)
    ends_LE = np.take_along_axis(counts_LE, order_LE, axis=1).cumsum(1)
    for had in np.unique(had_L).tolist():
        here_L = had_L == had
        if not had:
            equal = uniform(
                rows=rows, layers=len(counts_LE), experts=counts_LE.shape[1], chosen=chosen, seed=seed
            )
            result_LE[here_L] = equal[here_L]
            continue
        whole, rest = divmod(rows, had)
        # pair p belongs to row p modulo ``had``, so an expert's run of pairs has each row at most once
        kept = np.concatenate([[0], (rng.permutation(had) < rest).cumsum()])
        upto = ends_LE[here_L] // had * rest + kept[ends_LE[here_L] % had]
        few = np.empty_like(upto)
        np.put_along_axis(few, order_LE[here_L], np.diff(upto, prepend=0), axis=1)
        result_LE[here_L] = whole * counts_LE[here_L] + few
    return result_LE


def chosen_experts(counts_E: np.ndarray, *, rows: int) -> np.ndarray:
    """int64 [rows, chosen], ascending: experts of each row that make up ``counts_E``, all of a row's distinct.

    The list of experts, each as often as it is counted, is dealt out to the rows in turn; no expert is in it more often than
    there are rows.
    """
    return np.repeat(np.arange(len(counts_E)), counts_E).reshape(-1, rows).T
