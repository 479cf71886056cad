"""The generators: a leak-free split, prompts that are the recipe's byte for byte, sums that are right, honest packing."""

import random
import re
from pathlib import Path

import deepseek_recipe
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from flashstep.config.model import ModelConfig
from flashstep.engram.token_map import TokenMap
from oracle import model as oracle
from oracle.model import N0
from train.cases import call_cases, problem_cases, recall_cases
from train.corpus import Corpus
from train.data import ALIGN, Packer, Source, draw, pack
from train.dialogue import Dialogue, Encoder, render
from train.parameters import Parameters
from train.problems import calculate, draw_problem, held_out, problem
from train.recall import facts
from train.shape import SMOKE, config_json
from train.tools import draw_sum

TOKENIZER = Path(__file__).parents[2] / "flashstep/tiny/tokenizer.json"
CORPUS = Corpus.builtin()
STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


def dialogues(count: int, tokenizer: Tokenizer, *, seed: int = 3) -> list[Dialogue]:
    rng = random.Random(seed)
    encoder = Encoder(tokenizer)
    filler = [(text, len(encoder.cached(text))) for text in CORPUS.paragraphs]
    drawn = (draw(rng, CORPUS, filler, short=i % 40 != 0, longest=1500) for i in range(count))
    return [d for d in drawn if isinstance(d, Dialogue)]


def test_training_never_meets_a_held_out_question(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    assert not any(held_out(problem(rng).question) for _ in range(1500))
    assert not any(held_out(fact.question) for _ in range(60) for fact in facts(rng, 12))
    assert not any(held_out(draw_sum(rng, held=False, single=False).expression) for _ in range(1500))
    assert all(held_out(c.dialogue.messages[-2].content) for c in problem_cases(40))
    trained = {m.content for d in dialogues(800, tokenizer) for m in d.messages if m.role == "user"}
    assert not trained & {c.dialogue.messages[-2].content for c in problem_cases(200)}


def test_the_split_is_a_sixteenth_and_the_same_in_every_process() -> None:
    share = np.mean([held_out(f"question {i}") for i in range(8000)])
    assert 0.05 < share < 0.075
    assert [held_out(f"question {i}") for i in (27, 28, 29)] == [
        held_out(f"question {i}") for i in (27, 28, 29)
    ]


def test_prompts_are_the_recipes_byte_for_byte(tokenizer: Tokenizer) -> None:
    recipe_tokenizer = deepseek_recipe.Tokenizer.from_file(str(TOKENIZER))
    encoding = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(recipe_tokenizer)
    encoder = Encoder(tokenizer)
    kinds = set()
    for dialogue in dialogues(400, tokenizer):
        kinds.add(
            (dialogue.thinking, bool(dialogue.tools), dialogue.messages[0].role, len(dialogue.messages) > 3)
        )
        request = deepseek_recipe.ChatCompletionRequest(dialogue.request())
        conversation = request.convert(deepseek_recipe.ConversionOptions()).conversation
        pieces = render(dialogue)
        assert "".join(p.text for p in pieces[:-1]) == encoding.render_conversation(conversation).prompt
        assert encoder.prompt_and_answer(pieces)[0] == encoding.encode(conversation)
    assert len(kinds) == 16, (
        "a combination of thinking, tools, system text and turns is missing from the sample"
    )


def test_every_worked_step_is_right() -> None:
    rng = random.Random(2)
    for _ in range(3000):
        p = draw_problem(rng)
        steps = STEP.findall(p.reasoning)
        assert len(steps) == 2, p
        for left, op, right, result in steps:
            assert calculate(int(left), op, int(right)) == int(result) >= 0, p
        assert p.answer.split()[3] == steps[1][3]
        assert set(re.findall(r"\d+", p.question)) >= {steps[0][0], steps[0][2]}, p


def test_the_answer_of_a_question_is_a_function_of_the_prompt(tokenizer: Tokenizer) -> None:
    known: dict[tuple[object, ...], str] = {}
    for dialogue in dialogues(3000, tokenizer, seed=9):
        if dialogue.tools or any(m.notes for m in dialogue.messages):
            continue
        first = next(i for i, m in enumerate(dialogue.messages) if m.role == "user")
        key = (dialogue.messages[first].content, dialogue.thinking and first + 2 == len(dialogue.messages))
        answer = dialogue.messages[first + 1]
        text = f"{answer.reasoning}|{answer.content}"
        assert known.setdefault(key, text) == text, key


def test_recall_prompts_have_their_length_and_hold_their_fact(tokenizer: Tokenizer) -> None:
    encoder = Encoder(tokenizer)
    for case in recall_cases(12, tokenizer, CORPUS, length=900):
        prompt, _ = encoder.prompt_and_answer(render(case.dialogue))
        assert 900 - 40 <= len(prompt) <= 900
        assert case.value in "".join(case.dialogue.messages[-2].notes)
        assert case.value in case.dialogue.messages[-1].content
        assert 0 < case.distance < 900


def test_call_cases_offer_the_tool_they_expect() -> None:
    for case in call_cases(40):
        call = case.dialogue.messages[-1].calls[0]
        tool = next(t for t in case.dialogue.tools if t["name"] == case.value == call.name)
        assert list(call.arguments) == list(tool["parameters"]["properties"])


def test_batches_are_packed_aligned_and_weighted(tokenizer: Tokenizer) -> None:
    packer = Packer(Source(CORPUS, tokenizer, seed=4, short=True, row=768), 3)
    batch = packer.batch()
    again = Packer(Source(CORPUS, tokenizer, seed=4, short=True, row=768), 3).batch()
    assert (batch.ids == again.ids).all() and (batch.weight == again.weight).all()
    assert (batch.document % 2 == 0).mean() > 0.85
    starts = np.argwhere((batch.ids == 0) & (batch.document % 2 == 0))
    assert len(starts) > 3 and (starts[:, 1] % ALIGN == 0).all()
    following = np.roll(batch.document, -1, axis=1)
    crossing = (following != batch.document) | (batch.document % 2 == 1)
    assert (batch.weight[crossing] == 0).all(), "a document would learn to predict its neighbour"


def test_packed_documents_compute_as_alone(tokenizer: Tokenizer) -> None:
    config = ModelConfig.parse(config_json(tokenizer, SMOKE))
    weights = Parameters(config, seed=1, device=torch.device("cpu"))
    named = weights.named(weights.values(quantised=False))
    token_map = torch.tensor(TokenMap.build(tokenizer).ids)
    encoder = Encoder(tokenizer)
    documents = [encoder.document(render(d)) for d in dialogues(9, tokenizer, seed=7)]
    documents = [d for d in documents if len(d[0]) <= 250][:4]
    batch = pack(documents, 1, -(-sum(len(d[0]) + ALIGN for d in documents) // 16) * 16)

    def logits(ids: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out = oracle.forward(config, named, ids, numerics=N0, token_map=token_map, documents_BT=owner)
        assert out.logits_BTV is not None
        return out.logits_BTV

    packed = logits(torch.from_numpy(batch.ids), torch.from_numpy(batch.document))
    for number, (ids, _) in enumerate(documents):
        place = batch.document[0] == 2 * number
        alone = logits(torch.tensor([ids]), torch.zeros(1, len(ids), dtype=torch.int64))
        assert torch.allclose(packed[0][torch.from_numpy(place)], alone[0], atol=1e-5)
