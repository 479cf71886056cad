"""Two-step word problems and arithmetic drills: question, reasoning and answer are functions of one random draw.

Reasoning has one fixed form, ``First, 9 * 9 = 81. Then, 13 + 81 = 94.``; the answer is ``The answer is 94 balls.``
The held-out split is by hash of the question, so it is the same in every process and run.
"""

import hashlib
import random
from typing import NamedTuple

from train.dialogue import Dialogue, Message
from train.stories import Story, story
from train.words import CONTAINERS, NAMES, SYSTEM_TEXTS, THINGS, WOMEN

HELD_OUT_ONE_IN = 16
PRONOUN_SHARE = 0.45
STORY_SHARE = 0.65


def held_out(key: str) -> bool:
    """True for the one in sixteen questions that training never sees."""
    return hashlib.blake2b(key.encode(), digest_size=4).digest()[0] % HELD_OUT_ONE_IN == 0


class Problem(NamedTuple):
    """A question with its worked reasoning and answer."""

    question: str
    reasoning: str
    answer: str


class Shape(NamedTuple):
    """A kind of two-step problem: ``ops`` are the two operators and the side of the first result ('l' or 'r')."""

    ops: str  # e.g. "*+r": first b * c, then a + it; "+-l": first a + b, then it - c
    unit: str
    wordings: tuple[str, ...]


# {n} {m} names, {x} the thing, {k} a container; {a} {b} {c} numbers in the order they are drawn
SHAPES = (
    Shape("*+r", "{x}", (
        "{n} has {a} {x}. {n} buys {b} {k} with {c} {x} each. How many {x} does {n} have now?",
        "{n} has {a} {x} and gets {b} {k} of {c} {x} each. How many {x} does {n} have in total?",
        "There are {a} {x} on the table. {n} brings {b} {k} with {c} {x} in each. How many {x} are there now?",
        "{n} owns {a} {x} and finds {b} {k}. Each holds {c} {x}. How many {x} does {n} own then?",
    )),
    Shape("*-r", "{x}", (
        "{n} has {a} {x}. {n} fills {b} {k} with {c} {x} each and gives them away. How many {x} are left?",
        "{n} has {a} {x} and gives {c} {x} to each of {b} friends. How many {x} does {n} have left?",
        "A shop has {a} {x}. It sells {b} {k} with {c} {x} each. How many {x} remain?",
    )),
    Shape("+-l", "{x}", (
        "{n} has {a} {x}. {n} finds {b} more and gives {c} to {m}. How many {x} does {n} have now?",
        "{n} has {a} {x}, buys {b} more and loses {c}. How many {x} does {n} have left?",
        "There are {a} {x} in a jar. {n} adds {b} {x} and {m} takes {c}. How many {x} are in the jar?",
    )),
    Shape("-+l", "{x}", (
        "{n} has {a} {x}. {n} gives {b} to {m} and then buys {c} more. How many {x} does {n} have now?",
        "{n} had {a} {x}, lost {b} and found {c}. How many {x} does {n} have now?",
        "A shop has {a} {x}. It sells {b} and then receives {c} new ones. How many {x} does it have?",
    )),
    Shape("--l", "{x}", (
        "{n} has {a} {x}. {n} gives {b} to {m} and loses {c}. How many {x} are left?",
        "There are {a} {x} in a box. {n} takes {b} and {m} takes {c}. How many {x} remain in the box?",
    )),
    Shape("++l", "{x}", (
        "{n} has {a} {x}, finds {b} and buys {c}. How many {x} does {n} have in total?",
        "{n} collects {a} {x} on Monday, {b} on Tuesday and {c} on Wednesday. How many {x} does {n} collect in all?",
    )),
    Shape("+*l", "dollars", (
        "A pen costs {a} dollars and a book costs {b} dollars. {n} buys {c} of each. How many dollars does {n} pay?",
        "{n} earns {a} dollars in the morning and {b} dollars in the afternoon, every day. How many dollars does {n} earn in {c} days?",
    )),
    Shape("+*l", "{x}", (
        "Each of {c} {k} holds {a} red and {b} blue {x}. How many {x} are there in all?",
        "{n} packs {a} large and {b} small {x} into each of {c} {k}. How many {x} does {n} pack?",
    )),
    Shape("-*l", "{x}", (
        "There are {c} {k} with {a} {x} each. In each, {b} are broken. How many good {x} are there?",
        "{n} makes {a} {x} a day and uses {b} of them the same day. How many {x} are saved in {c} days?",
    )),
    Shape("*/l", "{x}", (
        "{n} has {a} {k} with {b} {x} each and shares all of them equally among {c} friends. How many {x} does each friend get?",
        "{n} puts the {x} from {a} {k} of {b} equally on {c} shelves. How many {x} are on each shelf?",
    )),
    Shape("+/l", "{x}", (
        "{n} has {a} {x} and {m} has {b} {x}. They share them equally among {c} friends. How many {x} does each friend get?",
        "{n} mixes {a} red and {b} green {x} and puts them equally into {c} {k}. How many {x} are in each?",
    )),
    Shape("-/l", "{x}", (
        "{n} has {a} {x}. {n} uses {b} and puts the rest equally into {c} {k}. How many {x} are in each?",
        "Of {a} {x}, {b} are lost. The rest is shared equally by {c} children. How many {x} does each child get?",
    )),
    Shape("*+l", "{x}", (
        "{n} packs {a} {k} with {b} {x} each and has {c} {x} left over. How many {x} does {n} have in total?",
        "There are {a} {k} with {b} {x} each, and {c} more {x} on the floor. How many {x} are there in all?",
        "{n} buys {a} {k} of {b} {x} and gets {c} {x} as a gift. How many {x} does {n} have?",
    )),
    Shape("*-l", "{x}", (
        "{n} buys {a} {k} with {b} {x} each. Then {c} {x} get lost. How many {x} are left?",
        "A farm fills {a} {k} with {b} {x} each and sells {c} {x}. How many {x} are left?",
    )),
    Shape("**l", "{x}", (
        "There are {a} rooms with {b} {k} in each room. Each holds {c} {x}. How many {x} are there?",
        "{n} has {a} shelves with {b} {k} each, and {c} {x} are in each of these. How many {x} does {n} have?",
    )),
    Shape("/+l", "{x}", (
        "{n} shares {a} {x} equally among {b} {k}, then adds {c} {x} to the first. How many {x} are in the first?",
        "{b} friends share {a} {x} equally. {n} is one of them and had {c} {x} before. How many {x} does {n} have now?",
    )),
    Shape("/-l", "{x}", (
        "{b} friends share {a} {x} equally. {n}, one of them, gives {c} away. How many {x} does {n} keep?",
        "{n} puts {a} {x} equally into {b} {k} and takes {c} out of one. How many {x} are left in that one?",
    )),
    Shape("++2", "{x}", (
        "{n} has {a} {x}. {m} has {b} more than {n}. How many {x} do they have together?",
        "{n} reads {a} {x}, and {m} reads {b} more than {n}. How many {x} do both read together?",
    )),
    Shape("-+2", "{x}", ("{n} has {a} {x}. {m} has {b} fewer than {n}. How many {x} do they have together?",)),
    Shape("*+2", "{x}", (
        "{n} has {a} {x}. {m} has {b} times as many. How many {x} do they have together?",
        "{n} finds {a} {x} and {m} finds {b} times as many. How many {x} do they find together?",
    )),
    Shape("*+l", "km", (
        "{n} walks {a} km a day for {b} days and then {c} km more. How many km does {n} walk in total?",
        "{n} rides {a} km every day for {b} days. On the last evening {n} rides {c} km more. How many km is that?",
    )),
    Shape("*-r", "dollars", (
        "{n} has {a} dollars and buys {b} {x} for {c} dollars each. How many dollars are left?",
        "{n} takes {a} dollars to the shop and pays {c} dollars for each of {b} {x}. How many dollars does {n} bring home?",
    )),
    Shape("*+r", "dollars", (
        "{n} has {a} dollars and sells {b} {x} for {c} dollars each. How many dollars does {n} have now?",
        "{n} saved {a} dollars. Then {n} works {b} hours for {c} dollars an hour. How many dollars does {n} have?",
    )),
    Shape("++l", "years", (
        "{n} is {a} years old. {m} is {b} years older. How many years old will {m} be in {c} years?",
    )),
)  # fmt: skip


def calculate(a: int, op: str, b: int) -> int:
    """Exact integer arithmetic on the four operators; division must come out even."""
    if op == "/":
        assert a % b == 0
        return a // b
    return {"+": a + b, "-": a - b, "*": a * b}[op]


def _numbers(rng: random.Random, ops: str) -> tuple[int, int, int]:
    """Draw a, b, c so that both steps stay in the small positive integers."""
    first, second, side = ops
    small = rng.randint(2, 12)
    if side == "r":  # a op2 (b * c)
        b, c = rng.randint(2, 12), rng.randint(2, 15)
        a = rng.randint(2, 99) if second == "+" else b * c + rng.randint(1, 60)
        return a, b, c
    if side == "2":  # (a op1 b) + a
        a = rng.randint(2, 60) if first == "*" else rng.randint(5, 99)
        b = {"*": rng.randint(2, 6), "+": rng.randint(2, 60), "-": rng.randint(1, a - 1)}[first]
        return a, b, 0
    if first == "/":
        b, share = small, rng.randint(3, 20)
        return b * share, b, rng.randint(2, 60) if second == "+" else rng.randint(1, share - 1)
    if second == "/":  # choose the quotient first
        c, each = rng.randint(2, 9), rng.randint(2, 20)
        total = c * each
        if first == "*":
            divisors = [d for d in range(2, min(total, 21)) if total % d == 0 and total // d <= 30]
            a = rng.choice(divisors or [1])
            return a, total // a, c
        b = rng.randint(1, max(1, total - 1)) if first == "+" else rng.randint(1, 60)
        return (total - b if first == "+" else total + b), b, c
    a, b = (small, rng.randint(2, 15)) if first == "*" else (rng.randint(3, 99), rng.randint(2, 99))
    if second == "*":
        a, b = (
            (rng.randint(2, 6), rng.randint(2, 6))
            if first == "*"
            else (rng.randint(2, 15), rng.randint(2, 15))
        )
        a, b = (a + b, b) if first == "-" else (a, b)
        return a, b, rng.randint(2, 9)
    if first == "-":
        a, b = max(a, b) + 2, min(a, b)
    middle = calculate(a, first, b)
    c = rng.randint(2, 99) if second == "+" else rng.randint(1, max(1, middle - 1))
    return a, b, c


def draw_problem(rng: random.Random) -> Problem:
    """One random problem, of the table or put together from parts, either side of the split."""
    return _from_story(story(rng)) if rng.random() < STORY_SHARE else _from_table(rng)


def _from_story(told: Story) -> Problem:
    left, one, right = told.first
    middle = calculate(left, one, right)
    head, tail = (told.start, middle) if told.last is None else (middle, told.last)
    result = calculate(head, told.second, tail)
    reasoning = f"First, {left} {one} {right} = {middle}. Then, {head} {told.second} {tail} = {result}."
    return Problem(told.question, reasoning, f"The answer is {result} {told.unit}.")


def _from_table(rng: random.Random) -> Problem:
    shape = rng.choice(SHAPES)
    a, b, c = _numbers(rng, shape.ops)
    n, m = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    fields = {"n": n, "m": m, "x": thing, "k": rng.choice(CONTAINERS), "a": a, "b": b, "c": c}
    wording = rng.choice(shape.wordings)
    question = wording.format(**fields)
    if "{m}" not in wording and rng.random() < PRONOUN_SHARE:
        question = _with_pronouns(question, n)
    one, two, side = shape.ops
    left, right = (b, c) if side == "r" else (a, b)
    middle = calculate(left, one, right)
    head, tail = {"r": (a, middle), "2": (a, middle), "l": (middle, c)}[side]
    result = calculate(head, two, tail)
    reasoning = f"First, {left} {one} {right} = {middle}. Then, {head} {two} {tail} = {result}."
    return Problem(question, reasoning, f"The answer is {result} {shape.unit.format(**fields)}.")


def _with_pronouns(question: str, name: str) -> str:
    """The name stays where it first stands; later it becomes he or she."""
    pronoun = "she" if name in WOMEN else "he"
    head, found, tail = question.partition(name)
    for before, after in (
        (". " + name, ". " + pronoun.capitalize()),
        ("does " + name, "does " + pronoun),
        (" " + name + " ", f" {pronoun} "),
    ):
        tail = tail.replace(before, after)
    return head + found + tail


def problem(rng: random.Random, *, held: bool = False) -> Problem:
    """One random problem of the asked side of the split."""
    while True:
        drawn = draw_problem(rng)
        if held_out(drawn.question) == held:
            return drawn


def maybe_system(rng: random.Random, share: float = 0.35) -> tuple[Message, ...]:
    """A system message in ``share`` of the dialogues."""
    return (Message("system", rng.choice(SYSTEM_TEXTS)),) if rng.random() < share else ()


def word_problem(rng: random.Random, *, held: bool = False, thinking: bool | None = None) -> Dialogue:
    """A dialogue of one word problem; without thinking the answer shows the two steps."""
    p = problem(rng, held=held)
    thinks = rng.random() < 0.85 if thinking is None else thinking
    answer = (
        Message("assistant", p.answer, p.reasoning)
        if thinks
        else Message("assistant", f"{p.reasoning} {p.answer}")
    )
    return Dialogue((*maybe_system(rng), Message("user", p.question), answer), thinks)


DRILL_WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
DRILL_WORDINGS = (
    "What is {a} {o} {b}?", "{a} {o} {b} = ?", "Compute {a} {o} {b}.", "{a} {o} {b}", "How much is {a} {w} {b}?", "What is {a} {w} {b}?",
)  # fmt: skip


def drill_numbers(rng: random.Random) -> tuple[int, str, int]:
    """Operands of one step as they occur in the word problems, and a little beyond."""
    op = rng.choice("++--**/")
    if op == "+":
        return rng.randint(1, 250), op, rng.randint(1, 120)
    if op == "-":
        b = rng.randint(1, 120)
        return b + rng.randint(0, 200), op, b
    a, b = rng.randint(2, 12), rng.randint(2, 40 if rng.random() < 0.3 else 20)
    if op == "/":
        return a * b, op, rng.choice((a, b))
    return (a, op, b) if rng.random() < 0.5 else (b, op, a)


def drills(rng: random.Random) -> Dialogue:
    """Two to six turns of single operations."""
    messages = list(maybe_system(rng))
    thinking = rng.random() < 0.3
    for _ in range(rng.randint(2, 6)):
        a, op, b = drill_numbers(rng)
        question = rng.choice(DRILL_WORDINGS).format(a=a, b=b, o=op, w=DRILL_WORDS[op])
        text = f"{a} {op} {b} = {calculate(a, op, b)}."
        messages += [Message("user", question), Message("assistant", text, f"I compute {a} {op} {b}.")]
    return Dialogue(tuple(messages), thinking)
