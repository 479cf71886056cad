"""Texts of so many tokens, with any server's tokenizer: words that are one token each to it, found by asking.

Takes a way to ask the server for a prompt's length; gives ``Words``, which make texts of exact lengths. Knows no HTTP.
"""

from collections.abc import Awaitable, Callable

import msgspec
import numpy as np

# A text begins with LEAD and goes on with " word": a space with letters behind it is a word of its own to every byte-level
# tokenizer, so that lengths add up. Frequent words first: those are one token in large and small vocabularies.
LEAD = "."
CANDIDATES = tuple(
    (
        "the of and to in is it he was that for on are with as his they be at one have this from or had by but some what there "
        "we can out other were all your when up use how said an each she which do their time if will way about many then them "
        "would like so these her long make thing see him two has look more day could go come did my no most who over know than "
        "call first people may down been now find a b c d e f g h i j k l m n o p r s t u v w x y z"
    ).split()
)
ENOUGH = 48  # words: 5.6 bits a token, so that no two prompts share a cache block by chance
FEWEST = 8
GROUPS = (16, 4, 1)

Count = Callable[[str], Awaitable[int | None]]


class Range(msgspec.Struct, frozen=True):
    """Whole numbers from ``low`` to ``high``, both included, all as likely."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, *, least: int = 0) -> "Range":
        """Of "N" or "LOW:HIGH"; ``ValueError`` for anything else, and for numbers below ``least``."""
        low, colon, high = text.partition(":")
        high = high if colon else low
        if not (low.isdecimal() and high.isdecimal()):
            raise ValueError(f"{text!r} is no length: give a number, or LOW:HIGH")
        found = cls(int(low), int(high))
        if found.low > found.high:
            raise ValueError(f"{text!r} begins above its end")
        if found.low < least:
            raise ValueError(f"{text!r} begins below {least}")
        return found

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high + 1))


class Words(msgspec.Struct, frozen=True):
    """Words that are one token each, and ``overhead``: the tokens of a prompt without any (its template's, and the lead's).

    ``checked`` is False where the server tells no lengths: then one word a token is only likely, and the overhead is not known.
    """

    words: tuple[str, ...]
    overhead: int
    checked: bool = True

    def text(self, num_tokens: int, rng: np.random.Generator) -> str:
        """Of ``num_tokens`` tokens beyond the overhead."""
        return self.spelled(rng.integers(len(self.words), size=num_tokens))

    def spelled(self, chosen: np.ndarray) -> str:
        """The words with these numbers."""
        return "".join([" " + self.words[index] for index in chosen.tolist()])


# Where an exact length does not matter, and nobody is asked.
UNCHECKED = Words(CANDIDATES[:ENOUGH], 0, checked=False)


async def learn(count: Count) -> Words:
    """Ask for lengths until enough words are known; ``ValueError`` where the server's tokenizer has no such words."""
    overhead = await count(LEAD)
    if overhead is None:
        return UNCHECKED
    known: list[str] = []
    open_groups = [CANDIDATES]
    for size in GROUPS:
        groups = [group[i : i + size] for group in open_groups for i in range(0, len(group), size)]
        open_groups = []
        for group in groups:
            if len(known) >= ENOUGH:
                break
            length = await count(LEAD + "".join(f" {word}" for word in group))
            if length is not None and length - overhead == len(group):
                known += group
            else:
                open_groups.append(group)
    if len(known) < FEWEST:
        raise ValueError(
            f"only {len(known)} of {len(CANDIDATES)} frequent words are one token each to this server's tokenizer, too few to "
            "write random prompts of given lengths; give prompts of your own with --prompts FILE"
        )
    return Words(tuple(known), overhead)
