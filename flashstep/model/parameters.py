"""The weights of a model while it is being built: each released name is handed out once, and none may be left over.

Takes the mapping of the loader (released names; FP8 pairs and stacked experts as ``QuantTensor``). Knows no layer.
"""

from collections.abc import Mapping

from torch import Tensor

from flashstep.parallel.rank import Rank
from flashstep.quant.tensor import QuantTensor


class Parameters:
    """Hands out weights by released name and remembers which were taken; ``rank`` says whose they are."""

    def __init__(self, weights: Mapping[str, Tensor | QuantTensor], *, rank: Rank | None = None) -> None:
        self._weights = weights
        self.rank = rank or Rank()
        self._taken: set[str] = set()

    def plain(self, name: str) -> Tensor:
        """The unquantised tensor ``name``."""
        value = self._take(name)
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} came quantised; the model expects a plain tensor")
        return value

    def quantised(self, name: str) -> QuantTensor:
        """The quantised tensor ``name`` with its scales."""
        value = self._take(name)
        if not isinstance(value, QuantTensor):
            raise ValueError(f"{name} came unquantised; the model expects packed bytes with scales")
        return value

    def again(self) -> "Parameters":
        """Hands everything out once more: a weight may stand in two products."""
        return Parameters(self._weights, rank=self.rank)

    def left_over(self) -> list[str]:
        """Names that nobody took, sorted."""
        return sorted(set(self._weights) - self._taken)

    def _take(self, name: str) -> Tensor | QuantTensor:
        if name not in self._weights:
            raise ValueError(f"the model needs {name}, and the weights do not hold it")
        assert name not in self._taken, f"{name} was taken twice"
        self._taken.add(name)
        return self._weights[name]
