"""Sampling defaults and chat switches for requests that say nothing: where they come from, and what is refused."""

import json
from pathlib import Path

import pytest

from flashstep.config.errors import ConfigError
from flashstep.config.generation import EFFORT_TIERS, sampling_defaults, sampling_override, template_defaults


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    fields = {"temperature": 0.6, "top_p": 0.95, "top_k": None, "do_sample": True, "eos_token_id": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    return tmp_path


def test_the_file_then_the_override(checkpoint: Path, tmp_path: Path) -> None:
    assert sampling_defaults("auto", None, checkpoint=checkpoint) == {"temperature": 0.6, "top_p": 0.95}
    both = sampling_defaults("auto", '{"temperature": 1.2, "top_k": 20}', checkpoint=checkpoint)
    assert both == {"temperature": 1.2, "top_p": 0.95, "top_k": 20}
    assert sampling_defaults("vllm", None, checkpoint=checkpoint) == {}
    assert sampling_defaults(str(checkpoint), None, checkpoint=Path("/nowhere")) == {
        "temperature": 0.6,
        "top_p": 0.95,
    }
    assert sampling_defaults("auto", None, checkpoint=tmp_path / "without") == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"temperature": -1}', "temperature is -1; it must be 0 or more"),
        ('{"temperature": true}', "temperature is true; it must be 0 or more"),
        ('{"temperature": NaN}', "temperature is NaN; "),
        ('{"top_p": 0}', "top_p is 0; it must be above 0 and at most 1"),
        ('{"top_k": 1.5}', "top_k is 1.5; it must be a whole number"),
        ('{"min_p": "a"}', 'min_p is "a"; it must be in 0..1'),
        ('{"max_new_tokens": 5}', "max_new_tokens cannot be set for all requests: "),
        ('{"tempreature": 1}', "tempreature is not a known field; known are temperature, top_p"),
        ("[]", "expected a JSON object"),
        ("{", "it is not JSON"),
    ],
)
def test_overrides_that_are_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        sampling_override(text)
    assert told in str(error.value) and error.value.subject == "--override-generation-config"


@pytest.mark.parametrize("content", ['{"temperature": -1}', "[]", "{"])
def test_files_that_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError) as error:
        sampling_defaults("auto", None, checkpoint=tmp_path)
    assert error.value.subject.endswith("generation_config.json")


def test_a_folder_without_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        sampling_defaults(str(tmp_path), None, checkpoint=tmp_path)


def test_switches() -> None:
    for tier in EFFORT_TIERS:
        assert template_defaults(f'{{"reasoning_effort": "{tier}"}}') == {"reasoning_effort": tier}
    assert template_defaults(None) == {}
    with pytest.raises(ConfigError, match="must be true or false"):
        template_defaults('{"thinking": {}}')
    assert template_defaults('{"thinking": false}') == {"thinking": False}
    assert template_defaults('{"enable_thinking": true, "reasoning_effort": 30}') == {
        "enable_thinking": True,
        "reasoning_effort": 30,
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"thinking": "no"}', 'thinking is "no"; it must be true or false'),
        (
            '{"reasoning_effort": 101}',
            "reasoning_effort is 101; it must be one of none, minimal, low, medium, high, xhigh, ultra, max, or a whole",
        ),
        ('{"reasoning_effort": "huge"}', 'reasoning_effort is "huge"; '),
        (
            '{"template": 1}',
            "template is not a known field; known are thinking, enable_thinking, reasoning_effort",
        ),
        ('{"thinking": true, "enable_thinking": false}', "thinking and enable_thinking differ"),
        ("nothing", "it is not JSON"),
    ],
)
def test_switches_that_are_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        template_defaults(text)
    assert told in str(error.value)
