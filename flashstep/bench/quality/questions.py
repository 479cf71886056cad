"""Questions with known answers: JSON lines of ``question`` and ``answer``, as public GSM8K has them, or one of ours.

A line may also have ``id`` (else it is the line's number), ``system`` (instructions before the question) and ``tools`` (Chat
Completions' form, offered with it); other fields are the file's own business. Gives checked ``Question``s, all errors at once.
Knows no model.
"""

import codecs
import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from flashstep.bench.quality.extract import Rule, expected

FOLDER = Path(__file__).parent / "questions"
SHIPPED = {  # held out from the tiny model's training (train/questions.py makes them), with the rule that reads their answers
    "word-problems": Rule.NUMBER,
    "recall": Rule.CONTAINS,
    "calls": Rule.CALL,
}
MOST_TOLD = 5
WANTED = 'wanted is {"question": "...", "answer": "..."} on each line, as UTF-8'


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """``answer`` is the whole reference, as an example would show it; ``expected`` what of it is compared."""

    question: str
    answer: str
    id: str = ""
    system: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    expected: str = ""


class QuestionSet(msgspec.Struct, frozen=True, kw_only=True):
    """A file's questions. ``digest`` is of the file, so that two runs know whether they asked the same."""

    name: str
    digest: str
    rule: Rule
    questions: tuple[Question, ...]


def read(source: str, *, rule: Rule | None = None) -> QuestionSet:
    """The set named ``source``, or the file at that path; ``ValueError`` with every line that is wrong.

    Without a ``rule`` a shipped set has its own, and a file is read by its last number.
    """
    path = FOLDER / f"{source}.jsonl" if source in SHIPPED else Path(source)
    rule = rule or SHIPPED.get(source, Rule.NUMBER)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"the questions {source}: {error.strerror or error}; give a file of JSON lines or one of {', '.join(SHIPPED)}"
        ) from None
    if problem := _not_lines(data):
        raise ValueError(f"{path} is no file of questions: {problem}; {WANTED}")
    data = data.removeprefix(codecs.BOM_UTF8)
    found: list[Question] = []
    wrong: list[str] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            found.append(_question(line, number=number, rule=rule))
        except ValueError as error:
            wrong.append(f"line {number}: {error}")
    wrong += [
        f"id {id} stands {count} times" for id, count in Counter(q.id for q in found).items() if count > 1
    ]
    if not found and not wrong:
        wrong.append("it is empty")
    if wrong:
        more = f"; and {len(wrong) - MOST_TOLD} more" if len(wrong) > MOST_TOLD else ""
        raise ValueError(f"{path} is no file of questions: {'; '.join(wrong[:MOST_TOLD])}{more}; {WANTED}")
    digest = hashlib.sha256(data).hexdigest()[:12]
    return QuestionSet(name=path.stem, digest=digest, rule=rule, questions=tuple(found))


def _not_lines(data: bytes) -> str:
    """What ``data`` is instead of lines of UTF-8, as far as its beginning tells; "" if nothing speaks against them."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "it is UTF-16; write it as UTF-8"
    text = data.removeprefix(codecs.BOM_UTF8).lstrip()
    if text.startswith(b"["):
        return "it is a JSON array; write each of its objects on a line of its own (jq -c '.[]')"
    if text.split(b"\n", 1)[0].strip() == b"{":
        return "its JSON goes over several lines; write each object on one line (jq -c)"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"line {data.count(10, 0, error.start) + 1} is no UTF-8"
    return ""


def _question(line: bytes, *, number: int, rule: Rule) -> Question:
    found = msgspec.json.decode(line, type=Question)
    if not found.question.strip():
        raise ValueError("the question is empty")
    return msgspec.structs.replace(found, id=found.id or str(number), expected=expected(found.answer, rule))
