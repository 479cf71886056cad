"""Constraints at run time: which tokens one request may emit next, and how many of its drafts may stand.

``Vocabulary`` is the checkpoint's tokens as llguidance reads them; ``Matcher`` follows one request. Wraps llguidance and adds the
token behind which a grammar begins, the limit of what comes before it, the end, and drafts that are looked at and not taken.
A mask depends on the tokens that were accepted, and so does where llguidance's limits end a request: neither on drafts nor on
other requests. (Where the time for its masks ends one, the clock has its say.) Knows no logits. Suffix: V vocabulary.
"""

import json
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from flashstep.config.errors import ConfigError
from flashstep.request import Constraint
from flashstep.sampling.grammar import LIMITS, STUCK, reason

# Time of the processor that a request may spend on its masks: a step waits for it, with everybody who is in it. llguidance's
# limits do not bound it (an ambiguous grammar was seen to take 0.1 s a token and 1.3 s at worst); ordinary masks take under 1 ms,
# the first of a schema of 5000 keys 90 ms. The drafts of a step may take as much again.
MASK_S = 0.02  # for each mask, saved up to
CREDIT_S = 1.0
SLOW = "the grammar is too ambiguous or too large: finding out what it allows takes too long"


class Vocabulary:
    """The tokens of one ``tokenizer.json``, padded to the model's ``vocab_size``; ids of ``eos_token_ids`` end a text.

    The table takes 1 to 2 s, for half of which nothing else in the process runs, and 120 MB for 129,000 tokens: ``prepare``
    makes it before anybody is served. Control tokens (all added ones) stand for no text in it, so no grammar lets them through,
    whatever they spell.
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

    def prepare(self) -> None:
        """Make now what is made once."""
        assert self.tokens.vocab_size == len(self.usable_V)

    def compile(self, grammar: str) -> LLMatcher:
        """``grammar`` at its beginning; in an error if it cannot be matched. From any thread: others go on meanwhile.

        Compiled anew each time: copies of one matcher share the states of its lexer, of which there is a limit, so that whoever
        meets it would meet it for all others.
        """
        matcher = LLMatcher(self.tokens, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher

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
        """bool [V]: EOS, and every token that is mere text. A grammar may name others by number, and gets them only if its
        ``Constraint`` lists them."""
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


class _Place(NamedTuple):
    """How far an output has come: ``before`` counts its tokens before the constraint's ``after``."""

    before: int
    begun: bool
    ended: bool


class _Credit:
    """Time of the processor that is left to spend."""

    def __init__(self) -> None:
        self.left_s = CREDIT_S

    def pay(self, began: float, *, masks: int = 0) -> None:
        """For the time since ``began`` (of ``time.thread_time``); ``masks`` may have been worked out in it."""
        self.left_s = min(self.left_s + masks * MASK_S, CREDIT_S) - (time.thread_time() - began)


class _Scout:
    """Looks at drafts with a matcher of its own, in copies that are thrown away.

    The copies, and so rejected drafts, count for the limits of its matcher. Whichever it meets, and when its time is spent,
    it sees less far; the request goes on, without drafts.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._credit = _Credit()

    def look(self) -> LLMatcher | None:
        """A matcher that may go ahead, for whose time ``pay`` is called; None: there is none now."""
        return None if self._credit.left_s < 0 or self._matcher.is_error() else self._matcher.deep_copy()

    def pay(self, began: float) -> None:
        """For what one step's look took."""
        self._credit.pay(began, masks=1)

    def take(self, token: int) -> None:
        """Follow the request."""
        began = time.thread_time()
        self._matcher.consume_token(token)
        self._credit.pay(began)


class Matcher:
    """Where one request stands in its constraint. Making one compiles the grammar, which may be done in any thread.

    Before the constraint's ``after`` comes, everything is allowed but, if there is a grammar, an end and the grammar's own
    control tokens, with which an answer would begin that the grammar does not see; when ``limit`` tokens have come, only
    ``after`` is. Then what the grammar says, with EOS where the grammar can end; after EOS, EOS only. Once matching has failed
    (``failure`` says why) there is nothing that may follow. ``drafts``: whether there will be any to look at, which takes the
    compiled grammar once more.
    """

    def __init__(self, vocabulary: Vocabulary, constraint: Constraint, *, drafts: bool = True) -> None:
        self._vocabulary = vocabulary
        self._after = constraint.after
        self._limit = constraint.limit
        self._place = _Place(0, begun=constraint.after is None, ended=False)
        self._matcher = None if constraint.grammar is None else vocabulary.compile(constraint.grammar)
        self._scout: _Scout | None = None
        self._before_V: np.ndarray | None = None
        self._failure: str | None = None
        if self._matcher is not None and constraint.grammar is not None:
            controls = list(constraint.control_tokens)
            self._usable_V = vocabulary.usable_V.copy()
            self._usable_V[controls] = True
            self._before_V = ~vocabulary.end_V
            self._before_V[controls] = False
            if self._matcher.is_error():
                self._failure = reason(self._matcher)
            elif drafts:
                self._scout = _Scout(vocabulary.compile(constraint.grammar))
        self._credit = _Credit()
        # drafts that were looked at and the masks of those that may stand; what may come next is the first of them
        self._walked: tuple[tuple[int, ...], list[np.ndarray | None]] | None = None

    @property
    def failure(self) -> str | None:
        """Why the grammar cannot be followed any further; the request ends with it."""
        return self._failure

    def free(self, count: int) -> bool:
        """Whether the next ``count`` tokens may be anything, whatever they are."""
        if self._matcher is not None or self._failure is not None:
            return False
        return self._place.begun or self._limit is None or self._place.before + count <= self._limit

    def keep(self, drafts: Sequence[int]) -> int:
        """How many of the leading ``drafts`` may follow what was accepted, as far as anybody can see."""
        return len(self._walk(drafts)) - 1

    def masks(self, drafts: Sequence[int]) -> list[Tensor | None]:
        """What may stand at the place of each draft, and behind the last: len(drafts) + 1 masks, bool [V] or None (anything).

        ``drafts`` must be such that all of them may follow (``keep``). Nothing is accepted by this. Where matching fails the mask
        is EOS, so that there is something to sample; ``accept`` does not take it.
        """
        walked = self._walk(drafts)
        assert len(walked) == len(drafts) + 1, "drafts that break the grammar are cut first"
        return [None if mask_V is None else torch.from_numpy(mask_V) for mask_V in walked]

    def accept(self, tokens: Sequence[int]) -> int:
        """Take ``tokens`` as emitted, one after the other; gives how many, fewer than all where matching fails before them.

        A new matcher that accepts a history stands where the old one did.
        """
        for number, token in enumerate(tokens):
            self._walk(())  # as it would be without drafts: llguidance's limits count what masks take
            if self._failure is not None:
                return number
            began = time.thread_time()
            self._take(token)
            self._pay(began)
            self._walked = None
        return len(tokens)

    def _take(self, token: int) -> None:
        place, matcher = self._place, self._matcher
        self._place = self._behind(place, token)
        if matcher is None or not place.begun or place.ended:
            return
        if self._place.ended:
            if not matcher.is_accepting():
                self._failure = "the text has ended before the grammar has"
        elif not matcher.consume_token(token):
            self._failure = reason(matcher)
        elif self._scout is not None:
            self._scout.take(token)

    def _behind(self, place: _Place, token: int) -> _Place:
        if not place.begun:
            begun = token == self._after
            return _Place(place.before + (not begun), begun=begun, ended=False)
        ends = self._matcher is not None and token in self._vocabulary.eos_token_ids
        return place._replace(ended=place.ended or ends)

    def _walk(self, drafts: Sequence[int]) -> list[np.ndarray | None]:
        """The masks of ``drafts`` up to the first that may not stand: one more than may."""
        wanted = tuple(drafts)
        if self._walked is not None and self._walked[0][: len(wanted)] == wanted:
            return self._walked[1][: len(wanted) + 1]
        if self._walked is not None:
            first_V = self._walked[1][0]
        else:
            began = time.thread_time()
            first_V, self._failure = self._mask(self._place, self._matcher)
            self._pay(began, masks=1)
        masks = [first_V]
        if wanted and self._failure is None:
            masks += self._ahead(first_V, wanted)
        self._walked = (wanted, masks)
        return masks

    def _ahead(self, mask_V: np.ndarray | None, drafts: Sequence[int]) -> Iterator[np.ndarray | None]:
        """The mask behind each of ``drafts`` that may stand; that of the first is ``mask_V``."""
        began = time.thread_time()
        place, matcher = self._place, None if self._scout is None else self._scout.look()
        for token in drafts:
            assert 0 <= token < self._vocabulary.vocab_size, f"draft {token} is no token"
            if not (mask_V is None or mask_V[token]):
                break
            before, place = place, self._behind(place, token)
            if self._matcher is not None and place.begun and not place.ended:
                if matcher is None:
                    break
                if before.begun:
                    matcher.consume_token(token)
            mask_V, why = self._mask(place, matcher)
            if why is not None:
                break
            yield mask_V
        if self._scout is not None:
            self._scout.pay(began)

    def _pay(self, began: float, *, masks: int = 0) -> None:
        if self._matcher is None:
            return
        self._credit.pay(began, masks=masks)
        if self._credit.left_s < 0 and self._failure is None:
            self._failure = SLOW

    def _mask(self, place: _Place, matcher: LLMatcher | None) -> tuple[np.ndarray | None, str | None]:
        """What may come at ``place``; and why nothing may, if so."""
        end_V = self._vocabulary.end_V
        if self._failure is not None:
            return end_V, self._failure
        if not place.begun:
            return (self._only_after_V if place.before == self._limit else self._before_V), None
        if place.ended:
            return end_V, None
        if matcher is None:
            return None, None
        bits = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            return end_V, reason(matcher)
        allowed_V = np.unpackbits(
            np.frombuffer(bits, dtype=np.uint8), count=self._vocabulary.vocab_size, bitorder="little"
        )
        allowed_V = allowed_V.view(bool) & self._usable_V
        return (allowed_V, None) if allowed_V.any() else (end_V, STUCK)

    @cached_property
    def _only_after_V(self) -> np.ndarray:
        only_V = np.zeros(self._vocabulary.vocab_size, dtype=bool)
        only_V[self._after] = True
        return only_V
