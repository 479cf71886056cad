"""What an answer says, by one of six rules, and whether that is what was expected.

| rule | what it reads | equal if |
|---|---|---|
| hashes | the number behind the last ``####``, as public GSM8K answers end | the numbers are |
| boxed | what stands in the last ``\\boxed{...}`` | the numbers are; without numbers, the texts |
| number | the last number of the text | the numbers are |
| exact | the whole text | the texts are, but for space around them and in runs |
| contains | the expected text, as a word of its own anywhere | it is there |
| call | the one tool call, as JSON of its name and arguments | name and arguments are |

A number may have a sign, commas between groups of three, a point, an exponent, a currency before it and a unit or a percent sign
behind it, both of which are ignored: ``-$1,234.50`` is -1234.5, ``42.0`` is 42, ``12%`` is 12. A hyphen between two numbers or
behind a word is no sign. Fractions are two numbers. Knows no questions and no model.
"""

import enum
import json
import re
from decimal import Decimal
from typing import Any

NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-\u2212+])?(?:[$\u20ac\u00a3\u00a5] ?)?(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?P<exponent>[eE][-+]?\d{1,3}(?!\w))?"
)
HASHES = re.compile(r"####(.*)")
BOXED = "\\boxed{"


class Rule(enum.Enum):
    """How an answer is read; the module's table says what each means."""

    HASHES = "hashes"
    BOXED = "boxed"
    NUMBER = "number"
    EXACT = "exact"
    CONTAINS = "contains"
    CALL = "call"


NUMERIC = frozenset({Rule.HASHES, Rule.NUMBER})


def expected(answer: str, rule: Rule) -> str:
    """What a question's ``answer`` asks for: of public GSM8K only what stands behind ``####``. ``ValueError`` if nothing."""
    marked = HASHES.findall(answer)
    wanted = (marked[-1] if marked else answer).strip()
    if rule is Rule.CALL:
        return _call(wanted)
    if rule in NUMERIC and not numbers(wanted):
        raise ValueError(f"{wanted!r} holds no number, and the rule {rule.value} compares numbers")
    if not wanted:
        raise ValueError("the answer is empty")
    return wanted


def extract(text: str, rule: Rule, wanted: str) -> str | None:
    """What ``text`` answers, in its own spelling; None if it gives no answer that the rule knows."""
    if rule is Rule.HASHES:
        marked = HASHES.findall(text)
        found = numbers(marked[-1]) if marked else []
        return found[0] if found else None
    if rule is Rule.NUMBER:
        found = numbers(text)
        return found[-1] if found else None
    if rule is Rule.BOXED:
        return _boxed(text)
    if rule is Rule.EXACT:
        return " ".join(text.split()) or None
    if rule is Rule.CONTAINS:
        found = re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", text)
        return found.group() if found else None
    try:
        return _call(text)
    except ValueError:
        return None


def is_right(found: str | None, wanted: str, rule: Rule) -> bool:
    """Whether what was extracted is what was ``expected``."""
    if found is None:
        return False
    if rule in (Rule.CONTAINS, Rule.CALL):
        return found == wanted
    theirs, ours = numbers(found), numbers(wanted)
    if rule in NUMERIC or (rule is Rule.BOXED and len(theirs) == len(ours) == 1):
        return bool(theirs) and value(theirs[-1]) == value(ours[-1])
    return " ".join(found.split()) == " ".join(wanted.split())


def numbers(text: str) -> list[str]:
    """The numbers of ``text``, as they are written there."""
    return [found.group() for found in NUMBER.finditer(text)]


def value(number: str) -> Decimal:
    """What a number of ``numbers`` is worth."""
    found = NUMBER.fullmatch(number)
    assert found is not None, number
    size = Decimal(found["digits"].replace(",", "") + (found["exponent"] or ""))
    return -size if number[0] in "-\u2212" else size


def _boxed(text: str) -> str | None:
    """The inside of the last box, braces in pairs; None if there is none or it never closes."""
    start = text.rfind(BOXED)
    if start < 0:
        return None
    depth = 1
    for place in range(start + len(BOXED), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len(BOXED) : place].strip() or None
    return None


def _call(text: str) -> str:
    """One spelling of a call: JSON with sorted keys. ``ValueError`` if ``text`` is none."""
    try:
        call: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text[:80]!r} is no JSON of a call: {error}") from None
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        raise ValueError(f'{text[:80]!r} is no call; it is {{"name": ..., "arguments": {{...}}}}')
    return json.dumps(call, sort_keys=True, ensure_ascii=False)
