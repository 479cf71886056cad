"""Grammars at run time: which tokens one request may emit next, and how many of its drafts may stand.

``Vocabulary`` is the checkpoint's tokens as llguidance reads them; ``Matcher`` follows one request. Wraps llguidance and adds the
token behind which a grammar begins, the end, and drafts that are looked at and not taken. A mask depends on the tokens that were
accepted and on nothing else, so it is the same with and without speculation. Knows no logits. Suffix: V vocabulary.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from flashstep.config.errors import ConfigError
from flashstep.request import Constraint
from flashstep.sampling.grammar import LIMITS, reason


class Vocabulary:
    """The tokens of one ``tokenizer.json``, padded to the model's ``vocab_size``; ids of ``eos_token_ids`` end a text.

    The table is made when it is first asked for, which most engines never do: 1 to 2 s and 120 MB for 129,000 tokens. Control
    tokens (all added ones) stand for no text in it, so no grammar lets them through, whatever they spell.
    """

    def __init__(self, definition: str, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._definition = definition

    @classmethod
    def read(cls, folder: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> "Vocabulary":
        """Of the checkpoint in ``folder``."""
        file = folder / "tokenizer.json"
        try:
            definition = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(str(file), [f"it cannot be read: {error.strerror}"]) from error
        return cls(definition, vocab_size=vocab_size, eos_token_ids=eos_token_ids)

    @cached_property
    def tokens(self) -> LLTokenizer:
        # no post-processor either: it may name tokens that are gone, and text in the middle of an answer needs none
        parsed = json.loads(self._definition) | {"added_tokens": [], "post_processor": None}
        texts = parsed["model"]["vocab"]
        # every other id gets a spelling that no text has (letters of byte-level BPE are never spaces): EOS must be an entry
        absent = set(range(self.vocab_size)).difference(texts.values())
        parsed["model"]["vocab"] = texts | {f"<no text {token}>": token for token in sorted(absent)}
        return LLTokenizer(json.dumps(parsed), n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids))

    @cached_property
    def usable_V(self) -> np.ndarray:
        """bool [V]: EOS, and every token that is mere text. A grammar may name others by number, and does not get them."""
        parsed = json.loads(self._definition)
        usable_V = np.zeros(self.vocab_size, dtype=bool)
        usable_V[list(parsed["model"]["vocab"].values())] = True
        usable_V[[token["id"] for token in parsed.get("added_tokens", [])]] = False
        return usable_V | self.end_V

    @cached_property
    def end_V(self) -> np.ndarray:
        """bool [V]: the ids of EOS."""
        end_V = np.zeros(self.vocab_size, dtype=bool)
        end_V[list(self.eos_token_ids)] = True
        return end_V


class Matcher:
    """Where one request stands in its grammar.

    Up to and including the constraint's ``after`` everything is allowed; then what the grammar says, with EOS where the grammar
    can end; after EOS, or once matching has failed (``failure`` says why: a limit was met), EOS only.
    """

    def __init__(self, vocabulary: Vocabulary, constraint: Constraint) -> None:
        self._vocabulary = vocabulary
        self._after = constraint.after
        self._begun = constraint.after is None
        self._ended = False
        self._matcher = LLMatcher(vocabulary.tokens, constraint.grammar, log_level=0, limits=LIMITS)
        self._failure = reason(self._matcher) if self._matcher.is_error() else None
        # the drafts that were looked at since the last ``accept``, and what ``_walk`` gave
        self._walked: tuple[tuple[int, ...], list[np.ndarray | None]] | None = None

    @property
    def failure(self) -> str | None:
        """Why the grammar could not be followed any further; the request can only end, or has."""
        return self._failure

    def keep(self, drafts: Sequence[int]) -> int:
        """How many of the leading ``drafts`` may follow what was accepted."""
        return len(self._walk(drafts)) - 1

    def masks(self, drafts: Sequence[int]) -> list[Tensor | None]:
        """What may stand at the place of each draft, and behind the last: len(drafts) + 1 masks, bool [V] or None (anything).

        ``drafts`` must be such that all of them may follow (``keep``). Nothing is accepted by this.
        """
        walked = self._walk(drafts)
        assert len(walked) == len(drafts) + 1, "drafts that break the grammar are cut first"
        return [None if mask_V is None else torch.from_numpy(mask_V) for mask_V in walked]

    def accept(self, tokens: Sequence[int]) -> None:
        """Take ``tokens`` as emitted, one after the other. A new matcher that accepts a history stands where the old one did."""
        self._walked = None
        for token in tokens:
            if not self._begun:
                self._begun = token == self._after
            elif self._ended or self._failure is not None:
                continue
            elif token in self._vocabulary.eos_token_ids:
                self._ended = True
                if not self._matcher.is_accepting():
                    self._failure = "the text has ended before the grammar has"
            elif not self._matcher.consume_token(token):
                self._failure = reason(self._matcher)

    def _walk(self, drafts: Sequence[int]) -> list[np.ndarray | None]:
        """The masks of ``drafts`` up to the first that may not stand: one more than may."""
        wanted = tuple(drafts)
        if self._walked is not None and self._walked[0][: len(wanted)] == wanted:
            return self._walked[1][: len(wanted) + 1]
        matcher, begun, ended = self._matcher, self._begun, self._ended or self._failure is not None
        masks = [self._mask(matcher) if begun and not ended else self._outside(begun=begun)]
        if begun and not ended and matcher.is_error():
            self._failure, ended = reason(matcher), True
        # a copy, not rolled back: a limit that a rejected draft meets would stay for good
        matcher = matcher.deep_copy()
        for token in wanted:
            assert 0 <= token < self._vocabulary.vocab_size, f"draft {token} is no token"
            mask_V = masks[-1]
            if mask_V is not None and not mask_V[token]:
                break
            if not begun:
                begun = token == self._after
            elif token in self._vocabulary.eos_token_ids:
                ended = True
            elif not ended:
                matcher.consume_token(token)
            masks.append(self._mask(matcher) if begun and not ended else self._outside(begun=begun))
        self._walked = (wanted, masks)
        return masks

    def _outside(self, *, begun: bool) -> np.ndarray | None:
        """Before the grammar has begun, and after its end."""
        return self._vocabulary.end_V if begun else None

    def _mask(self, matcher: LLMatcher) -> np.ndarray:
        """What the grammar allows next; EOS once ``matcher`` has met a limit (now, or on the way here)."""
        bits = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            return self._vocabulary.end_V
        allowed_V = np.unpackbits(
            np.frombuffer(bits, dtype=np.uint8), count=self._vocabulary.vocab_size, bitorder="little"
        )
        allowed_V = allowed_V.view(bool) & self._vocabulary.usable_V
        return allowed_V if allowed_V.any() else self._vocabulary.end_V
