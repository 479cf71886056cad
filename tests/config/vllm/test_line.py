"""Lines in vLLM's flags: what becomes ours, what is taken, and what is refused with which words."""

import json
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashstep.config.errors import ConfigError
from flashstep.config.speculative import SpeculativeOptions
from flashstep.config.vllm.line import OBJECTS, RENAMED, Translation, own_shapes, translate
from flashstep.config.vllm.table import SHORT, TABLE

SEED = """deepseek-ai/DeepSeek-V4.1-Flash --tensor-parallel-size 4 --max-model-len 1048576 --max-num-batched-tokens 4096
--max-num-seqs 1 --kv-cache-dtype fp8 --tokenizer-mode deepseek_v41 --reasoning-parser deepseek_v41
--tool-call-parser deepseek_v41 --enable-auto-tool-choice --enable-prompt-tokens-details
--speculative-config '{"method":"dspark","num_speculative_tokens":5,"rejection_sample_method":"block"}'
--compilation-config '{"cudagraph_mode":"FULL","cudagraph_capture_sizes":[5,6,12,18]}'
--attention-config '{"backend":"FLASHINFER_MLA_SPARSE_DSV41","indexer_kv_dtype":"mxfp4"}'
--additional-config '{"decode_backend":"latency_specialized"}' --engram-config '{"cpu_offload":true}'"""


def said(words: str) -> Translation:
    return translate(shlex.split(words))


def test_the_line_of_the_specification() -> None:
    """What it has no counterpart for is told at once, and it is these four things."""
    shown = [problem.partition(":")[0] for problem in said(SEED).problems]
    assert shown == [
        "--tensor-parallel-size 4 (allowed",
        "--compilation-config.cudagraph_capture_sizes",
        "--attention-config.backend",
        '--additional-config.decode_backend "latency_specialized" (allowed',
    ]


def test_the_rest_of_it_becomes_ours() -> None:
    kept = SEED.replace("--tensor-parallel-size 4", "-tp 1").replace(
        ',"cudagraph_capture_sizes":[5,6,12,18]', ""
    )
    kept = kept.replace('"backend":"FLASHINFER_MLA_SPARSE_DSV41",', "").replace("latency_specialized", "auto")
    translation = said(kept)
    assert translation.problems == []
    assert translation.arguments == [
        "deepseek-ai/DeepSeek-V4.1-Flash",
        *("--max-model-len", "1048576", "--max-num-batched-tokens", "4096", "--max-num-seqs", "1"),
        *(
            "--speculative-config",
            '{"method":"dspark","num_speculative_tokens":5,"rejection_sample_method":"block"}',
        ),
        *("--engram-config", '{"cpu_offload":true}'),
    ]


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ("--max-model-len 128k", "--max-model-len 128000"),
        ("--max-model-len 1M", "--max-model-len 1048576"),
        ("--max-model-len auto", ""),
        ("--max-model-len -1", ""),
        ("--kv-cache-memory-bytes 80g", "--kv-cache-memory-bytes 80000000000"),
        ("--device-memory-utilization 0.8", "--gpu-memory-utilization 0.8"),
        ("--load-format safetensors", "--load-format auto"),
        ("--swa-bounded-replay", "--prefix-hit-policy bounded"),
        ("--no-swa-bounded-replay", "--prefix-hit-policy exact"),
        ("--compilation-config.cudagraph_mode NONE", "--enforce-eager"),
        ("-cc.cudagraph_mode=FULL_DECODE_ONLY -O3", ""),
        ("--disable-prefix-caching", "--no-enable-prefix-caching"),
        ("--model here", "here"),
        ("here --model here", "here"),
        ("--seed 3 --seed 3", "--seed 3"),
        ('--allowed-origins \'["http://a", "http://b"]\'', "--allowed-origins http://a http://b"),
        ("--api-key a b", "--api-key a b"),
        ("--no-enable-lora --no-enable-expert-parallel -pp 1 -dp 1 --no-enable-flashinfer-autotune", ""),
        ("--limit-mm-per-prompt.image 0 --hf-overrides '{}' --kv-transfer-config '{}'", ""),
        ("--structured-outputs-config.backend guidance --trust-remote-code --no-trust-remote-code", ""),
        ("--disable-log-stats", "--acceptance-log-s 0"),
        ("--disable-log-requests --no-enable-log-requests --no_enable_log_requests", ""),
        ("--allowed-origins=[]", "--allowed-origins"),
        ("--api-key=-x", "--api-key=-x"),
        ("--api-key []", "--api-key []"),
        ("--generation-config=-2", "--generation-config=-2"),
    ],
)
def test_what_becomes_ours(words: str, ours: str) -> None:
    translation = said(words)
    assert translation.problems == []
    assert translation.arguments == ours.split()


@pytest.mark.parametrize(
    "words",
    [
        """--spec-method dspark --spec-tokens 3""",
        """--speculative-config.method dspark --speculative-config.num_speculative_tokens=3""",
        """-sc '{"method": "dspark"}' --spec-tokens 3""",
        """-sc '{"method": "dspark"}' --speculative_config.num_speculative_tokens 3""",
    ],
)
def test_speculation_in_every_spelling(words: str) -> None:
    translation = said(words)
    assert translation.problems == []
    flag, text = translation.arguments
    assert flag == "--speculative-config"
    assert json.loads(text) == {"method": "dspark", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("-tp 4 -ep --enable-eplb", ["-tp 4 (allowed: 1), -ep: not there yet: ", "--enable-eplb: not there yet: "]),
        ("--no-async-scheduling", ["--no-async-scheduling: the next step is planned and launched while one runs; leave it out"]),
        ("--kv-cache-dtype bfloat16", ["--kv-cache-dtype bfloat16 (allowed: auto, fp8, fp8_ds_mla, nvfp4_ds_mla): "]),
        ("--enable-lora --lora-modules a=b c=d", ["--enable-lora, --lora-modules a=b c=d: no counterpart: "]),
        ("--kv-transfer-config '{\"kv_role\": \"kv_both\"}'", ["--kv-transfer-config: not there yet: "]),
        ("--limit-mm-per-prompt '{\"image\": 2}'", ['--limit-mm-per-prompt.image 2 (allowed: 0): ']),
        ("--compilation-config.mode false", ['--compilation-config.mode false (allowed: 0, "NONE"): ']),
        ("--compilation-config '{bad'", ["--compilation-config: it is not JSON (", ]),
        ("--hf-token geheim", ["--hf-token: no counterpart: "]),
        ("--config serve.yaml", ["--config serve.yaml: no counterpart: there is no second config language"]),
        ("--seed 1 --seed 2", ["--seed is given twice: --seed 1 and --seed 2"]),
        ("--gpu-memory-utilization 0.5 --device-memory-utilization 0.6", ["--gpu-memory-utilization is given twice: "]),
        ("--swa-bounded-replay --prefix-hit-policy exact", ["--prefix-hit-policy is given twice: "]),
        ("--enforce-eager --no-enforce-eager", ["--enforce-eager is given twice: --enforce-eager and --no-enforce-eager"]),
        ("--served-model-name x --served-model-name y", ["--served-model-name is given twice: x and y; its values "]),
        ("--api-key geheim --api-key b", ["--api-key is given twice; its values stand behind one"]),
        ("-tp 4 --max-num-seqs abc", ["-tp 4 (allowed: 1): ", "--max-num-seqs is 'abc'; it must be a whole number"]),
        (
            "--scheduling-policy lifo --prefix-hit-policy x --uvicorn-log-level loud --gpu-memory-utilization high --port=-2",
            [
                "--scheduling-policy is 'lifo'; it must be fcfs, priority",
                "--gpu-memory-utilization is 'high'; it must be a number",
                "--prefix-hit-policy is 'x'; it must be exact, bounded",
                "--uvicorn-log-level is 'loud'; it must be critical, ",
                "--port is -2; ",
            ],
        ),
        (
            "-O0 --guided-decoding-backend x",
            ["--guided-decoding-backend is no flag of flashstep serve, and none of vLLM 0.33's; leave", "-O 0 (allowed: 2, 3): "],
        ),
        ("-sc.method dspark -sc.method eagle", ['--speculative-config.method is given twice: "dspark" and "eagle"']),
        ("a b", ["MODEL is given 2 times: a, b"]),
        ("a --model b", ["MODEL is given 2 times: a, b"]),
        ("-tp 2 -sc '{\"method\": \"eagle\"}'", ["-tp 2 (allowed: 1): ", '--speculative-config: method is "eagle"; ']),
        ("-tp 2 --engram-config '{\"x\": 1}'", ["-tp 2 (allowed: 1): ", "--engram-config: x is not a known field; "]),
    ],
)  # fmt: skip
def test_what_is_refused(words: str, told: list[str]) -> None:
    problems = said(words).problems
    assert len(problems) == len(told), problems
    for problem, begin in zip(problems, told, strict=True):
        assert problem.startswith(begin), problem


def test_a_draft_on_one_gpu_is_what_there_is() -> None:
    assert SpeculativeOptions.parse('{"draft_tensor_parallel_size": 1}') == SpeculativeOptions()
    for value in ("2", "true"):
        with pytest.raises(ConfigError, match="draft_tensor_parallel_size is not an option here"):
            SpeculativeOptions.parse(f'{{"draft_tensor_parallel_size": {value}}}')


def test_a_secret_is_not_shown() -> None:
    assert "geheim" not in "".join(said("--hf-token geheim").problems)


def test_what_is_ours_passes_as_it_is() -> None:
    words = "model --prefix-hit-policy bounded --kernels reference --served-model-name a b --no-numa-bind --port 0"
    assert said(words).arguments == words.split()


FLAGS = [f"--{name}" for name in [*TABLE, *own_shapes(), *RENAMED, "model"]] + [f"-{name}" for name in SHORT]
DOTTED = [f"--{name}.{key}" for name in OBJECTS for key in ("a", "a.b", "method", "a+", "", "a..b")]
VALUES = [
    "1",
    "-1",
    "auto",
    "{}",
    "[1]",
    "null",
    "1k",
    "9" * 30,
    '{"a": 1}',
    '{"a": 1, "a": 2}',
    '{"method": null}',
    "{",
    "",
]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(FLAGS) | st.sampled_from(DOTTED) | st.sampled_from(VALUES) | st.text(max_size=8),
        max_size=12,
    )
)
def test_any_line_is_translated_or_told_why_not(words: list[str]) -> None:
    translation = translate(words)
    assert all(problem.strip() for problem in translation.problems)
    again = translate(translation.arguments)
    if not translation.problems:
        assert again.arguments == translation.arguments, "what is ours stays as it is"


@pytest.mark.parametrize(
    "words",
    [
        "M --api-key=-sesame --api-key=tahini",
        "M --api-key -sesame",
        "M --api-key --sesame",
        "M --api-key tahini -sesame",
        "M --hf-token -sesame",
        "M --hf-token sesame",
        "--api-key=tahini sesame M",
        "M --api-key.sub sesame",
        "M --api-kye sesame",
        "M --api-kye=sesame",
    ],
)
def test_keys_are_never_shown(words: str) -> None:
    problems = " ".join(translate(words.split()).problems)
    assert problems and "sesame" not in problems and "tahini" not in problems


def test_a_slip_behind_a_key_is_told_as_one() -> None:
    (problem,) = translate("--api-key tahini --prot=9".split()).problems
    assert "--prot is no flag" in problem and "--port" in problem
