"""The compressed token map of Engram: token id -> id of its normalised spelling (spec/model.md 6.1).

Takes the checkpoint's ``tokenizer.json``; gives ``TokenMap``, with a fingerprint by which two processes can tell that they
hash alike. Built once on the host. Knows no torch, no hash and no table.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer
from tokenizers.normalizers import NFD, NFKC, Lowercase, Replace, Strip, StripAccents
from tokenizers.normalizers import Sequence as Normalizers

from flashstep.config.errors import ConfigError
from flashstep.config.model import ModelConfig

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoding gives for bytes that are no text on their own
LONE_SPACE = "\ue000"  # stands for a single space while the ends are stripped


def parse_tokenizer(definition: str) -> Tokenizer:
    """The tokenizer that the text of a ``tokenizer.json`` defines; ``ValueError`` if it defines none."""
    try:
        return Tokenizer.from_str(definition)
    except Exception as error:  # the library has no narrower class
        raise ValueError(f"it does not define a tokenizer: {error}") from error


@dataclass(frozen=True, kw_only=True)
class TokenMap:
    """``ids[t]`` is the compressed id of token ``t``; ``size`` distinct ids exist, numbered by first appearance."""

    ids: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, ids: Sequence[int]) -> "TokenMap":
        """An explicit map (tests, and models without a tokenizer)."""
        return cls(ids=tuple(ids), size=max(ids) + 1)

    @classmethod
    def build(cls, tokenizer: Tokenizer) -> "TokenMap":
        """The map of ``tokenizer``, whatever its size."""
        numbers: dict[str, int] = {}
        return cls(
            ids=tuple(numbers.setdefault(key, len(numbers)) for key in _keys(tokenizer)), size=len(numbers)
        )

    @classmethod
    def read(cls, folder: Path, config: ModelConfig) -> "TokenMap":
        """The map of ``folder``'s tokenizer; refused if its sizes are not ``config``'s (``ConfigError``)."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                str(file), ["the file does not exist; Engram hashes need the checkpoint's own tokenizer"]
            )
        try:
            built = cls.build(parse_tokenizer(file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ConfigError(str(file), [str(error)]) from error
        problems = built.problems(config)
        if problems:
            raise ConfigError(str(file), problems)
        return built

    def problems(self, config: ModelConfig) -> list[str]:
        """Why this map cannot serve ``config``, as sentences."""
        problems = []
        if len(self.ids) != config.vocab_size:
            problems.append(f"it has {len(self.ids)} tokens; the model's vocab_size is {config.vocab_size}")
        if config.engram_layer_ids and self.size != config.engram_compressed_vocab_size:
            problems.append(
                f"its token map has {self.size} distinct ids; the model's engram_compressed_vocab_size is "
                f"{config.engram_compressed_vocab_size}, so every n-gram hash would differ: use the checkpoint's tokenizer"
            )
        return problems

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of the ids in decimal, joined by commas."""
        return sha256(",".join(map(str, self.ids)).encode()).hexdigest()

    @cached_property
    def array(self) -> np.ndarray:
        """int64 [vocabulary]."""
        return np.array(self.ids, dtype=np.int64)


def _keys(tokenizer: Tokenizer) -> Iterable[str]:
    """The key of each token id, in order: normalised text, or the raw vocabulary string where text is not valid alone."""
    normalizer = Normalizers(
        [
            NFKC(),
            NFD(),
            StripAccents(),
            Lowercase(),
            Replace(Regex("[ \t\r\n]+"), " "),
            Replace(Regex("^ $"), LONE_SPACE),
            Strip(),
            Replace(LONE_SPACE, " "),
        ]
    )
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if REPLACEMENT in text:
            raw = tokenizer.id_to_token(token)
            assert raw is not None, f"token {token} decodes but has no vocabulary entry"
            yield raw
        else:
            yield normalizer.normalize_str(text) or text
