"""/metrics as Prometheus reads it: names, types, labels and edges of F30 to F33, and values against what the answers said."""

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from flashstep.ipc.messages import Ready, Stats
from flashstep.server.metrics.engine import NOTHING
from flashstep.server.metrics.outcome import Outcome, child_id
from flashstep.server.metrics.registry import Metrics
from tests.e2e.serving import await_that
from tests.server.conftest import MODEL, Server

COMMON = frozenset({"model_name", "engine"})
# name: type, and the labels beside COMMON
GAUGES = {
    "num_requests_running": (),
    "num_requests_waiting": (),
    "num_requests_waiting_by_reason": ("reason",),
    "kv_cache_usage_perc": (),
    "engine_sleep_state": ("sleep_state",),
    "lora_requests_info": ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    "cache_config_info": ("block_size", "enable_prefix_caching", "hit_policy", "num_gpu_blocks"),
}
COUNTERS = {
    "prefix_cache_queries": (),
    "prefix_cache_hits": (),
    "external_prefix_cache_queries": (),
    "external_prefix_cache_hits": (),
    "mm_cache_queries": (),
    "mm_cache_hits": (),
    "num_preemptions": (),
    "prompt_tokens": (),
    "prompt_tokens_by_source": ("source",),
    "prompt_tokens_cached": (),
    "prompt_tokens_cached_by_source": ("source",),
    "prompt_tokens_recomputed": (),
    "generation_tokens": (),
    "request_success": ("finished_reason",),
}
HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "iteration_tokens_total",
    "request_prefill_kv_computed_tokens",
    "request_num_preemptions",
}
OTHERS = {"process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds", "python_info"}
TTFT = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
ITL = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
STEP = "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384"
FINE = ".00025 .0005 .001 .002 .004 .006 .008"


def families(server: Server) -> dict[str, Metric]:
    return {one.name: one for one in text_string_to_metric_families(server.get("/metrics")[1])}


def labels(family: Metric) -> set[frozenset[str]]:
    return {frozenset(sample.labels) - {"le"} for sample in family.samples}


def edges(family: Metric) -> list[float]:
    return [float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels][:-1]


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]


def test_names_types_and_labels(server: Server) -> None:
    found = families(server)
    for kind, table in (("gauge", GAUGES), ("counter", COUNTERS)):
        for name, more in table.items():
            family = found[f"vllm:{name}"]
            assert family.type == kind, name
            assert labels(family) == {COMMON | set(more)}, name
            assert family.documentation
    for name in HISTOGRAMS:
        family = found[f"vllm:{name}"]
        assert (family.type, labels(family)) == ("histogram", {COMMON}), name
    rejections = found["vllm:admission_rejections"]
    assert (rejections.type, labels(rejections)) == ("counter", {frozenset({"model_name", "reason"})})
    assert found.keys() >= OTHERS
    for name, family in found.items():
        for sample in family.samples:
            assert not name.startswith("vllm:") or sample.labels["model_name"] == MODEL


def test_label_values(server: Server) -> None:
    found = families(server)

    def values(name: str, label: str) -> set[str]:
        return {sample.labels[label] for sample in found[f"vllm:{name}"].samples}

    assert values("num_requests_waiting_by_reason", "reason") == {"capacity", "deferred"}
    assert values("engine_sleep_state", "sleep_state") == {"awake", "weights_offloaded", "discard_all"}
    assert values("request_success", "finished_reason") == {"stop", "length", "abort", "error"}
    sources = {"local_compute", "local_cache_hit", "external_kv_transfer"}
    assert values("prompt_tokens_by_source", "source") == sources
    places = {"device", "host", "disk", "p2p", "external_unspecified"}
    assert values("prompt_tokens_cached_by_source", "source") == places
    assert server.metric("engine_sleep_state", sleep_state="awake") == 1


def test_old_edges_and_finer_ones(server: Server) -> None:
    found = families(server)
    assert edges(found["vllm:time_to_first_token_seconds"]) == numbers(TTFT)
    for name in ("inter_token_latency_seconds", "request_time_per_output_token_seconds"):
        assert edges(found[f"vllm:{name}"]) == numbers(f"{FINE} {ITL}")
    assert edges(found["vllm:iteration_tokens_total"]) == numbers(STEP)
    latency = edges(found["vllm:e2e_request_latency_seconds"])
    assert (latency[0], latency[-1]) == (0.3, 7680)


SUMS = {
    "request_prompt_tokens_sum": {},
    "request_generation_tokens_sum": {},
    "request_prefill_kv_computed_tokens_sum": {},
    "request_max_num_generation_tokens_sum": {},
    "request_params_max_tokens_sum": {},
    "request_params_n_sum": {},
    "request_params_n_count": {},
    "e2e_request_latency_seconds_count": {},
    "request_queue_time_seconds_count": {},
    "request_inference_time_seconds_count": {},
    "time_to_first_token_seconds_count": {},
    "inter_token_latency_seconds_count": {},
}
REASONS = ("stop", "length", "abort", "error")


class Change:
    """What metrics grew by since this was made."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        told = {name: self._server.metric(name) for name in SUMS}
        reasons = {
            reason: self._server.metric("request_success_total", finished_reason=reason) for reason in REASONS
        }
        return told | reasons

    def of(self, *names: str) -> list[int]:
        now = self._read()
        return [round(now[name] - self._before[name]) for name in names]

    def reasons(self) -> dict[str, int]:
        counts = zip(REASONS, self.of(*REASONS), strict=True)
        return {reason: count for reason, count in counts if count}


def complete(server: Server, script: dict[str, str], **options: Any) -> Any:
    return server.client.completions.create(model=MODEL, prompt="hello", extra_body=script, **options)


def test_sums_are_those_of_the_answers(server: Server) -> None:
    change = Change(server)
    one = complete(server, server.script("sum_stop", [[5], [6], [7, 8]], cached=1), max_tokens=9)
    two = complete(server, server.script("sum_length", [[5], [6]], finish="length"), max_tokens=2)
    streamed = list(
        complete(
            server,
            server.script("sum_stream", "a b STOP c"),
            max_tokens=20,
            stop="STOP",
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    usages = [one.usage, two.usage, streamed[-1].usage]
    prompt = sum(usage.prompt_tokens for usage in usages)
    assert change.of("request_prompt_tokens_sum", "request_prefill_kv_computed_tokens_sum") == [
        prompt,
        prompt - 1,
    ]
    assert change.of("request_generation_tokens_sum") == [sum(usage.completion_tokens for usage in usages)]
    assert change.of("request_params_max_tokens_sum") == [9 + 2 + 20]
    assert change.reasons() == {"stop": 2, "length": 1}
    counts = ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds")
    assert change.of(*(f"{name}_count" for name in counts)) == [3, 3, 3]


def test_n_choices_are_n_requests_and_one_prompt(server: Server) -> None:
    change = Change(server)
    answer = complete(server, server.script("n_three", [[5], [6]]), max_tokens=9, n=3)
    assert change.of("request_generation_tokens_sum") == [answer.usage.completion_tokens] == [6]
    assert change.of("request_prompt_tokens_sum") == [3 * answer.usage.prompt_tokens]
    assert change.of("request_params_n_count", "request_params_n_sum") == [1, 3]
    assert change.of("request_max_num_generation_tokens_sum") == [2]
    assert change.reasons() == {"stop": 3}


@pytest.mark.parametrize("api", ["chat/completions", "responses", "messages"])
def test_every_api_is_counted(server: Server, api: str) -> None:
    change = Change(server)
    talk = [{"role": "user", "content": "hi"}]
    body = {"input": "hi"} if api == "responses" else {"messages": talk, "max_tokens": 20}
    script = server.script("api", "hm</think>Yes, it is.", finish="stop")
    status, answer = server.post(f"/v1/{api}", {"model": MODEL} | body | script)
    assert status == 200
    usage = answer["usage"]
    told = usage["completion_tokens"] if api == "chat/completions" else usage["output_tokens"]
    assert change.of("request_generation_tokens_sum") == [told]
    assert change.reasons() == {"stop": 1}


def test_what_is_aborted_is_no_latency(server: Server) -> None:
    change = Change(server)
    stream = complete(
        server, server.script("abort", [[5]] * 400, step_s=0.01), max_tokens=400, n=2, stream=True
    )
    next(iter(stream))
    stream.close()
    await_that(lambda: change.reasons() == {"abort": 2})
    names = ("e2e_request_latency_seconds_count", "request_generation_tokens_sum", "request_params_n_count")
    assert change.of(*names) == [0, 0, 0]
    assert change.of("time_to_first_token_seconds_count")[0] >= 1, "the wait was as it was"


@pytest.mark.parametrize(
    ("finish", "error"), [("error", openai.InternalServerError), ("reject", openai.BadRequestError)]
)
def test_what_fails_is_an_error(server: Server, finish: str, error: type[Exception]) -> None:
    change = Change(server)
    with pytest.raises(error):
        complete(server, server.script(f"fails_{finish}", [[5]], finish=finish), max_tokens=9)
    assert change.reasons() == {"error": 1}
    assert change.of("e2e_request_latency_seconds_count") == [0]


def test_a_dying_engine_is_an_error_of_each_request(own_server: Callable[..., Server]) -> None:
    server = own_server()
    change = Change(server)
    script = server.script("dies", [[5]] * 400, step_s=0.01)

    def ask() -> None:
        with pytest.raises(openai.APIStatusError):
            complete(server, script, max_tokens=400)

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    await_that(lambda: server.metric("num_requests_running") == 3)
    server.kill_engine()
    for thread in asking:
        thread.join()
    assert change.reasons() == {"error": 3}


def test_what_is_turned_away_is_counted_apart(own_server: Callable[..., Server]) -> None:
    server = own_server(serving={"max_num_queued_reqs": 1})
    held = complete(server, server.script("held", [[5]] * 400, step_s=0.01), max_tokens=400, stream=True)
    next(iter(held))
    with pytest.raises(openai.APIStatusError, match="full"):
        complete(server, {}, max_tokens=1)
    held.close()
    assert server.metric("admission_rejections_total", reason="max_num_queued_reqs") == 1


# ---- without a server -------------------------------------------------------------------------------------------------


def metrics(stats: Stats | None = None) -> Metrics:
    ready = Ready(
        max_model_len=8,
        max_num_seqs=1,
        num_blocks=3,
        block_size=2,
        hit_policy="bounded",
        enable_prefix_caching=False,
        vocab_size=9,
        token_map_fingerprint="",
    )
    return Metrics("m", ready=ready, stats=lambda: stats)


def samples(made: Metrics) -> dict[str, float]:
    """By name and the labels beside COMMON."""
    found = {}
    for family in text_string_to_metric_families(made.text().decode()):
        for sample in family.samples:
            more = sorted(f"{key}={value}" for key, value in sample.labels.items() if key not in COMMON)
            found[" ".join([sample.name.removeprefix("vllm:"), *more])] = sample.value
    return found


def outcome(request_id: str, reason: str, **changes: Any) -> Outcome:
    told: dict[str, Any] = {
        "request_id": request_id,
        "reason": reason,
        "prompt_tokens": 6,
        "cached_tokens": 4,
        "completion_tokens": 5,
        "transferred_tokens": 0,
        "max_tokens": 7,
        "temperature": 1.0,
        "top_p": 1.0,
        "preemptions": 2,
        "end_to_end_s": 2.0,
        "queued_s": 0.25,
        "prefill_s": 0.5,
        "first_token_s": 1.0,
        "decode_s": 0.8,
    }
    return Outcome(**told | changes)


def test_what_only_measurements_have() -> None:
    """Prompts that were handed over are not computed here; balancedness is told while loads are recorded."""
    plain = samples(metrics(NOTHING))
    assert not any("balancedness" in name for name in plain)
    stats = msgspec.structs.replace(
        NOTHING, prompt_tokens=10, cached_tokens=2, transferred_tokens=7, balancedness=0.75
    )
    told = samples(metrics(stats))
    assert told["flashstep:expert_balancedness"] == 0.75
    sources = {"local_compute": 1, "local_cache_hit": 2, "external_kv_transfer": 7}
    assert {name: told[f"prompt_tokens_by_source_total source={name}"] for name in sources} == sources
    assert told["external_prefix_cache_hits_total"] == told["external_prefix_cache_queries_total"] == 7


def test_the_engines_counts_under_their_names() -> None:
    stats = Stats(
        running=2,
        waiting=3,
        deferred=4,
        cache_usage=0.5,
        prefix_queries=100,
        prefix_hits=64,
        preemptions=1,
        prompt_tokens=90,
        cached_tokens=60,
        replayed_tokens=8,
        generation_tokens=40,
        steps=9,
        step_rows=(4, 0, 1, 2, 1, 1),
        rows=70,
    )
    told = samples(metrics(stats))
    assert told["num_requests_waiting_by_reason reason=capacity"] == 3
    assert told["num_requests_waiting_by_reason reason=deferred"] == 4
    assert told["num_requests_waiting"] == 7
    assert told["prompt_tokens_by_source_total source=local_compute"] == 30
    assert told["prompt_tokens_by_source_total source=local_cache_hit"] == 60
    assert told["prompt_tokens_cached_by_source_total source=device"] == 60
    assert told["prompt_tokens_recomputed_total"] == 8
    assert told["prefix_cache_hits_total"] == 64
    assert told["iteration_tokens_total_bucket le=1.0"] == 4
    assert told["iteration_tokens_total_bucket le=8.0"] == 7
    assert told["iteration_tokens_total_bucket le=32.0"] == told["iteration_tokens_total_bucket le=+Inf"] == 9
    assert (told["iteration_tokens_total_sum"], told["iteration_tokens_total_count"]) == (70, 9)
    config = "block_size=2 enable_prefix_caching=False hit_policy=bounded num_gpu_blocks=3"
    assert told[f"cache_config_info {config}"] == 1


def test_one_outcome_in_every_histogram() -> None:
    made = metrics()
    made.begin(child_id("a", 0))
    made.ended(outcome("a-0", "stop"))
    told = samples(made)
    sums = {
        "e2e_request_latency_seconds": 2.0,
        "request_queue_time_seconds": 0.25,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 0.8,
        "request_inference_time_seconds": 1.3,
        "request_time_per_output_token_seconds": 0.2,
        "request_prompt_tokens": 6,
        "request_prefill_kv_computed_tokens": 2,
        "request_generation_tokens": 5,
        "request_max_num_generation_tokens": 5,
        "request_params_max_tokens": 7,
        "request_params_n": 1,
        "request_num_preemptions": 2,
    }
    assert {name: told[f"{name}_sum"] for name in sums} == pytest.approx(sums)
    assert {told[f"{name}_count"] for name in sums} == {1}


def test_a_family_counts_once_and_only_what_came_to_an_end() -> None:
    made, heard = metrics(), []
    made.listeners.append(lambda one, n: heard.append((one.request_id, n)))
    for family, reasons in {"a": ("stop", "abort", "length"), "b": ("abort", "error")}.items():
        for child in range(len(reasons)):
            made.begin(child_id(family, child))
        for child, reason in enumerate(reasons):
            made.ended(outcome(child_id(family, child), reason, completion_tokens=10 * (child + 1)))
    told = samples(made)
    assert (told["request_params_n_count"], told["request_params_n_sum"]) == (1, 3)
    assert told["request_max_num_generation_tokens_sum"] == 30
    assert told["request_generation_tokens_sum"] == 40
    assert told["request_success_total finished_reason=abort"] == 2
    assert heard == [("a-0", 3), ("a-1", 3), ("a-2", 3), ("b-0", 2), ("b-1", 2)]
