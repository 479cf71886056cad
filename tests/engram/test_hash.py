"""Engram primes, multipliers and rows against spec/model.md 6.2 - 6.4 and the golden checkpoints."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from flashstep.config.errors import ConfigError
from flashstep.config.model import ModelConfig
from flashstep.config.presets import released
from flashstep.engram.hash import EngramHash, bucket_primes, multipliers
from flashstep.engram.token_map import TokenMap
from flashstep.kernels.engram.reference import hash_rows

VECTORS = Path(__file__).parents[3].joinpath("shared/vectors/model")
RELEASED_PRIMES = {
    1: (
        16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183,
        16000189, 16000207, 16000211, 16000253, 16000277, 16000289, 16000307, 16000321,
        16000339, 16000381, 16000393, 16000399, 16000403, 16000409, 16000447, 16000463,
    ),
    14: (
        16000477, 16000487, 16000499, 16000507, 16000511, 16000573, 16000609, 16000627,
        16000667, 16000669, 16000693, 16000697, 16000711, 16000729, 16000759, 16000769,
        16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889,
    ),
}  # fmt: skip
RELEASED_MULTIPLIERS = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}
ROWS_OF_10_20_30_40 = [
    10250667, 16051853, 42761335, 48437066, 64953759, 91793642, 97213675, 124972355,
    130904169, 147647512, 174479789, 176217609, 193213014, 209711443, 226459680, 248375762,
    266647502, 284737834, 292200621, 319934002, 327756510, 339491046, 365830131, 381142068,
]  # fmt: skip


def test_released_primes() -> None:
    assert bucket_primes(released()) == RELEASED_PRIMES
    assert [sum(p) for p in RELEASED_PRIMES.values()] == list(released().engram_num_embeddings)


def test_released_multipliers() -> None:
    assert {layer: multipliers(released(), layer) for layer in (1, 14)} == RELEASED_MULTIPLIERS


def test_released_rows() -> None:
    rows = hash_rows(torch.tensor([[10, 20, 30, 40]]), EngramHash(released()).of(1))
    assert rows.tolist() == [ROWS_OF_10_20_30_40]


def test_products_of_the_largest_ids_do_not_wrap() -> None:
    largest = released().engram_compressed_vocab_size - 1
    rows = hash_rows(torch.full((1, 4), largest), EngramHash(released()).of(14))
    mixed = largest * RELEASED_MULTIPLIERS[14][0]
    expected, offset = [], 0
    for n in range(1, 4):
        mixed ^= largest * RELEASED_MULTIPLIERS[14][n]
        for prime in RELEASED_PRIMES[14][8 * n - 8 : 8 * n]:
            expected.append(mixed % prime + offset)
            offset += prime
    assert rows.tolist() == [expected]
    assert max(expected) < released().engram_num_embeddings[1]


def test_table_sizes_that_are_not_the_sums_are_refused() -> None:
    wrong = msgspec.structs.replace(released(), engram_num_embeddings=(384006168, 384016683))
    with pytest.raises(ConfigError, match=r"layer 14 is 384016683; its hash buckets add up to 384016682"):
        EngramHash(wrong)


@pytest.mark.skipif(not VECTORS.is_dir(), reason="golden vectors are not here")
@pytest.mark.parametrize("name", ["a_base", "d_release_like"])
def test_golden_rows(name: str) -> None:
    folder = VECTORS / name
    config = ModelConfig.read(folder / "ckpt")
    token_map = TokenMap.read(folder / "ckpt", config)
    hashing = EngramHash(config)
    n = config.engram_max_ngram_size
    recorded, prompts = np.load(folder / "inter_native.npz"), np.load(folder / "logits_native.npz")
    compared = 0
    for length in (3, 7, 31, 64, 129, 257):
        ids = token_map.array[prompts[f"L{length}/ids"].reshape(-1)]
        padded = np.concatenate([np.full(n - 1, token_map.ids[config.engram_pad_token_id]), ids])
        lookback = np.stack([padded[n - 1 - s : len(padded) - s] for s in range(n)], axis=1)
        for layer in config.engram_layer_ids:
            expected = torch.from_numpy(recorded[f"L{length}/layer{layer}/engram_ids"]).reshape(length, -1)
            assert torch.equal(hash_rows(torch.from_numpy(lookback), hashing.of(layer)), expected.long())
            compared += 1
    assert compared == 6 * len(config.engram_layer_ids)
