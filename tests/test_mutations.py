"""The mutations of spec/model.md 13 (x), in process: broken on either side, engine and oracle no longer agree.

``python tests/mutations.py`` runs the real tests under each of them.
"""

import pytest
import torch
from torch import Tensor

from oracle import model as oracle
from tests.model import tiny
from tests.model.driver import Driver
from tests.mutants import MUTATIONS, Mutation

LENGTH = 40


class Pair:
    """One configuration A with weights, computed by the serving model and by the oracle."""

    def __init__(self) -> None:
        self.config = tiny.configuration("A")
        self.weights, self.tables = tiny.random_weights(self.config, seed=11)
        self.map = tiny.token_map(self.config)
        self.values = tiny.oracle_weights(self.weights, self.tables, self.config)
        self.tokens = tiny.random_tokens(LENGTH, config=self.config, seed=12)

    @torch.inference_mode()
    def oracle(self) -> Tensor:
        ids = torch.tensor([self.tokens])
        output = oracle.forward(self.config, self.values, ids, numerics=oracle.N2, token_map=self.map)
        assert output.logits_BTV is not None
        return output.logits_BTV[0]

    @torch.inference_mode()
    def serving(self) -> Tensor:
        driver = Driver(self.config, self.weights, self.tables, token_map=self.map)
        return driver.run(self.tokens, cuts=(17, 18))


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


@pytest.fixture(scope="module")
def expected(pair: Pair) -> Tensor:
    unbroken = pair.oracle()
    assert torch.equal(pair.serving(), unbroken)
    return unbroken


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_mutation_of_the_serving_side_shows(
    mutation: Mutation, pair: Pair, expected: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation.serving(monkeypatch.setattr)
    assert not torch.equal(pair.serving(), expected)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_mutation_of_the_oracle_shows(
    mutation: Mutation, pair: Pair, expected: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation.oracle(monkeypatch.setattr)
    assert not torch.equal(pair.oracle(), expected)
