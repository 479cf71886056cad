"""Acceptance as users see it: counters, log lines, the metrics of an answer; real and synthetic never under one name."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashstep.request import Acceptance
from flashstep.server.metrics.acceptance import added
from tests.server.conftest import MODEL, Server

K = 3
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")  # as vLLM's dashboards read them
RUNS = [[5], [6, 7], [8], [9, 10, 11, 12], [13]]  # after the first step: 1, 0, 3 and 0 of 3 drafts stand
TOLD = {
    "mean_acceptance_length": 2.0,
    "draft_acceptance_rate": 4 / 12,
    "acceptance_histogram": [2, 1, 0, 1],
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 4,
    "num_draft_tokens": 12,
    "num_spec_tokens": K,
}
HI = [{"role": "user", "content": "hi"}]
Make = Callable[..., Server]


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Real speculation, told with every answer."""
    made = Server(
        tmp_path_factory.mktemp("real"), drafts=K, serving={"per_request_spec_decode_metrics": "summary"}
    )
    yield made
    made.stop()


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("synthetic")
    serving = {"per_request_spec_decode_metrics": "summary", "acceptance_log_s": 0.1}
    made = Server(folder, drafts=K, synthetic=True, serving=serving, log=folder / "log")
    yield made
    made.stop()


def complete(server: Server, **options: Any) -> Any:
    return server.client.completions.create(model=MODEL, prompt="x", **options)


def chat(server: Server, **options: Any) -> Any:
    return server.client.chat.completions.create(model=MODEL, messages=HI, **options)


def metrics(answer: Any) -> Any:
    return (answer.model_extra or {}).get("metrics")


def samples(server: Server) -> dict[str, float]:
    """All samples of speculation: name and labels, and the value."""
    lines = [line for line in server.get("/metrics")[1].splitlines() if "spec_decode" in line]
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")
    }


def expected_names(prefix: str) -> set[str]:
    labels = f'engine="0",model_name="{MODEL}"'
    names = {f"{prefix}_{name}_total{{{labels}}}" for name in COUNTERS}
    return names | {
        f'{prefix}_num_accepted_tokens_per_pos_total{{{labels},position="{position}"}}'
        for position in range(K)
    }


def wait_for(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not found():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)


# ---- counters ----------------------------------------------------------------------------------------------------------


def test_real_counters_bear_vllms_names(telling: Server) -> None:
    wait_for(lambda: samples(telling).keys() == expected_names("vllm:spec_decode"))
    assert "synthetic" not in telling.get("/metrics")[1].lower()


def test_synthetic_counters_bear_none_of_them(synthetic: Server) -> None:
    wait_for(lambda: samples(synthetic).keys() == expected_names("flashstep:synthetic_spec_decode"))
    text = synthetic.get("/metrics")[1]
    assert "vllm:spec_decode" not in text
    helps = [line for line in text.splitlines() if line.startswith("# HELP") and "spec_decode" in line]
    assert len(helps) == len(COUNTERS) + 1 and all(" SYNTHETIC: " in line for line in helps)


def test_an_engine_without_drafts_has_no_counters(server: Server) -> None:
    complete(server, max_tokens=2)
    assert samples(server) == {}


def test_counters_count(telling: Server) -> None:
    before = samples(telling)
    complete(telling, extra_body=telling.script("counted", RUNS))

    def moved() -> dict[str, float]:
        fresh = {name: value - before.get(name, 0.0) for name, value in samples(telling).items()}
        return {re.sub(r"\{.*?(,position=.*)?\}", r"\1", name): value for name, value in fresh.items()}

    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total,position="
    wanted = {
        "vllm:spec_decode_num_drafts_total": 4,
        "vllm:spec_decode_num_draft_tokens_total": 12,
        "vllm:spec_decode_num_accepted_tokens_total": 4,
        f'{name}"0"': 2,
        f'{name}"1"': 1,
        f'{name}"2"': 1,
    }
    wait_for(lambda: moved() == wanted)


# ---- an answer's metrics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [complete, chat])
def test_an_answer_tells_it_whole_and_streamed(telling: Server, ask: Callable[..., Any]) -> None:
    extra = telling.script("told", RUNS)
    assert metrics(ask(telling, extra_body=extra)) == {"speculative_decoding": TOLD}
    for usage in (False, True):  # in the last chunk, whether it is the usage's or the choice's
        options = {"stream_options": {"include_usage": True}} if usage else {}
        chunks = list(ask(telling, stream=True, extra_body=extra, **options))
        assert metrics(chunks[-1]) == {"speculative_decoding": TOLD}
        assert [metrics(chunk) for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert (chunks[-1].choices == []) is usage


@pytest.mark.parametrize("ask", [complete, chat])
def test_a_synthetic_answer_tells_it_under_another_name(synthetic: Server, ask: Callable[..., Any]) -> None:
    extra = synthetic.script("told", RUNS)
    assert metrics(ask(synthetic, extra_body=extra)) == {"synthetic_speculative_decoding": TOLD}
    last = list(ask(synthetic, stream=True, extra_body=extra))[-1]
    assert metrics(last) == {"synthetic_speculative_decoding": TOLD}


@pytest.mark.parametrize("usage", [False, True])
def test_choices_are_summed(telling: Server, usage: bool) -> None:
    extra = telling.script("summed", RUNS)
    twice = {name: value if "rate" in name or "mean" in name else 2 * value for name, value in TOLD.items()}
    twice |= {"acceptance_histogram": [4, 2, 0, 2], "num_spec_tokens": K}
    assert metrics(chat(telling, n=2, extra_body=extra)) == {"speculative_decoding": twice}
    prompts = telling.client.completions.create(model=MODEL, prompt=["x", "y"], extra_body=extra)
    assert metrics(prompts) == {"speculative_decoding": twice}
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = list(chat(telling, n=2, stream=True, extra_body=extra, **options))
    assert [metrics(chunk) for chunk in chunks if metrics(chunk)] == [{"speculative_decoding": twice}]
    assert metrics(chunks[-1])


def test_where_nothing_was_drafted_there_is_no_ratio(telling: Server) -> None:
    told = metrics(complete(telling, max_tokens=1))["speculative_decoding"]
    assert (told["mean_acceptance_length"], told["draft_acceptance_rate"]) == (None, None)
    assert (told["num_spec_steps"], told["acceptance_histogram"]) == (0, [0, 0, 0, 0])


@pytest.mark.parametrize("ask", [complete, chat])
def test_a_stop_string_waits_for_the_engines_count(telling: Server, ask: Callable[..., Any]) -> None:
    """The engine hears of a stop string late and counts what it has drafted by then."""
    before = telling.metric("num_preemptions_total")
    tokens = telling.tokenizer.encode("</think>one two STOP three four five six seven")
    runs = [tokens[:1], *(tokens[i : i + 2] for i in range(1, len(tokens), 2)), *[[5]] * 1000]
    extra = telling.script("stopped", runs, step_s=0.005)
    answer = ask(telling, stop="STOP", extra_body=extra)
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens < len(tokens)
    told = metrics(answer)["speculative_decoding"]
    assert told["num_spec_steps"] > 2 and told["num_accepted_draft_tokens"] > 2
    last = list(ask(telling, stream=True, stop="STOP", extra_body=extra))[-1]
    assert last.choices[0].finish_reason == "stop" and metrics(last)["speculative_decoding"]
    wait_for(lambda: telling.metric("num_preemptions_total") - before == 2)  # one abort each, not two


def test_nothing_is_told_unless_asked_for(own_server: Make) -> None:
    quiet = own_server(drafts=K)
    extra = quiet.script("quiet", RUNS)
    assert metrics(complete(quiet, extra_body=extra)) is None
    assert [metrics(chunk) for chunk in chat(quiet, stream=True, extra_body=extra) if metrics(chunk)] == []
    plain = own_server(
        serving={"per_request_spec_decode_metrics": "summary"}
    )  # asked for, and the engine does not speculate
    assert metrics(complete(plain, max_tokens=3)) is None


def test_an_engine_that_dies_while_its_last_word_is_awaited(own_server: Make) -> None:
    """The text was whole; what is not known is not told."""
    server = own_server(drafts=K, serving={"per_request_spec_decode_metrics": "summary"})
    tokens = server.tokenizer.encode("one two STOP")
    extra = server.script("dying", [tokens, [5]], step_s=30.0, dies_of_abort=True)
    answer = complete(server, stop="STOP", extra_body=extra)
    assert answer.choices[0].text == "one two " and metrics(answer) is None


# ---- sums and log lines ------------------------------------------------------------------------------------------------


def test_sums_weigh_every_step_alike() -> None:
    def counts(steps: int, accepted: int) -> Acceptance:
        return Acceptance(
            synthetic=False,
            num_tokens=1,
            steps=steps,
            draft_tokens=steps,
            accepted_tokens=accepted,
            histogram=(steps - accepted, accepted),
            per_position=(accepted,),
        )

    total = added([counts(1, 1), counts(9, 0)])
    assert total == counts(10, 1)
    assert (total.mean_length, total.rate, total.position_rates) == (1.1, 0.1, (0.1,))


def told_lines(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if "acceptance" in line]


def test_a_line_an_interval_while_something_happens(own_server: Make, tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = own_server(drafts=K, serving={"acceptance_log_s": 0.2}, log=log)
    complete(server, extra_body=server.script("logged", RUNS))
    wait_for(lambda: bool(told_lines(log)))
    (line,) = told_lines(log)
    assert re.search(
        r"INFO server acceptance mean_acceptance_length=2 draft_acceptance_rate=0\.333333 "
        r'per_position_rates="?0\.500,0\.250,0\.250"? accepted_tokens_per_s=[\d.]+ drafted_tokens_per_s=[\d.]+ '
        r"accepted_tokens=4 draft_tokens=12 steps=4$",
        line,
    ), line
    time.sleep(0.5)
    assert told_lines(log) == [line], "nothing happened, and there is another line"
    complete(server, extra_body=server.script("logged", [[5], [6, 7, 8]]))
    wait_for(lambda: len(told_lines(log)) == 2)
    assert "mean_acceptance_length=3 " in told_lines(log)[1] and "steps=1" in told_lines(log)[1]


def test_synthetic_lines_say_so(synthetic: Server) -> None:
    complete(synthetic, extra_body=synthetic.script("logged", RUNS))
    log = synthetic.scripts / "log"
    wait_for(lambda: bool(told_lines(log)))
    assert all(" SYNTHETIC acceptance " in line for line in told_lines(log))


def test_the_last_interval_is_told_at_the_end(own_server: Make, tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = own_server(drafts=K, serving={"acceptance_log_s": 600.0}, log=log)
    complete(server, extra_body=server.script("logged", RUNS))
    wait_for(lambda: sum(samples(server).values()) > 0)
    assert told_lines(log) == []
    assert server.stop() == 0
    assert len(told_lines(log)) == 1


def test_an_interval_of_zero_is_never(own_server: Make, tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = own_server(drafts=K, serving={"acceptance_log_s": 0.0}, log=log)
    complete(server, extra_body=server.script("logged", RUNS))
    assert server.stop() == 0
    assert told_lines(log) == []
