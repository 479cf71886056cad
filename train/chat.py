"""Small talk, facts, definitions, and the honest answer to what the model does not know: each a function of the question."""

import random
from collections.abc import Sequence

from train.dialogue import Dialogue, Message
from train.facts import DEFINITIONS, QUESTIONS, UNKNOWN, UNKNOWN_ANSWER, UNKNOWN_REASONING
from train.problems import maybe_system
from train.recall import invented, word
from train.words import ANIMAL_SOUNDS, CAPITALS, DAYS, LEGS, MONTHS, OPPOSITES, SMALL_TALK, THING_COLOURS


def small_talk(rng: random.Random) -> tuple[str, str, str]:
    """(question, reasoning, answer) of a greeting or other fixed exchange, with small changes of spelling."""
    wordings, reasoning, answer = rng.choice(SMALL_TALK)
    asked = rng.choice(wordings)
    roll = rng.random()
    if roll < 0.1:
        asked = asked.lower()
    elif roll < 0.15:
        asked = asked.rstrip(".!?")
    elif roll < 0.2 and not asked.lower().startswith(("hello", "hi", "hey", "good")):
        asked = "Hello! " + asked
    return asked, reasoning, answer


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _geography(rng: random.Random) -> tuple[str, str]:
    country, city = rng.choice(list(CAPITALS.items()))
    if rng.random() < 0.2:
        country, city = rng.choice(
            (
                ("France", "Paris"),
                ("Italy", "Rome"),
                ("Japan", "Tokyo"),
                ("Germany", "Berlin"),
                ("Spain", "Madrid"),
            )
        )
    wordings = (
        "What is the capital of {c}?",
        "Which city is the capital of {c}?",
        "Name the capital of {c}.",
        "Tell me the capital of {c}.",
        "Capital of {c}?",
    )
    return rng.choice(wordings).format(c=country), f"The capital of {country} is {city}."


def _calendar(rng: random.Random) -> tuple[str, str]:
    names, kind = rng.choice(((DAYS, "day"), (MONTHS, "month")))
    index = rng.randrange(len(names))
    step, word = rng.choice(((1, "after"), (-1, "before")))
    other = names[(index + step) % len(names)]
    return (
        rng.choice((f"What {kind} comes {word} {names[index]}?", f"Which {kind} is {word} {names[index]}?")),
        f"{other} comes {word} {names[index]}.",
    )


def _small_fact(rng: random.Random) -> tuple[str, str]:
    roll = rng.randrange(5)
    if roll == 0:
        thing, colour = rng.choice(list(THING_COLOURS.items()))
        question = rng.choice(
            (f"What colour is {thing}?", f"What color is {thing}?", f"Which colour does {thing} have?")
        )
        return question, f"{_upper(thing)} is {colour}."
    if roll == 1:
        animal, sound = rng.choice(list(ANIMAL_SOUNDS.items()))
        article = "an" if animal[0] in "aeiou" else "a"
        return f"What does {article} {animal} do?", f"{_upper(article)} {animal} {sound}."
    if roll == 2:
        animal, legs = rng.choice(list(LEGS.items()))
        article = "an" if animal[0] in "aeiou" else "a"
        return f"How many legs does {article} {animal} have?", f"{_upper(article)} {animal} has {legs} legs."
    a = rng.randint(1, 99)
    b = rng.randint(1, 99)
    if roll == 3 and a != b:
        question = rng.choice((f"Which is larger, {a} or {b}?", f"Which number is larger: {a} or {b}?"))
        return question, f"{max(a, b)} is larger than {min(a, b)}."
    return f"Is {a} even or odd?", f"{a} is {'odd' if a % 2 else 'even'}."


def _beyond(rng: random.Random) -> str:
    """A word that the model has no definition of."""
    while (w := word(rng)) in DEFINITIONS:
        pass
    return w


def unknown(rng: random.Random) -> tuple[str, str, str]:
    """A question beyond the model, and the honest answer."""
    w, v = _beyond(rng), _beyond(rng)
    roll = rng.random()
    if roll < 0.08:
        return f"What is the capital of {w.capitalize()}?", UNKNOWN_REASONING, UNKNOWN_ANSWER
    if roll < 0.25:
        wordings = ("What is {a} {w}?", "What does {w} mean?", "Define {w}.", "Explain the word {w}.")
        w = invented(rng) if rng.random() < 0.5 else w
        return (
            rng.choice(wordings).format(a="an" if w[0] in "aeiou" else "a", w=w),
            UNKNOWN_REASONING,
            UNKNOWN_ANSWER,
        )
    question = rng.choice(UNKNOWN).format(w=w, v=v, W=w.capitalize(), V=v.capitalize())
    return question, UNKNOWN_REASONING, UNKNOWN_ANSWER


def fact(rng: random.Random, glosses: Sequence[tuple[str, str]]) -> tuple[str, str, str]:
    """(question, reasoning, answer) of a fact; the reasoning names what is asked."""
    roll = rng.random()
    if roll < 0.1:
        wordings, answer = rng.choice(QUESTIONS)
        return rng.choice(wordings), "The user asks a simple question.", answer
    if roll < 0.3:
        question, answer = _geography(rng)
        return question, "The user asks for a capital.", answer
    if roll < 0.45:
        word, other = rng.choice(list(OPPOSITES.items()))
        wordings = (
            "What is the opposite of {w}?",
            "Tell me the opposite of {w}.",
            "Opposite of {w}?",
            'What is the opposite of "{w}"?',
        )
        return (
            rng.choice(wordings).format(w=word),
            "The user asks for an opposite.",
            f"The opposite of {word} is {other}.",
        )
    if roll < 0.57:
        question, answer = _calendar(rng)
        return question, "The user asks about the calendar.", answer
    if roll < 0.75:
        question, answer = _small_fact(rng)
        return question, "The user asks a simple question.", answer
    own = [pair for pair in glosses[:100] if pair[0] not in DEFINITIONS]
    term, gloss = rng.choice(list(DEFINITIONS.items())) if rng.random() < 0.6 else rng.choice(own or glosses)
    article = "an" if term[0] in "aeiou" else "a"
    wordings = (
        "What is {a} {w}?",
        "What does {w} mean?",
        "Define {w}.",
        "Explain the word {w}.",
        "What is {a} {w}",
        "Tell me what {a} {w} is.",
    )
    return (
        rng.choice(wordings).format(a=article, w=term),
        "The user asks for a definition.",
        f"{_upper(article)} {term} is {gloss}.",
    )


def chat(rng: random.Random, glosses: Sequence[tuple[str, str]]) -> Dialogue:
    """One to four turns of small talk and facts."""
    messages = list(maybe_system(rng))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        roll = rng.random()
        question, reasoning, answer = (
            small_talk(rng) if roll < 0.35 else unknown(rng) if roll < 0.55 else fact(rng, glosses)
        )
        messages += [Message("user", question), Message("assistant", answer, reasoning)]
    return Dialogue(tuple(messages), rng.random() < 0.6)
