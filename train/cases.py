"""Held-out test cases of the three scores: word problems, recall at a given length, calculator calls.

A case is a dialogue whose last message is the reference answer; the same cases serve the HTTP evaluation
(``train.evaluate``) and teacher-forced scoring (``train.score``). Fixed seeds give fixed cases.
"""

import dataclasses
import random

from tokenizers import Tokenizer

from train.corpus import Corpus
from train.dialogue import Dialogue, Encoder, Message, render
from train.problems import maybe_system, word_problem
from train.recall import INTRODUCTIONS, ask, facts, notes_with
from train.tools import calculator

FACTS_PER_NOTES = 24
QUESTIONS_PER_NOTES = 6
SLACK = 24  # tokens by which a recall prompt may fall short of the asked length


@dataclasses.dataclass(frozen=True)
class Case:
    """``kind`` is problem, recall or call; ``value`` what the answer must contain; ``distance`` tokens from fact to end."""

    kind: str
    dialogue: Dialogue
    value: str
    distance: int = 0


def problem_cases(count: int, *, seed: int = 1) -> list[Case]:
    """Held-out two-step problems with thinking on; ``value`` is the number."""
    rng = random.Random(f"problem {seed}")
    cases = []
    for _ in range(count):
        dialogue = word_problem(rng, held=True, thinking=True)
        cases.append(Case("problem", dialogue, dialogue.messages[-1].content.split()[3]))
    return cases


def call_cases(count: int, *, seed: int = 1) -> list[Case]:
    """Held-out computations with a calculator offered; ``value`` is the expected tool's name."""
    rng = random.Random(f"call {seed}")
    cases = []
    for _ in range(count):
        dialogue = calculator(rng, held=True, simple=True)
        cases.append(Case("call", dialogue, dialogue.messages[-1].calls[0].name))
    return cases


def filler_of(corpus: Corpus, encoder: Encoder, *, limit: int = 4000, seed: int = 5) -> list[tuple[str, int]]:
    """(paragraph, tokens) of a random part of the corpus."""
    chosen = random.Random(seed).sample(corpus.paragraphs, min(limit, len(corpus.paragraphs)))
    return [(text, len(encoder.cached(text))) for text in chosen]


def recall_cases(
    count: int, tokenizer: Tokenizer, corpus: Corpus, *, length: int = 4096, seed: int = 1
) -> list[Case]:
    """Held-out facts in notes such that each prompt has ``length`` tokens (at most ``SLACK`` fewer)."""
    rng = random.Random(f"recall {length} {seed}")
    encoder = Encoder(tokenizer)
    filler = filler_of(corpus, encoder)
    cases: list[Case] = []
    while len(cases) < count:
        cases += _recall_group(rng, encoder, filler, length)
    return cases[:count]


def _recall_group(
    rng: random.Random, encoder: Encoder, filler: list[tuple[str, int]], length: int
) -> list[Case]:
    """Questions about one text, half of them in the notes' own turn, half as a second turn."""
    known = facts(rng, max(4, min(FACTS_PER_NOTES, length // 60)), held=True)
    notes = [rng.choice(INTRODUCTIONS), *notes_with(rng, known, filler, length - 120)]
    thinking = rng.random() < 0.5
    system = maybe_system(rng, 0.25)
    asked = [(fact, *ask(rng, fact)) for fact in rng.sample(known, min(QUESTIONS_PER_NOTES, len(known)))]
    short = [item for item in filler if item[1] < 40] or filler
    cases = []
    for fact, question, reasoning, answer in asked:
        while True:  # grow or shrink the notes at a random place that holds no fact, until the length is met
            messages = (
                *system,
                Message("user", question, notes=tuple(notes)),
                Message("assistant", answer, reasoning),
            )
            dialogue = Dialogue(messages, thinking)
            prompt, _ = encoder.prompt_and_answer(render(dialogue))
            free = [i for i in range(1, len(notes)) if not any(f.value in notes[i] for f in known)]
            if len(prompt) > length:
                assert free, "the facts alone exceed the length"
                del notes[rng.choice(free)]
            elif len(prompt) < length - SLACK:
                room = length - len(prompt) - 2
                fitting = [text for text, size in short if size <= room]
                if not fitting:
                    break
                notes.insert(rng.randrange(1, len(notes) + 1), rng.choice(fitting))
            else:
                break
        index = next(
            i for i, text in enumerate(notes) if fact.key.lower() in text.lower() and fact.value in text
        )
        behind = sum(len(encoder.cached(text)) + 2 for text in notes[index:])
        cases.append(Case("recall", dialogue, fact.value, behind))
    return cases
