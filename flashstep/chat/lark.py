"""A grammar in llguidance's Lark while it is put together: rules, terminals, nested grammars, control tokens by their number.

Gives names and pieces of Lark text to write into other rules, and at the end the serialised whole. Knows neither tools nor tags.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

UNSAFE = re.compile(
    r"\\.|/|\n", re.DOTALL
)  # in a pattern between Lark's slashes; what is escaped is passed over
SAFE = {"/": r"\/", "\n": r"\n"}


class Lark:
    """Equal rules, equal terminals and equal nested grammars are one. Names are short: a grammar's length is limited."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        self._nested: dict[str, str] = {}

    def rule(self, body: str) -> str:
        """The rule of ``body``."""
        return self._rules.setdefault(body, f"r{len(self._rules)}")

    def terminal(self, body: str) -> str:
        """The terminal of ``body``: one unit of text, matched as a whole and as far as it goes."""
        return self._terminals.setdefault(body, f"T{len(self._terminals)}")

    def nested(self, serialised: str) -> str:
        """A reference to another whole grammar."""
        return "@" + self._nested.setdefault(serialised, f"n{len(self._nested)}")

    def serialised(self, start: str) -> str:
        """The grammar that begins with the rule body ``start``."""
        named = (self._rules | self._terminals).items()
        lines = [f"start: {start}", *(f"{name}: {body}" for body, name in named)]
        own = {"name": "whole", "lark_grammar": "\n".join(lines)}
        nested = [_decoded(text) | {"name": name} for text, name in self._nested.items()]
        return json.dumps({"grammars": [own, *nested]})


def _single(serialised: str) -> dict[str, Any]:
    """The one grammar of ``serialised``, which llguidance's compilers leave in Lark where it was written so."""
    return (
        json.loads(serialised)["grammars"][0] if serialised.startswith("{") else {"lark_grammar": serialised}
    )


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
    return "/" + UNSAFE.sub(lambda found: SAFE.get(found[0], found[0]), pattern) + "/"


def any_of(pieces: Iterable[str]) -> str:
    """One of ``pieces``."""
    return "(" + " | ".join(pieces) + ")"


def token(number: int) -> str:
    """A control token, which no text is."""
    return f"<[{number}]>"
