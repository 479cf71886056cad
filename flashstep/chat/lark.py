"""A grammar in llguidance's Lark while it is put together: rules, terminals, nested grammars, control tokens by their number.

Gives names and pieces of Lark text to write into other rules, and at the end the serialised whole. Knows neither tools nor tags.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from flashstep.chat.grammar import GrammarError
from flashstep.sampling.grammar import MAX_GRAMMAR_CHARS

# Characters that may be read and written for one grammar, what is equal and what goes no further counted each time: references
# say a lot in little, and all of it is done in the server's process. Counting stops a request within a second.
MAX_WORK = 8 * MAX_GRAMMAR_CHARS
Spend = Callable[[int], None]
UNSAFE = re.compile(
    r"\\.|/|\n", re.DOTALL
)  # in a pattern between Lark's slashes; what is escaped is passed over
SAFE = {"/": r"\/", "\n": r"\n"}
VERBOSE = re.compile(r"\(\?[a-zA-Z-]*x")  # the flag x: a "#" begins a comment, which a new line ends


class Lark:
    """Equal rules, equal terminals and equal nested grammars are one. Names are short: a grammar's length is limited."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        self._nested: dict[str, str] = {}
        self._left = MAX_WORK

    def spend(self, characters: int) -> None:
        """Called for what is read and written; raises ``GrammarError`` when it is too much."""
        self._left -= characters
        if self._left < 0:
            raise GrammarError(
                f"it is too large: more than {MAX_WORK} characters, all that it refers to counted each time"
            )

    def rule(self, body: str) -> str:
        """The rule of ``body``."""
        self.spend(len(body))
        return self._rules.setdefault(body, f"r{len(self._rules)}")

    def terminal(self, body: str) -> str:
        """The terminal of ``body``: one unit of text, matched as a whole and as far as it goes."""
        self.spend(len(body))
        return self._terminals.setdefault(body, f"T{len(self._terminals)}")

    def nested(self, serialised: str) -> str:
        """A reference to another whole grammar."""
        self.spend(len(serialised))
        return "@" + self._nested.setdefault(serialised, f"n{len(self._nested)}")

    def serialised(self, start: str) -> str:
        """The grammar that begins with the rule body ``start``."""
        named = (self._rules | self._terminals).items()
        lines = [f"start: {start}", *(f"{name}: {body}" for body, name in named)]
        own = {"name": "whole", "lark_grammar": "\n".join(lines)}
        nested = [_decoded(text) | {"name": name} for text, name in self._nested.items()]
        return json.dumps({"grammars": [own, *nested]})


def _decoded(serialised: str) -> dict[str, Any]:
    """The one grammar of a serialised form: JSON, or Lark as it is."""
    if not serialised.startswith("{"):
        return {"lark_grammar": serialised}
    (only,) = json.loads(serialised)["grammars"]
    return only


def literal(text: str) -> str:
    """``text`` itself."""
    return json.dumps(text)


def regex(pattern: str) -> str:
    """What ``pattern`` matches as a whole."""
    if "\n" in pattern and VERBOSE.search(pattern):
        raise GrammarError("a pattern with the flag x must stand on one line here")
    return "/" + UNSAFE.sub(lambda found: SAFE.get(found[0], found[0]), pattern) + "/"


def any_of(pieces: Iterable[str]) -> str:
    """One of ``pieces``."""
    return "(" + " | ".join(pieces) + ")"


def token(number: int) -> str:
    """A control token, which no text is."""
    return f"<[{number}]>"
