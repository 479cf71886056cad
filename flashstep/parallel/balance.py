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


def balancedness_by_window(steps: Sequence[np.ndarray], *, parts: int, window: int) -> list[float]:
    """That of each run of ``window`` steps (the last may be shorter), whose loads are added up first."""
    windows = [sum(steps[at : at + window], np.zeros_like(steps[0])) for at in range(0, len(steps), window)]
    found = (balancedness(counts_LE, parts=parts) for counts_LE in windows)
    return [value for value in found if value is not None]


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


def scaled(counts_LE: np.ndarray, *, rows: int, chosen: int) -> np.ndarray:
    """The same loads for ``rows`` rows, by largest remainder; a layer without any gets equal ones.

    An expert that had a share of all rows has no larger one than all.
    """
    counts_LE = counts_LE.copy()
    empty_L = counts_LE.sum(1) == 0
    counts_LE[empty_L] = chosen
    had_L1 = counts_LE.sum(1, keepdims=True) // chosen
    whole_LE, rest_LE = np.divmod(counts_LE * rows, had_L1)
    missing_L = rows * chosen - whole_LE.sum(1)
    order_LE = np.argsort(-rest_LE, axis=1, kind="stable")
    rank_LE = np.empty_like(order_LE)
    np.put_along_axis(rank_LE, order_LE, np.arange(counts_LE.shape[1])[None], axis=1)
    return whole_LE + (rank_LE < missing_L[:, None])


def chosen_experts(counts_E: np.ndarray, *, rows: int) -> np.ndarray:
    """int64 [rows, chosen], ascending: experts of each row that make up ``counts_E``, all of a row's distinct.

    The list of experts, each as often as it is counted, is dealt out to the rows in turn; no expert is in it more often than
    there are rows.
    """
    return np.repeat(np.arange(len(counts_E)), counts_E).reshape(-1, rows).T
