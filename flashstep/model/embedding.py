"""Token ids to residual streams, and the last hidden state to logits (spec/model.md 2 and 7)."""

from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.model.linear import LinearF, Norm
from flashstep.model.parameters import Parameters


class Embedding:
    """The embedding row of a token, copied to every stream."""

    def __init__(self, config: ModelConfig, parameters: Parameters) -> None:
        self._weight = parameters.plain("embed.weight")
        self._streams = config.hc_mult

    def __call__(self, input_ids_T: Tensor) -> Tensor:
        """int64 [T] -> bf16 [T, S, D]; contiguous, because the streams part ways at the first write."""
        return self._weight[input_ids_T].unsqueeze(1).repeat(1, self._streams, 1)


class Head:
    """A final norm and the fp32 head, untied from the embedding; the draft has a norm of its own before the same head."""

    def __init__(self, norm: Norm, linear: LinearF) -> None:
        self._norm = norm
        self._linear = linear

    def __call__(self, hidden_TD: Tensor) -> Tensor:
        """bf16 [T, D] -> fp32 [T, vocabulary]."""
        return self._linear(self._norm(hidden_TD))
