"""Text sampled from the target while drafts are trained on it: packed documents whose last answers rewrite themselves.

A draft meets text that the model SAMPLED, so it is trained on some. Each row that the model would write keeps one uniform
number; a forward over the whole batch then says what that number draws at every row, given the text so far. Putting
the drawn tokens in place and repeating is a fixed-point iteration: the prefix on which nothing changes any more is
exactly a sample at temperature 1, and it grows by at least a token a forward. The forward is needed for
training anyway, so sampling costs nothing more.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from oracle.model import first_rows
from train.data import Batch

EOS_ID = 1
TAUGHT_FROM = (
    0.25  # loss weight of plain text is 0.3, of answers 1; what is below is never the model's to write
)


class Texts(NamedTuple):
    """A batch of packed rows, all [B, T]: static buffers under CUDA graphs.

    ``taught``: rows whose next token drafts are trained to predict. ``own``: rows whose next token the model draws
    (the last answer of each document). ``draws``: a uniform number for each row. ``fresh`` (bool []): still the reference text.
    """

    ids: Tensor
    documents: Tensor
    taught: Tensor
    own: Tensor
    draws: Tensor
    fresh: Tensor


def last_answers(batch: Batch) -> np.ndarray:
    """bool [B, T]: rows that predict a token of the last answer of their document."""
    found = np.zeros(batch.ids.shape, bool)
    for row, weights in enumerate(batch.weight):
        answers = np.flatnonzero(weights == 1)
        if not len(answers):
            continue
        runs = np.split(answers, np.flatnonzero(np.diff(answers) > 1) + 1)
        last = {int(batch.document[row, run[0]]): run for run in runs}  # a later run replaces an earlier one
        for run in last.values():
            found[row, run] = True
    return found


def texts_of(batch: Batch, rng: np.random.Generator, device: torch.device) -> Texts:
    """``batch`` as given, with new draws, on the device."""
    host = (
        batch.ids,
        batch.document,
        batch.weight > TAUGHT_FROM,
        last_answers(batch),
        rng.random(batch.ids.shape, np.float32),
        np.ones((), bool),
    )
    tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in host]
    if device.type == "cuda":
        tensors = [t.pin_memory().to(device, non_blocking=True) for t in tensors]
    return Texts(*tensors)


def sample(logits_BTV: Tensor, draws_BT: Tensor) -> Tensor:
    """int64 [B, T]: the token whose share of the cumulative distribution holds the draw (temperature 1)."""
    below = logits_BTV.float().softmax(-1).cumsum(-1) < draws_BT.unsqueeze(-1)
    return below.sum(-1).clamp(max=logits_BTV.shape[-1] - 1)


def advance(texts: Texts, logits_BTV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(ids after one more iteration, settled bool [B, T], ended bool [B, T]).

    ``settled``: the text up to and including that row is as the model sampled it. ``ended``: the answer had ended by that row.
    """
    ids, own = texts.ids, texts.own
    rows = torch.arange(ids.shape[1], device=ids.device)
    first = first_rows(texts.documents)
    written = F.pad(own[:, :-1], (1, 0))
    ended = torch.where(written & (ids == EOS_ID), rows, -1).cummax(1).values >= first
    drawn = sample(logits_BTV, texts.draws)
    following = F.pad(ids[:, 1:], (0, 1))
    open_rows = own & ~ended
    changes = torch.where(open_rows & (drawn != following), rows, -1).cummax(1).values
    settled = F.pad(changes[:, :-1], (1, 0), value=-1) < first
    new = ids.clone()
    new[:, 1:] = torch.where(open_rows, drawn, following)[:, :-1]
    return new, settled, ended
