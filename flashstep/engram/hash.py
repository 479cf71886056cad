"""The n-gram hash of Engram: what makes compressed ids of a token and those before it into rows of each layer's table.

Owns primes, offsets and multipliers (spec/model.md 6.2 - 6.4), all derived from the configuration alone; who hashes is
``kernels.engram``. Suffixes: N look-back columns (newest first), C hash columns (n-major).
"""

import itertools
import math
from collections.abc import Iterator

import msgspec
import numpy as np
import torch

from flashstep.config.errors import ConfigError
from flashstep.config.model import ModelConfig
from flashstep.kernels.engram import Hashing

INT64_MAX = (1 << 63) - 1
SEED_STRIDE = 10007  # the generator of layer l is seeded with 10007 * l


def bucket_primes(config: ModelConfig) -> dict[int, tuple[int, ...]]:
    """For each Engram layer its C primes; none is used twice in the whole model, and each (layer, n) searches afresh."""
    used: set[int] = set()
    primes: dict[int, tuple[int, ...]] = {}
    for layer in config.engram_layer_ids:
        taken: list[int] = []
        for _ in range(2, config.engram_max_ngram_size + 1):
            unused = (p for p in _primes_from(config.engram_vocab_size) if p not in used)
            chosen = list(itertools.islice(unused, config.engram_n_heads))
            used.update(chosen)
            taken += chosen
        primes[layer] = tuple(taken)
    return primes


def multipliers(config: ModelConfig, layer: int) -> tuple[int, ...]:
    """The odd multipliers of ``layer``, newest token first; a product with any compressed id stays below 2^63."""
    bound = (INT64_MAX // config.engram_compressed_vocab_size) // 2
    drawn = np.random.default_rng(SEED_STRIDE * layer).integers(
        0, bound, size=config.engram_max_ngram_size, dtype=np.int64
    )
    return tuple(2 * int(value) + 1 for value in drawn)


def smaller_tables(config: ModelConfig, *, rows: int) -> ModelConfig:
    """``config`` with Engram tables of about ``rows`` rows a layer: for measuring where the real ones do not fit."""
    if not config.engram_layer_ids:
        return config
    buckets = max(rows // config.hash_columns, 2)
    smaller = msgspec.structs.replace(config, engram_vocab_size=min(buckets, config.engram_vocab_size))
    sizes = tuple(sum(primes) for primes in bucket_primes(smaller).values())
    return msgspec.structs.replace(smaller, engram_num_embeddings=sizes)


class EngramHash:
    """The hashing of every Engram layer. Refuses a configuration whose table sizes are not the sums of the layer's primes."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None) -> None:
        self._hashings: dict[int, Hashing] = {}
        problems = []
        for size, (layer, primes) in zip(
            config.engram_num_embeddings, bucket_primes(config).items(), strict=True
        ):
            if sum(primes) != size:
                problems.append(
                    f"engram_num_embeddings of layer {layer} is {size}; its hash buckets add up to {sum(primes)}"
                )
            offsets = (0, *itertools.accumulate(primes[:-1]))
            multipliers_N, primes_C, offsets_C = (
                torch.tensor(numbers, dtype=torch.int64, device=device)
                for numbers in (multipliers(config, layer), primes, offsets)
            )
            self._hashings[layer] = Hashing(multipliers_N, primes_C, offsets_C)
        if problems:
            raise ConfigError("config.json", problems)

    def of(self, layer: int) -> Hashing:
        """What the look-up of ``layer`` hashes with."""
        return self._hashings[layer]


def _primes_from(start: int) -> Iterator[int]:
    return (number for number in itertools.count(max(start, 2)) if _is_prime(number))


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
