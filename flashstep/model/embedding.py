"""Token ids to residual streams (spec/model.md 2)."""

from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.model.parameters import Parameters


class Embedding:
    """The embedding row of a token, copied to every stream. A rank that holds a part of the rows folds all ids onto them."""

    def __init__(self, config: ModelConfig, parameters: Parameters) -> None:
        self._weight = parameters.plain("embed.weight")
        self._is_part = parameters.rank.layout.tensor_parts > 1
        self._streams = config.hc_mult

    def __call__(self, input_ids_T: Tensor) -> Tensor:
        """int64 [T] -> bf16 [T, S, D], the streams in one place: they part ways at the first write."""
        if self._is_part:
            input_ids_T = input_ids_T % self._weight.shape[0]
        return self._weight[input_ids_T].unsqueeze(1).expand(-1, self._streams, -1)
