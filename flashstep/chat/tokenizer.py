"""The tokenizer: text to ids and ids to text, wrapping ``tokenizers``.

Gives the bytes of every token, and an incremental detokeniser over them: UTF-8 that a token border cuts is held back until it
is whole, bytes that are truly invalid (or cut by the end) become U+FFFD exactly as in a one-shot decode. (The library's own
``DecodeStream`` swallows an unfinished tail.) Knows nothing of messages.
"""

import codecs
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from flashstep.config.errors import ConfigError
from flashstep.engram.token_map import parse_tokenizer


def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE spells each byte as one printable letter; this is that alphabet, letter to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """As a batch of one: unlike ``encode`` that lets other threads run, and without offsets it takes half the time."""
    (made,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return made.ids


class TextTokenizer:
    """One ``tokenizer.json``. ``definition`` is its text; the recipe's tokenizer is built from the same text.

    ``special_ids`` are the ids that the file marks special (BOS, EOS, padding...): hidden when text is made for a user.
    """

    def __init__(self, definition: str) -> None:
        self.definition = definition
        self._full = parse_tokenizer(definition)
        self._parsed = json.loads(definition)
        decoder = (self._parsed.get("decoder") or {}).get("type")
        if decoder != "ByteLevel":
            raise ValueError(f"the tokenizer's decoder is {decoder!r}; only byte-level BPE is supported")
        added = self._parsed.get("added_tokens", [])
        self.special_ids = frozenset(token["id"] for token in added if token["special"])
        self.num_ids = 1 + max(
            max(self._parsed["model"]["vocab"].values()), max((token["id"] for token in added), default=0)
        )
        self._bytes = self._bytes_of_tokens()

    @classmethod
    def from_file(cls, path: Path) -> "TextTokenizer":
        """The tokenizer in the file at ``path``; ``ConfigError`` if it is not one that can be served."""
        try:
            return cls(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(str(path), [f"it cannot be read: {error.strerror}"]) from error
        except ValueError as error:
            raise ConfigError(str(path), [str(error)]) from error

    def _bytes_of_tokens(self) -> list[bytes]:
        table = [b""] * self.num_ids
        alphabet = _byte_of_letter()
        for letters, token in self._parsed["model"]["vocab"].items():
            # a vocabulary entry outside the alphabet stands for its own spelling, as the library's decoder has it
            known = all(letter in alphabet for letter in letters)
            table[token] = bytes(alphabet[letter] for letter in letters) if known else letters.encode()
        for token in self._parsed.get("added_tokens", []):
            table[token["id"]] = token["content"].encode()
        return table

    @cached_property
    def _plain(self) -> Tokenizer:
        return Tokenizer.from_str(json.dumps(self._parsed | {"added_tokens": []}))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text`` where special spellings become their tokens: for raw prompts that a user writes whole."""
        return _ids(self._full, text, add_special_tokens=add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of ``text`` as mere text: no spelling in it becomes a control token."""
        return _ids(self._plain, text, add_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        return self._full.token_to_id(token)

    def has_text(self, token: int) -> bool:
        """False for ids of a padded vocabulary that no token owns."""
        return 0 <= token < self.num_ids and self._bytes[token] != b""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` stands for; none for an id of a padded vocabulary that no token owns."""
        return self._bytes[token] if 0 <= token < self.num_ids else b""

    def token_text(self, token: int) -> str:
        """One token shown alone: bytes that are no whole character appear as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(t) for t in tokens if t not in hidden).decode(
            "utf-8", errors="replace"
        )

    def detokenizer(self, *, skip_special_tokens: bool = True) -> "Detokenizer":
        return Detokenizer(self, hidden=self.special_ids if skip_special_tokens else frozenset())


class Detokenizer:
    """Tokens in, text out, piece by piece; the pieces joined are the one-shot decode."""

    __slots__ = ("_decode", "_hidden", "_token_bytes")

    def __init__(self, tokenizer: TextTokenizer, *, hidden: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden = hidden
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, tokens: Sequence[int]) -> str:
        hidden = self._hidden
        if len(tokens) == 1:  # the usual step
            return "" if tokens[0] in hidden else self._decode(self._token_bytes(tokens[0]))
        return self._decode(b"".join(self._token_bytes(t) for t in tokens if t not in hidden))

    def finish(self) -> str:
        """What an unfinished character at the end turns into: U+FFFD, or nothing."""
        return self._decode(b"", True)
