"""Files of questions: the public form, the shipped sets, and everything that is wrong with a file at once."""

import json
from pathlib import Path

import pytest

from flashstep.bench.quality.extract import Rule
from flashstep.bench.quality.prompts import Plan, body, chosen, messages, request_seed, text
from flashstep.bench.quality.questions import FOLDER, SHIPPED, QuestionSet, read
from train.problems import held_out
from train.questions import sets

PUBLIC = [
    {
        "question": "Natalia sold 48 clips, then half as many. How many?",
        "answer": "48/2 = <<48/2=24>>24\n#### 72",
    },
    {"question": "A robe takes 2 bolts and half that much white. How many?", "answer": "2+1=3\n#### 3"},
    {"question": "What is 1000 + 234?", "answer": "#### 1,234", "level": "easy"},
]


def written(folder: Path, lines: list[object], name: str = "set.jsonl") -> str:
    file = folder / name
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def test_public_gsm8k_is_read_as_it_is(tmp_path: Path) -> None:
    found = read(written(tmp_path, PUBLIC))
    assert found.rule is Rule.NUMBER and found.name == "set"
    assert [(q.id, q.expected) for q in found.questions] == [("1", "72"), ("2", "3"), ("3", "1,234")]
    assert found.digest == read(written(tmp_path, PUBLIC)).digest
    assert found.digest != read(written(tmp_path, PUBLIC[:2])).digest


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    lines: list[object] = [
        PUBLIC[0],
        {"question": "no answer"},
        {"question": "a word", "answer": "blue"},
        {"question": " ", "answer": "1"},
        "text",
        {"question": "x", "answer": "1", "id": "7"},
        {"question": "y", "answer": "1", "id": "7"},
    ]
    with pytest.raises(ValueError, match="no file of questions") as caught:
        read(written(tmp_path, lines))
    told = str(caught.value)
    assert all(f"line {n}: " in told for n in (2, 3, 4, 5)) and "id 7 stands 2 times" in told
    assert "line 1:" not in told
    with pytest.raises(ValueError, match="it is empty"):
        read(written(tmp_path, []))
    with pytest.raises(ValueError, match="give a file of JSON lines or one of word-problems, recall, calls"):
        read("gsm9k")


def test_a_file_of_another_form_says_which_is_wanted(tmp_path: Path) -> None:
    lines = "".join(json.dumps(line) + "\n" for line in PUBLIC)
    file = tmp_path / "set.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + lines.encode())  # as some editors begin UTF-8
    assert [q.expected for q in read(str(file)).questions] == ["72", "3", "1,234"]
    others = {
        "it is UTF-16": lines.encode("utf-16"),
        "it is a JSON array": json.dumps(PUBLIC).encode(),
        "over several lines": json.dumps(PUBLIC[0], indent=1).encode(),
        "line 1 is no UTF-8": '{"question": "caf\xe9"}'.encode("latin-1"),
    }
    for words, data in others.items():
        file.write_bytes(data)
        with pytest.raises(ValueError, match=words) as caught:
            read(str(file))
        assert '{"question": "...", "answer": "..."} on each line' in str(caught.value)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_sets_are_whole(name: str) -> None:
    found = read(name)
    assert found.rule is SHIPPED[name]
    assert len(found.questions) >= 60
    assert len({q.question for q in found.questions}) == len(found.questions)
    assert (FOLDER / f"{name}.jsonl").stat().st_size < 100_000


def test_shipped_sets_are_what_the_generators_make_held_out() -> None:
    for name, lines in sets().items():
        file = FOLDER / f"{name}.jsonl"
        assert [json.loads(line) for line in file.read_text().splitlines()] == lines
    assert all(held_out(q.question) for q in read("word-problems").questions)


def a_set(tmp_path: Path) -> QuestionSet:
    return read(written(tmp_path, PUBLIC))


def test_examples_are_not_asked(tmp_path: Path) -> None:
    found = a_set(tmp_path)
    asked = chosen(found, Plan(num_fewshot=2), None)
    assert [q.id for q in asked.examples] == ["1", "2"] and [q.id for q in asked.questions] == ["3"]
    other = read(written(tmp_path, PUBLIC[:1], "other.jsonl"))
    asked = chosen(found, Plan(num_fewshot=1, limit=2), other)
    assert [q.id for q in asked.questions] == ["1", "2"]
    with pytest.raises(ValueError, match="none is left to ask"):
        chosen(found, Plan(num_fewshot=3), None)
    with pytest.raises(ValueError, match="other has 1 questions"):
        chosen(found, Plan(num_fewshot=2), other)
    with pytest.raises(ValueError, match="calls offers tools"):
        chosen(read("calls"), Plan(api="completions"), None)


def test_prompts(tmp_path: Path) -> None:
    found = a_set(tmp_path)
    asked = chosen(found, Plan(num_fewshot=1, limit=1), None)
    (question,) = asked.questions
    assert [turn["role"] for turn in messages(question, asked.examples)] == ["user", "assistant", "user"]
    assert text(question, asked.examples) == (
        f"Question: {PUBLIC[0]['question']}\nAnswer: {PUBLIC[0]['answer']}\n\nQuestion: {question.question}\nAnswer:"
    )
    chat = body(question, asked, Plan(thinking=False, seed=3), run=1, model="m")
    assert chat["chat_template_kwargs"] == {"thinking": False} and "stop" not in chat
    assert chat["seed"] == request_seed(Plan(seed=4), 0, "2") != request_seed(Plan(seed=4), 0, "3")
    assert 0 <= chat["seed"] < 2**31
    completion = body(question, asked, Plan(api="completions"), run=0, model="m")
    assert completion["stop"] == ["Question:"] and "messages" not in completion


def test_a_plan_says_all_that_is_wrong() -> None:
    wrong = Plan(
        api="completions", runs=0, top_p=0, temperature=float("nan"), limit=0, thinking=True
    ).problems()
    assert [problem.split()[0] for problem in wrong] == [
        "--runs",
        "--temperature",
        "--top-p",
        "--limit",
        "--thinking",
    ]
