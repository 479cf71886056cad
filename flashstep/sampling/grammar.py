"""Whether a grammar can be used at all (torch-free): the limits of compiling and matching, and the check at the server's door.

The server asks ``problem`` through ``checking``; the engine does not ask: ``constraint`` compiles and matches under the same
``LIMITS``, and a grammar that fails there costs its own request. Grammars are in llguidance's serialised form; who makes them
from a user's options is ``chat.grammar``.
"""

import re
from functools import cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from flashstep.request import Constraint

MAX_GRAMMAR_CHARS = 1 << 17
MAX_REASON_CHARS = 500  # a reason may quote the grammar
# llguidance's own defaults, stated because they bound what a hostile grammar costs: fuel is about 50,000 a millisecond, and
# 250,000 states of the lexer are 30 to 160 MB, which a request holds until it ends (twice, if there are drafts)
LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=250_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
STUCK = "no token of the model spells anything that the grammar allows next"
EXCERPT = re.compile(r"\n\s*\d+ \| ")  # where the library goes on to print the lines of the grammar


TEXT_IDS = 257


class _Bytes:
    """A vocabulary of the 256 bytes and an end, for checks before any model is known, and of ``num_ids`` without text."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)

    def __init__(self, num_ids: int) -> None:
        self.tokens = (*(bytes([byte]) for byte in range(256)), b"<end>", *((b"",) * (num_ids - TEXT_IDS)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _bytes_vocabulary(num_ids: int = TEXT_IDS) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes(num_ids)))


def too_long(constraint: Constraint) -> str | None:
    """The first thing that ``problem`` looks at."""
    length = len(constraint.grammar or "")
    if length > MAX_GRAMMAR_CHARS:
        return f"it is {length} characters long; at most {MAX_GRAMMAR_CHARS} are taken"
    return None


def problem(constraint: Constraint) -> str | None:
    """What is wrong with the grammar of ``constraint``, in words; None if matching can begin."""
    grammar = constraint.grammar
    if grammar is None:
        return None
    if wrong := too_long(constraint):
        return wrong
    # a control token is named by its number, so there must be that many; with none of them no number means anything
    vocabulary = _bytes_vocabulary(max((TEXT_IDS, *(token + 1 for token in constraint.control_tokens))))
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        return reason(matcher)
    matcher.compute_bitmask()
    return f"no text matches it, or it is too complex: {reason(matcher)}" if matcher.is_error() else None


def reason(matcher: LLMatcher) -> str:
    """Why ``matcher`` has stopped with an error, on one line."""
    text = EXCERPT.split(matcher.get_error().replace("<non-verbose/>", ""))[0]
    if text.startswith("NoExtension"):
        return STUCK
    return " ".join(text.split())[:MAX_REASON_CHARS]
