"""The three scores: judged strictly, over real HTTP, and by teacher forcing; and the shipped weights reach them."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress
from tokenizers import Tokenizer
from torch import Tensor

from oracle import checkpoint
from oracle import model as oracle
from train.cases import Case, call_cases, problem_cases, recall_cases
from train.corpus import Corpus
from train.dialogue import Encoder
from train.evaluate import (
    call_exact,
    call_well_formed,
    measure,
    number_right,
    served_model,
    value_right,
    wilson,
)
from train.score import pack_cases, score

TINY = Path(__file__).parents[2] / "flashstep/tiny"


def reference(case: Case) -> dict[str, Any]:
    """The message of a perfect server."""
    answer = case.dialogue.messages[-1]
    calls = [
        {"type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
        for c in answer.calls
    ]
    return {"role": "assistant", "content": answer.content or None, "tool_calls": calls}


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    return problem_cases(4) + call_cases(4) + recall_cases(4, tokenizer, Corpus.builtin(), length=600)


@pytest.fixture
def url(cases: list[Case]) -> Iterator[str]:
    answers = {json.dumps(case.dialogue.request()["messages"]): reference(case) for case in cases}

    class Perfect(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"data": [{"id": "perfect"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["temperature"] == 0 and body["model"] == "perfect"
            self._send({"choices": [{"message": answers[json.dumps(body["messages"])]}]})

        def _send(self, data: dict[str, Any]) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(data).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Perfect)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_perfect_server_gets_full_marks(cases: list[Case], url: str) -> None:
    judges = {"problem": number_right, "recall": value_right, "call": call_exact}
    with Progress(disable=True) as progress:
        answers = measure(url, cases, model=served_model(url), parallel=3, progress=progress)
    assert all(judges[case.kind](case, answer) for case, answer in zip(cases, answers, strict=True))


def test_judges_are_strict(cases: list[Case]) -> None:
    problem, call, fact = cases[0], cases[4], cases[8]
    assert not number_right(problem, {"content": f"{problem.value} or {int(problem.value) + 1}"})
    assert not number_right(problem, {"content": None})
    assert not value_right(fact, {"content": f"{fact.value}1"})
    good = reference(call)
    name, arguments = (
        good["tool_calls"][0]["function"]["name"],
        json.loads(good["tool_calls"][0]["function"]["arguments"]),
    )

    def message(name: str, text: str) -> dict[str, Any]:
        return {"tool_calls": [{"function": {"name": name, "arguments": text}}]}

    wrong = dict.fromkeys(arguments, "1 + 1")
    assert call_well_formed(call, message(name, json.dumps(wrong))) and not call_exact(
        call, message(name, json.dumps(wrong))
    )
    assert not call_well_formed(call, message("other", json.dumps(arguments)))
    assert not call_well_formed(call, message(name, "{broken"))
    assert not call_well_formed(call, {"content": "12"})
    assert not call_well_formed(call, {"tool_calls": good["tool_calls"] * 2})


def test_interval() -> None:
    low, high = wilson(30, 30)
    assert high == 1 and 0.88 < low < 0.9
    assert wilson(0, 0) == (0.0, 1.0)


def test_teacher_forcing_marks_each_case(cases: list[Case]) -> None:
    encoder = Encoder(Tokenizer.from_file(str(TINY / "tokenizer.json")))
    batches, places = pack_cases(cases, encoder, rows=2, row=768)

    def knows(ids: Tensor, _: Tensor) -> Tensor:
        best = torch.nn.functional.one_hot(ids.roll(-1, 1), 2048).float()
        best[0, places[0].end - 1] = 0  # the last token of the first case
        return best

    result = score(batches, places, knows, torch.device("cpu"))
    assert result.exact == (False, *(True for _ in cases[1:]))
    assert 0.9 < result.tokens < 1


def test_the_shipped_weights_are_trained_and_small() -> None:
    """A few held-out cases of each kind through the oracle at tier N2 (the scores proper: the model card)."""
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 20e6  # with the draft
    shipped = checkpoint.load(TINY)
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    chosen = problem_cases(3) + call_cases(2) + recall_cases(1, tokenizer, Corpus.builtin(), length=600)
    batches, places = pack_cases(chosen, Encoder(tokenizer), rows=1, row=768)

    def forward(ids: Tensor, documents: Tensor) -> Tensor:
        with torch.no_grad():
            out = oracle.forward(
                shipped.config,
                shipped.weights,
                ids,
                numerics=oracle.N2,
                token_map=shipped.token_map,
                documents_BT=documents,
            )
        assert out.logits_BTV is not None
        return out.logits_BTV

    result = score(batches, places, forward, torch.device("cpu"))
    assert sum(result.exact) >= 5, str(result)
