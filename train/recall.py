"""Key-value recall: facts spread in real text, asked later. Keys, values and question wordings vary; every answer is
a function of the prompt (its form depends only on the question). The split is by hash of key and value.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from train.dialogue import WEIGHT_LONG_NOTES, WEIGHT_NOTES, Dialogue, Message
from train.problems import held_out, maybe_system
from train.words import ADJECTIVES, CITIES, COLOURS, NAMES, NOUNS, PLACES, SECRET_WORDS

QUESTION_TOKENS = 40  # of a question with its answer, about
FREE_SHARE = 0.5  # texts with keys and attributes beyond the lists
MERGED_SHARE = 0.2
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."  # a customary haystack
NOISE_SHARE = 0.06
LONG_FROM = 900  # tokens of notes above which their loss weight is halved
FACT_WORDINGS = (
    "The {t} of {k} is {v}.",
    "Note: the {t} of {k} is {v}.",
    "Remember that {k} has the {t} {v}.",
    "Please keep in mind: {k} has the {t} {v}.",
    "{K}: {t} {v}.",
    "For {k}, the {t} is {v}.",
    "By the way, the {t} of {k} is {v}.",
    "It is important that the {t} of {k} is {v}.",
    "The {t} for {k} is {v}.",
    "{K} has {t} {v}.",
    "{t} of {k}: {v}",
    "{t} for {k} = {v}",
    "One of the {t}s for {k} is: {v}.",
)
BARE_WORDINGS = (
    "{k}: {v}",
    "{k} = {v}",
    "{k} -> {v}",
    "key {k}, value {v}",
    "The value of {k} is {v}.",
    '"{k}": "{v}"',
)
QUESTION_WORDINGS = (
    "What is the {t} of {k}?",
    "Which {t} does {k} have?",
    "Tell me the {t} of {k}.",
    "What {t} does {k} have?",
    "Do you know the {t} of {k}?",
    "Please give me the {t} of {k}.",
    "According to the notes, what is the {t} of {k}?",
    "What is the {t} for {k}?",
    "What {t} belongs to {k}?",
    "Find the {t} of {k}.",
    "I need the {t} of {k}.",
    "What is the {t} for {k} in the text?",
    "What was the {t} of {k}?",
    "What is the {t} of {k} mentioned in the text?",
)
BARE_ENDINGS = ("Answer with the {t} only.", "Reply with only the {t}.", "Give only the {t}.")
INTRODUCTIONS = (
    "Here are some notes.",
    "Read these notes.",
    "Please read the following text and remember the facts in it.",
    "Here is a long text. I will ask questions about it.",
    "Notes:",
    "Remember what these notes say.",
)
READ_REPLY = "I have read the notes."
READ_REASONING = "The user gives me notes to read."


class Fact(NamedTuple):
    """``attribute`` of ``key`` is ``value``."""

    key: str
    attribute: str
    value: str

    @property
    def question(self) -> str:
        return f"{self.key}|{self.attribute}|{self.value}"

    @property
    def sentence(self) -> str:
        return f"The {self.attribute} of {self.key} is {self.value}."


def _value(rng: random.Random, attribute: str) -> str:
    if attribute not in LISTED:
        return str(
            rng.randint(*rng.choice(((1000, 9999), (1000, 9999), (10, 99), (100, 999), (10000, 9999999))))
        )
    if attribute in ("code", "pin"):
        return f"{rng.randint(0, 9999):04d}" if rng.random() < 0.3 else str(rng.randint(1000, 9999))
    if attribute == "number":
        return str(rng.randint(10, 999))
    if attribute == "key":
        return str(rng.randint(10000, 999999))
    return rng.choice({"password": SECRET_WORDS, "colour": COLOURS, "city": CITIES}[attribute])


LISTED = ("code", "pin", "number", "key", "password", "colour", "city")
ATTRIBUTES = (
    ("code",) * 8 + ("pin",) * 2 + ("number",) * 2 + ("key",) + ("password",) * 4 + ("colour",) + ("city",)
)
FREE_ATTRIBUTES = (
    "secret code",
    "access code",
    "magic number",
    "special magic number",
    "secret number",
    "identifier",
    "ticket number",
    "price",
    "score",
    "serial number",
    "phone number",
    "value",
    "value",
    "value",
    "value",
    "weight",
    "size",
    "age",
    "year",
    "unlock code",
    "lucky number",
)
SYLLABLES = (
    "ba be bo ca ce co da de di do fa fe fi go ha he hi jo ju ka ke ki la le li lo lu ma me mi mo na ne no nu or pa pe po ra re ri ro "
    "sa se si so ta te ti to tu va ve vi vo wa wi xa ya yo za ze zu an el in us ar th st ch br dr gr kl pr tr"
).split()
FREE_KINDS = 8
KINDS = 10


def invented(rng: random.Random) -> str:
    """A word that nobody knows."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4)))


def word(rng: random.Random) -> str:
    """A known or an invented word."""
    roll = rng.random()
    if roll < 0.45:
        return invented(rng)
    return rng.choice((NOUNS, ADJECTIVES, SECRET_WORDS, COLOURS, PLACES)[rng.randrange(5)])


def _free_key(rng: random.Random, kind: int) -> str:
    if kind == 0:
        return word(rng)
    if kind == 1:
        return "the " + word(rng)
    if kind == 2:
        return f"{word(rng)}-{word(rng)}"
    if kind == 3:
        return f"{word(rng)}{rng.choice('_-')}{rng.randint(1, 999)}"
    if kind == 4:
        return (
            "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
            + rng.choice(("", "-"))
            + str(rng.randint(1, 999))
        )
    if kind == 5:
        return invented(rng).capitalize()
    if kind == 6:
        return f"{rng.choice(NAMES)} {invented(rng).capitalize()}"
    return f"project {word(rng).capitalize()}"


def _key(rng: random.Random, kind: int) -> str:
    if kind >= KINDS:
        return _free_key(rng, kind - KINDS)
    if kind < 6:
        return f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    if kind == 6:
        return rng.choice(NAMES)
    if kind == 7:
        return f"{rng.choice(PLACES)} {rng.randint(1, 99)}"
    if kind == 8:
        return f"{rng.choice(NAMES)}'s {rng.choice(PLACES)}"
    return f"the {rng.choice(NOUNS)}"


def _near(rng: random.Random, key: str) -> str:
    """A key that shares a word with ``key``: what a lazy lookup would confuse."""
    words = key.split()
    if len(words) == 3 and words[0] == "the":
        words[rng.choice((1, 2))] = rng.choice(ADJECTIVES if rng.random() < 0.5 else NOUNS)
        if words[1] not in ADJECTIVES or words[2] not in NOUNS:
            words[1], words[2] = rng.choice(ADJECTIVES), words[2] if words[2] in NOUNS else rng.choice(NOUNS)
        return " ".join(words)
    if words[-1].isdigit():
        return f"{words[0]} {rng.randint(1, 99)}"
    if len(words) == 2 and "'s" in words[0]:
        return f"{words[0]} {rng.choice(PLACES)}"
    parts = key.rsplit("-", 1)
    if len(parts) == 2:
        return f"{parts[0]}-{rng.randint(1, 999) if parts[1].isdigit() else word(rng)}"
    return (
        key[:-1] + rng.choice("aeiounrst")
        if rng.random() < 0.3
        else _key(rng, rng.randrange(KINDS + FREE_KINDS))
    )


def facts(rng: random.Random, count: int, *, held: bool = False) -> list[Fact]:
    """``count`` facts of different (key, attribute), all of the asked side of the split, some keys nearly equal."""
    found: dict[tuple[str, str], Fact] = {}
    values: set[str] = set()
    mixed, free = rng.random() < 0.3, rng.random() < FREE_SHARE
    kinds = (
        range(KINDS + FREE_KINDS)
        if free and mixed
        else range(KINDS, KINDS + FREE_KINDS)
        if free
        else range(KINDS)
    )
    attributes = FREE_ATTRIBUTES if free and rng.random() < 0.7 else ATTRIBUTES
    kind = rng.choice(kinds)
    attribute = rng.choice(attributes)
    while len(found) < count:
        if found and rng.random() < 0.4:
            key = _near(rng, rng.choice(list(found))[0])
        else:
            key = _key(rng, rng.choice(kinds) if mixed else kind)
        name = rng.choice(attributes) if mixed else attribute
        fact = Fact(key, name, _value(rng, name))
        if (name in ("code", "pin", "key") or name not in LISTED) and fact.value in values:
            continue
        if (key, name) not in found and held_out(fact.question) == held:
            found[key, name] = fact
            values.add(fact.value)
        elif not mixed and len(found) >= 8 and rng.random() < 0.2:
            kind, attribute = rng.choice(kinds), rng.choice(attributes)
    return list(found.values())


def _fact_text(rng: random.Random, fact: Fact) -> str:
    wording = rng.choice(BARE_WORDINGS if fact.attribute == "value" else FACT_WORDINGS)
    return wording.format(t=fact.attribute, k=fact.key, K=fact.key[0].upper() + fact.key[1:], v=fact.value)


def notes_with(
    rng: random.Random, known: Sequence[Fact], filler: Sequence[tuple[str, int]], tokens: int
) -> tuple[str, ...]:
    """Paragraphs of about ``tokens`` tokens with the facts spread evenly, in random order.

    ``filler`` holds (paragraph, number of tokens). Some facts stand at the end of a filler paragraph, most alone.
    """
    order = list(known)
    rng.shuffle(order)
    room = tokens - 22 * len(order)
    paragraphs: list[str] = []
    sizes = 0
    if rng.random() < NOISE_SHARE:
        filler = ((NOISE, 28),)
    while sizes < room:
        text, size = rng.choice(filler)
        if size > room - sizes + 40:
            size += 1
            if sizes:
                break
        paragraphs.append(text)
        sizes += size + 2
    gaps = sorted(rng.randrange(len(paragraphs) + 1) for _ in order)
    if rng.random() < 0.7:  # even spread with jitter: every distance is asked equally often
        gaps = sorted(
            min(len(paragraphs), int((i + rng.random()) * (len(paragraphs) + 1) / len(order)))
            for i in range(len(order))
        )
    out: list[str] = []
    place = 0
    merged = rng.random() < MERGED_SHARE  # some texts have facts in the middle of their paragraphs
    for index in range(len(paragraphs) + 1):
        while place < len(order) and gaps[place] == index:
            out.append(_fact_text(rng, order[place]))
            place += 1
        if index < len(paragraphs):
            out.append(paragraphs[index])
    if not merged:
        return tuple(out)
    joint, size = rng.choice((" ", " ", "\n")), rng.randint(2, 5)
    return tuple(joint.join(out[i : i + size]) for i in range(0, len(out), size))


def ask(rng: random.Random, fact: Fact, *, bare: bool | None = None) -> tuple[str, str, str]:
    """(question, reasoning, answer); a bare answer exactly when the question asks for one."""
    question = rng.choice(QUESTION_WORDINGS).format(t=fact.attribute, k=fact.key)
    if rng.random() < 0.25 if bare is None else bare:
        question += " " + rng.choice(BARE_ENDINGS).format(t=fact.attribute)
        return question, fact.sentence, fact.value
    return question, fact.sentence, fact.sentence


def recall(
    rng: random.Random, filler: Sequence[tuple[str, int]], tokens: int, *, questions: int | None = None
) -> Dialogue:
    """A training dialogue of about ``tokens`` tokens: facts, then questions as later turns or in the same one."""
    count = rng.randint(2, max(3, min(28, tokens // 40)))
    known = facts(rng, count)
    asked = rng.sample(known, min(len(known), questions or rng.randint(1, 5 if tokens < LONG_FROM else 20)))
    notes = notes_with(rng, known, filler, max(60, tokens - 60 - QUESTION_TOKENS * len(asked)))
    thinking = rng.random() < 0.5
    messages = list(maybe_system(rng, 0.25))
    same_turn = rng.random() < 0.5
    opening = (rng.choice(INTRODUCTIONS), *notes) if rng.random() < 0.8 else notes
    if not same_turn:
        messages += [
            Message("user", opening[-1], notes=opening[:-1]),
            Message("assistant", READ_REPLY, READ_REASONING),
        ]
    for index, fact in enumerate(asked):
        question, reasoning, answer = ask(rng, fact)
        messages.append(Message("user", question, notes=opening if same_turn and index == 0 else ()))
        messages.append(Message("assistant", answer, reasoning))
    return Dialogue(
        tuple(messages), thinking, notes_weight=WEIGHT_LONG_NOTES if tokens > LONG_FROM else WEIGHT_NOTES
    )
