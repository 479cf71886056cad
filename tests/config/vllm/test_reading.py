"""vLLM's rules of spelling: every way to write a flag is read as that flag."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashstep.config.vllm.flags import OFF, ON, Shape
from flashstep.config.vllm.reading import key_value, merge, number, read

SHAPES = {
    "max-model-len": Shape.VALUE,
    "enable-prefix-caching": Shape.SWITCH,
    "disable-cascade-attn": Shape.SWITCH,
    "served-model-name": Shape.LIST,
    "speculative-config": Shape.OBJECT,
    "optimization-level": Shape.VALUE,
    "tensor-parallel-size": Shape.VALUE,
}


@pytest.mark.parametrize(
    ("words", "name", "values", "path"),
    [
        ("--max-model-len 5", "max-model-len", ("5",), ()),
        ("--max-model-len=5", "max-model-len", ("5",), ()),
        ("--max_model_len=5", "max-model-len", ("5",), ()),
        ("--max-model-len -1", "max-model-len", ("-1",), ()),
        ("--max-model-len=a=b", "max-model-len", ("a=b",), ()),
        ("--enable-prefix-caching", "enable-prefix-caching", (ON,), ()),
        ("--enable_prefix_caching", "enable-prefix-caching", (ON,), ()),
        ("--no-enable-prefix-caching", "enable-prefix-caching", (OFF,), ()),
        ("--disable-prefix-caching", "enable-prefix-caching", (OFF,), ()),
        ("--enable-cascade-attn", "disable-cascade-attn", (OFF,), ()),
        ("--no-disable-cascade-attn", "disable-cascade-attn", (OFF,), ()),
        ("--served-model-name a b", "served-model-name", ("a", "b"), ()),
        ("-tp 4", "tensor-parallel-size", ("4",), ()),
        ("-tp=4", "tensor-parallel-size", ("4",), ()),
        ("-O3", "optimization-level", ("3",), ()),
        ("-O=3", "optimization-level", ("3",), ()),
        ("-O 3", "optimization-level", ("3",), ()),
        ("--speculative-config {}", "speculative-config", ("{}",), ()),
        ("--speculative_config.method dspark", "speculative-config", ("dspark",), ("method",)),
        ("--speculative-config.a_b.c=1.5", "speculative-config", ("1.5",), ("a_b", "c")),
        ("-sc.method=dspark", "speculative-config", ("dspark",), ("method",)),
    ],
)
def test_spellings(words: str, name: str, values: tuple[str, ...], path: tuple[str, ...]) -> None:
    line = read(words.split(), SHAPES)
    assert line.problems == []
    assert [(one.name, one.values, one.path) for one in line.given] == [(name, values, path)]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--max-model-len", "--max-model-len needs a value"),
        ("--max-model-len --enable-prefix-caching", "--max-model-len needs a value"),
        ("--enable-prefix-caching=true", "it takes no value; say --enable-prefix-caching or"),
        ("--max-model-len.key 3", "takes no JSON object"),
        ("--max-model-length 3", "near to it is --max-model-len"),
        ("-zz 3", "-zz is no flag"),
        ("--no-max-model-len", "--no-max-model-len is no flag"),
    ],
)
def test_what_cannot_be_read(words: str, problem: str) -> None:
    line = read(words.split(), SHAPES)
    assert len(line.problems) == 1 and problem in line.problems[0]


def test_the_model_stands_anywhere_between() -> None:
    assert read("a --max-model-len 3 b".split(), SHAPES).positional == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("128k", 128_000),
        ("1M", 1 << 20),
        ("128K", 131_072),
        ("25.6k", 25_600),
        ("2g", 2 * 10**9),
        ("-1", -1),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert number(text) == value


@pytest.mark.parametrize("text", ["", "1.5M", "k", "1kk", "auto", "1e3", "9" * 40])
def test_no_sizes(text: str) -> None:
    assert number(text) is None


def test_values_behind_dots() -> None:
    assert [key_value(text) for text in ("1", "true", '"a"', "[1]", "8k", "dspark")] == [
        1, True, "a", [1], 8000, "dspark",
    ]  # fmt: skip


def test_objects_are_merged_deep_and_tell_what_differs() -> None:
    whole = {"a": {"b": 1}, "c": [1]}
    assert merge(whole, {"a": {"d": 2}, "c": [2], "e": 3}, where="--x") == []
    assert whole == {"a": {"b": 1, "d": 2}, "c": [1, 2], "e": 3}
    assert merge(whole, {"a": {"b": 7}}, where="--x") == ["--x.a.b is given twice: 1 and 7"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.text(max_size=12)
        | st.sampled_from(["--", "-", "-O", "--max-model-len", "--=", "-.", "--speculative-config."])
    )
)
def test_any_line_can_be_read(words: list[str]) -> None:
    line = read(words, SHAPES)
    assert all(problem.strip() for problem in line.problems)
