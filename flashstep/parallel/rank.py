"""One rank of a layout as the modules of a model see it: where an expert's pairs go, and what is exchanged with the others.

An emulated rank has nobody to exchange with: what would be gathered is a local copy, what would be reduced stays as it is, and
``excluded`` names what a measurement therefore leaves out.
"""

import torch
from torch import Tensor

from flashstep.parallel.layout import TP, WHOLE, Layout, local_expert_of


class Rank:
    """The rank that ``layout`` says, on ``device``."""

    def __init__(self, layout: Layout = WHOLE, *, device: torch.device | None = None) -> None:
        self.layout = layout
        self._device = device

    def placement(self, experts: int, *, local: int) -> Tensor | None:
        """int64 [experts]: the local expert of each; None where all are local."""
        if local == experts:
            return None
        placed = local_expert_of(experts, parts=self.layout.expert_parts, local=local)
        return torch.tensor(placed, dtype=torch.int64, device=self._device)

    def gather(self, x_TO: Tensor, *, width: int) -> Tensor:
        """[T, width] of a rank's part [T, O] of the outputs: the parts of the others are copies of this one."""
        return x_TO if x_TO.shape[1] == width else x_TO.repeat(1, width // x_TO.shape[1])

    @property
    def excluded(self) -> tuple[str, ...]:
        """What a step of the whole layout does and this rank does not."""
        if self.layout.size == 1:
            return ()
        if self.layout.kind == TP:
            return (
                "all-reduce of the embedding, of each attention and of each feed-forward output (local copies)",
                "all-gather of the Engram projections and of the logits (the vocabulary is this rank's part)",
            )
        return (
            "dispatch of rows to the ranks of their experts, and the way back (the rank keeps its own rows)",
        )
