"""What stands between a layer's router and its experts while somebody measures: other experts put in, and rows counted.

``Taps`` owns the buffers of all MoE layers of one kind (the target's, or the draft's). A layer calls its tap with what its
router has chosen; ``begin`` comes before the first layer of each forward. All of it is tensor work on fixed addresses, so a
captured step does it again at each replay. Knows no file and no policy. Suffixes: L layers, T rows, K experts a row, E experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Taps:
    """The taps of ``layers`` layers in which each row chooses ``chosen`` of ``experts``, for at most ``rows`` rows.

    ``assigns``: rows take the experts that ``assign`` has put there, whatever their router says (its weights stay).
    ``counts``: each forward leaves the pairs that each expert got in ``counts_LE``.
    """

    def __init__(
        self,
        *,
        layers: int,
        experts: int,
        chosen: int,
        rows: int,
        assigns: bool,
        counts: bool,
        device: torch.device,
    ) -> None:
        self.layers, self.experts, self.chosen = layers, experts, chosen
        self.counts_LE: Tensor | None = None
        self._assigned_LTK: Tensor | None = None
        self._counted_TK: Tensor | None = None
        if counts:
            self.counts_LE = torch.zeros(layers, experts, dtype=torch.int64, device=device)
            self._one_TK = torch.ones(rows * chosen, dtype=torch.int64, device=device)
        if assigns:
            first_K = torch.arange(chosen, dtype=torch.int64, device=device)
            self._assigned_LTK = first_K.expand(layers, rows, chosen).clone()
        self._next_row = [0] * layers

    @property
    def assigns(self) -> bool:
        return self._assigned_LTK is not None

    def assign(self, ends_LE: Tensor, pick_P: Tensor, *, first_layer: int = 0) -> None:
        """What the rows of layers ``first_layer`` .. take from now on. Picks are numbered, expert by expert: ``ends_LE`` int32
        says where each expert's end; ``pick_P`` int32 [rows * K] is the pick of each row's each place, the same in all layers.
        """
        assert self._assigned_LTK is not None, "these taps leave rows to their routers"
        pick_LP = pick_P.expand(ends_LE.shape[0], -1).contiguous()
        experts_LTK = torch.searchsorted(ends_LE, pick_LP, right=True).unflatten(1, (-1, self.chosen))
        layers, rows = experts_LTK.shape[:2]
        assert rows <= self._assigned_LTK.shape[1], f"a step has {rows} rows"
        self._assigned_LTK[first_layer : first_layer + layers, :rows] = experts_LTK

    def begin(self, counted_T: Tensor | None) -> None:
        """A forward begins; ``counted_T`` (bool) says which of its rows have a token, None: all."""
        self._next_row = [0] * self.layers
        self._counted_TK = None
        if self.counts_LE is not None:
            self.counts_LE.zero_()
            if counted_T is not None:
                self._counted_TK = counted_T.long().unsqueeze(1).expand(-1, self.chosen).flatten()

    def tap(self, layer: int, experts_TK: Tensor) -> Tensor:
        """The experts that the next rows of ``layer`` go to, of what its router has chosen: int64 [T, K] both."""
        first, rows = self._next_row[layer], experts_TK.shape[0]
        self._next_row[layer] = first + rows
        if self._assigned_LTK is not None:
            experts_TK = self._assigned_LTK[layer, first : first + rows]
        if self.counts_LE is not None:
            counted = self._one_TK if self._counted_TK is None else self._counted_TK
            places = slice(first * self.chosen, (first + rows) * self.chosen)
            self.counts_LE[layer].scatter_add_(0, experts_TK.flatten(), counted[places])
        return experts_TK


class Routing(NamedTuple):
    """The taps of a model; ``draft`` None: it has no draft layers that run."""

    target: Taps
    draft: Taps | None
