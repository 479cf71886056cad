"""Tool dialogues: calculators in many spellings, other tools, calls with and without their results.

The call is a function of the prompt: which tool is offered decides its name, parameters and form.
"""

import random
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from train.chat import small_talk
from train.dialogue import Call, Dialogue, Message
from train.problems import calculate, held_out, maybe_system
from train.recall import word
from train.words import CITIES, NAMES, SMALL_TALK

Tool = Mapping[str, Any]
CALCULATOR_NAMES = (
    "calculator",
    "calculate",
    "calc",
    "compute",
    "evaluate",
    "math",
    "eval_expression",
    "do_math",
)
EXPRESSION_NAMES = ("expression", "expr", "formula", "input", "query", "calculation")
CALCULATOR_TEXTS = (
    "Evaluate an arithmetic expression.",
    "Evaluates an arithmetic expression and returns the result.",
    "A calculator. Evaluates a mathematical expression.",
    "Compute the value of an arithmetic expression",
    "Calculate a math expression, for example 2 + 3 * 4.",
    "Performs basic arithmetic.",
    "Useful for arithmetic.",
)
PARAMETER_TEXTS = (
    "The expression to evaluate.",
    "The arithmetic expression, e.g. 12 * 7",
    "An arithmetic expression",
    "expression",
)
OPERATION_NAMES = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
OPERAND_NAMES = (
    ("op", "a", "b"),
    ("operation", "a", "b"),
    ("operation", "x", "y"),
    ("operator", "left", "right"),
)
ASK_WORDINGS = (
    "What is {e}?", "Calculate {e}.", "Compute {e}.", "How much is {e}?", "Please calculate {e}.", "Use the tool to compute {e}.",
    "Use the calculator: {e}", "I need the value of {e}.", "{e} = ?", "Can you work out {e}?", "Please compute {e} for me.",
    "What is {e}? Use the calculator.", "Work out {e} with the calculator.", "Tell me what {e} is.",
)  # fmt: skip
SPOKEN = {
    "+": (
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "Find the sum of {a} and {b}.",
        "Add {b} to {a}.",
        "Sum {a} and {b}.",
    ),
    "-": (
        "Subtract {b} from {a}.",
        "What is the difference between {a} and {b}?",
        "Take {b} away from {a}.",
        "What is {a} less {b}?",
    ),
    "*": (
        "Multiply {a} by {b}.",
        "What is the product of {a} and {b}?",
        "Multiply {a} and {b}.",
        "Find the product of {a} and {b}.",
    ),
    "/": ("Divide {a} by {b}.", "What is the quotient of {a} and {b}?", "Please divide {a} by {b}."),
}
OP_WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}


def _any_name(rng: random.Random, known: Sequence[str]) -> str:
    """A known name, or one put together from words that the model must copy."""
    if rng.random() < 0.7:
        return rng.choice(known)
    return rng.choice(("{a}_{b}", "{a}", "{a}{b}", "{a}-{b}")).format(
        a=word(rng), b=rng.choice((word(rng), "calculator", "math", "calc"))
    )


def expression_tool(rng: random.Random) -> tuple[Tool, str]:
    """(schema, parameter name) of a calculator that takes an expression as text."""
    parameter = EXPRESSION_NAMES[0] if rng.random() < 0.5 else _any_name(rng, EXPRESSION_NAMES)
    name = CALCULATOR_NAMES[0] if rng.random() < 0.4 else _any_name(rng, CALCULATOR_NAMES)
    schema: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.6:
        schema["description"] = rng.choice(PARAMETER_TEXTS)
    return _tool(rng, name, rng.choice(CALCULATOR_TEXTS), {parameter: schema}), parameter


class Operands(NamedTuple):
    """Parameter names (operation, left, right) and the order in which the schema, and so the call, lists them."""

    names: tuple[str, str, str]
    order: tuple[str, ...]


def operand_tool(rng: random.Random) -> tuple[Tool, Operands]:
    """(schema, parameters) of a calculator that takes an operation and two numbers."""
    names = rng.choice(OPERAND_NAMES)
    kind = rng.choice(("number", "integer", "number"))
    operation: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.7:
        operation["enum"] = list(OPERATION_NAMES.values())
    properties = {names[0]: operation, names[1]: {"type": kind}, names[2]: {"type": kind}}
    if rng.random() < 0.4:
        properties = {names[1]: properties[names[1]], names[2]: properties[names[2]], names[0]: operation}
    if rng.random() < 0.4:
        for schema, text in zip(
            properties.values(), ("first argument", "second argument", "third argument"), strict=True
        ):
            schema["description"] = text
    tool = _tool(rng, _any_name(rng, CALCULATOR_NAMES), rng.choice(CALCULATOR_TEXTS), properties)
    return tool, Operands(names, tuple(properties))


def _tool(rng: random.Random, name: str, description: str, properties: Mapping[str, Any]) -> Tool:
    parameters: dict[str, Any] = {"type": "object", "properties": dict(properties)}
    if rng.random() < 0.85:
        parameters["required"] = list(properties)
    return {"name": name, "description": description, "parameters": parameters}


def _weather(rng: random.Random) -> tuple[Tool, str, Call]:
    parameter = rng.choice(("city", "location", "place"))
    city = rng.choice(CITIES)
    tool = _tool(
        rng,
        rng.choice(("get_weather", "weather")),
        rng.choice(("Get weather", "Get the weather of a city.")),
        {parameter: {"type": "string"}},
    )
    question = rng.choice(
        ("What is the weather in {c}?", "How is the weather in {c}?", "Weather in {c}?")
    ).format(c=city)
    return tool, question, Call(tool["name"], {parameter: city})


def _timer(rng: random.Random) -> tuple[Tool, str, Call]:
    minutes = rng.randint(1, 90)
    tool = _tool(rng, "set_timer", "Set a timer.", {"minutes": {"type": "integer"}})
    question = rng.choice(("Set a timer for {m} minutes.", "Start a timer of {m} minutes.")).format(m=minutes)
    return tool, question, Call("set_timer", {"minutes": minutes})


def _mail(rng: random.Random) -> tuple[Tool, str, Call]:
    name = rng.choice(NAMES)
    text = rng.choice(("I am late.", "See you soon.", "The work is done.", "Please call me."))
    tool = _tool(
        rng,
        "send_message",
        "Send a message to a person.",
        {"to": {"type": "string"}, "text": {"type": "string"}},
    )
    return tool, f"Send a message to {name}: {text}", Call("send_message", {"to": name, "text": text})


OTHERS = (_weather, _timer, _mail)


def arithmetic(rng: random.Random) -> tuple[int, str, int]:
    """Operands of two to five digits."""
    op = rng.choice("++--**/")

    def number(digits: int) -> int:
        return rng.randint(10 ** (digits - 1), 10**digits - 1)

    if op == "/":
        b, quotient = rng.randint(2, 99), number(rng.randint(1, 3))
        return b * quotient, op, b
    a, b = number(rng.randint(1, 5)), number(rng.randint(1, 4))
    return (max(a, b), op, min(a, b)) if op == "-" else (a, op, b)


STORIES = {
    "+": (
        "I have {a} euros and get {b} more. How much is that?",
        "{a} people came on Monday and {b} on Tuesday. How many is that?",
    ),
    "-": (
        "A shop had {a} pens and sold {b}. How many are left?",
        "I had {a} euros and spent {b}. How much is left?",
    ),
    "*": (
        "There are {a} boxes with {b} pens each. How many pens is that?",
        "A ticket costs {b} euros. How much do {a} tickets cost?",
        "I bought {a} items at {b} dollars each. What is the total?",
        "We need {a} chairs in each of {b} rooms. How many chairs is that?",
    ),
    "/": (
        "{a} pens go equally into {b} boxes. How many are in each box?",
        "{b} friends share {a} euros equally. How much does each get?",
    ),
}


class Sum(NamedTuple):
    """A computation: how the user writes it, how the tool gets it, its parts if it is one operation, and its value."""

    question: str
    expression: str
    parts: tuple[int, str, int] | None
    value: int | Decimal


def _written(rng: random.Random, a: int, op: str, b: int) -> str:
    """One operation in a user's spelling."""
    roll = rng.random()
    if roll < 0.25:
        return f"{a} {OP_WORDS[op]} {b}"
    if roll < 0.35:
        return f"{a}{op}{b}"
    return f"{a} x {b}" if op == "*" and roll < 0.5 else f"{a} {op} {b}"


def draw_sum(rng: random.Random, *, held: bool, single: bool) -> Sum:
    """A random computation of the asked side of the split (by its expression); ``single``: one operation only."""
    while True:
        a, op, b = arithmetic(rng)
        if not single and rng.random() < 0.06:
            text = f"{a}.{b % 100} {op.replace('/', '*')} {rng.randint(2, 99)}"
            if held_out(text) == held:
                left, sign, right = text.split()
                value = {
                    "+": Decimal(left) + int(right),
                    "-": Decimal(left) - int(right),
                    "*": Decimal(left) * int(right),
                }[sign]
                return Sum(rng.choice(ASK_WORDINGS).format(e=text), text, None, value)
            continue
        if not single and rng.random() < 0.2:
            c, second = rng.randint(2, 999), rng.choice("+-*")
            text = f"({a} {op} {b}) {second} {c}" if rng.random() < 0.5 else f"{a} {second} {c} + {b}"
            value = (
                calculate(calculate(a, op, b), second, c) if text[0] == "(" else calculate(a, second, c) + b
            )
            if held_out(text) == held:
                return Sum(rng.choice(ASK_WORDINGS).format(e=text), text, None, value)
            continue
        text = f"{a} {op} {b}"
        if held_out(text) == held:
            roll = rng.random()
            if roll < 0.2:
                question = rng.choice(SPOKEN[op]).format(a=a, b=b)
            elif roll < 0.33:
                question = rng.choice(STORIES[op]).format(a=a, b=b)
            else:
                question = rng.choice(ASK_WORDINGS).format(e=_written(rng, a, op, b))
            return Sum(question, text, (a, op, b), calculate(a, op, b))


def calculator_turn(
    rng: random.Random, form: Any, name: str, *, held: bool = False
) -> tuple[Message, Message, Sum]:
    """(user turn, calling turn, computation) for a calculator whose parameters are ``form``."""
    drawn = draw_sum(rng, held=held, single=not isinstance(form, str))
    if isinstance(form, str):
        arguments: dict[str, Any] = {form: drawn.expression}
    else:
        assert drawn.parts is not None
        a, op, b = drawn.parts
        values = dict(zip(form.names, (OPERATION_NAMES[op], a, b), strict=True))
        arguments = {name: values[name] for name in form.order}
    reasoning = f"I use the tool {name} to compute {drawn.expression}."
    return (
        Message("user", drawn.question),
        Message("assistant", "", reasoning, (Call(name, arguments),)),
        drawn,
    )


def calculator(
    rng: random.Random, *, held: bool = False, simple: bool = False, thinking: bool | None = None
) -> Dialogue:
    """A dialogue ending with a calculator call (``simple``), or with one or two whole round trips."""
    tool, form = expression_tool(rng) if rng.random() < 0.75 else operand_tool(rng)
    tools = [tool]
    for other in rng.sample(OTHERS, rng.choice((0, 0, 0, 1, 2))):
        tools.insert(rng.randrange(len(tools) + 1), other(rng)[0])
    thinks = rng.random() < 0.6 if thinking is None else thinking
    messages = list(maybe_system(rng))
    if rng.random() < 0.1 and not simple:
        wordings, reasoning, answer = rng.choice(SMALL_TALK)
        messages += [Message("user", rng.choice(wordings)), Message("assistant", answer, reasoning)]
    for _ in range(1 if simple else rng.choice((1, 1, 2))):
        user, calling, drawn = calculator_turn(rng, form, tool["name"], held=held)
        messages += [user, calling]
        if simple:
            break
        if rng.random() < 0.25 and len(messages) < 5:
            break  # ends with the call
        shown = f'{{"result": {drawn.value}}}' if rng.random() < 0.25 else str(drawn.value)
        answer = f"{drawn.expression} = {drawn.value}."
        messages += [Message("tool", shown), Message("assistant", answer, f"The tool says {drawn.value}.")]
    return Dialogue(tuple(messages), thinks, tuple(tools))


def other_tools(rng: random.Random) -> Dialogue:
    """A call of another tool, or small talk with tools offered (no call)."""
    builder = rng.choice(OTHERS)
    tool, question, call = builder(rng)
    tools = [tool]
    if rng.random() < 0.6:
        tools.insert(rng.randrange(2), expression_tool(rng)[0])
    messages = list(maybe_system(rng))
    if rng.random() < 0.4:
        asked, reasoning, answer = small_talk(rng)
        messages += [Message("user", asked), Message("assistant", answer, reasoning)]
    else:
        messages += [
            Message("user", question),
            Message("assistant", "", f"I use the tool {call.name}.", (call,)),
        ]
        if rng.random() < 0.4:
            result = (
                rng.choice(("ok", "done"))
                if builder is not _weather
                else rng.choice(("sunny", "rain", "cloudy", "12 degrees", "snow"))
            )
            messages += [
                Message("tool", result),
                Message("assistant", f"The tool answers: {result}.", f"The tool says {result}."),
            ]
    return Dialogue(tuple(messages), rng.random() < 0.6, tuple(tools))
