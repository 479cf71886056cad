"""Where a figure comes from: the command line without what nobody else may know."""

import shlex

import pytest

from flashstep.bench.experiment import is_of
from flashstep.bench.origin import without_secret_flags, without_secrets


@pytest.mark.parametrize(
    "line",
    [
        "bench serve --api-key hunter2 --url http://x",
        "bench serve --api_key=hunter2",
        "bench serve --header X-Key=hunter2 X-Other=hunter2 --url http://x",
        "bench serve --header=X-Key=hunter2",
        """bench serve --extra-body '{"user_token": "hunter2", "a": [{"api_key": "hunter2"}]}'""",
        "bench serve --extra-body={hunter2",
        "bench serve --url http://me:hunter2@host/v1",
        "bench replay t --dp-urls http://me:hunter2@one https://me:hunter2@two",
        "bench compare --run-a 'flashstep bench serve --api-key hunter2 --url http://me:hunter2@x' --run-b x",
    ],
)
def test_no_secret_stays_in_a_command_line(line: str) -> None:
    shown = shlex.join(without_secret_flags(shlex.split(line)))
    assert "hunter2" not in shown and shown.startswith("bench ")


def test_what_is_shown_can_be_shown_again() -> None:
    line = [
        "bench",
        "serve",
        "--api-key",
        "a",
        "--header",
        "X=b",
        "--extra-body",
        '{"token":1}',
        "--url",
        "http://u:p@h",
    ]
    once = without_secret_flags(line)
    assert without_secret_flags(once) == once


@pytest.mark.parametrize(
    "word", ['{"max_tokens":3,  "a":1}', "sh -c 'flashstep  bench serve --seed 1' \"$@\""]
)
def test_a_word_without_a_secret_stays_as_it_was(word: str) -> None:
    """A comparison finds its arms by their commands."""
    assert without_secret_flags(["--extra-body" if word[0] == "{" else "--a", word])[1] == word


def test_what_is_no_secret_stays() -> None:
    line = [
        "bench",
        "serve",
        "--url",
        "http://host:80/v1",
        "--extra-body",
        '{"max_tokens": 3, "stop_token_ids": [1]}',
        "--seed=5",
    ]
    assert without_secret_flags(line) == line
    assert without_secret_flags(["--header", "X-Key=a"]) == ["--header", "X-Key=HIDDEN"]
    assert without_secrets({"metadata": {"password": "a", "from": 1}}) == {
        "metadata": {"password": "HIDDEN", "from": 1}
    }


def test_a_comparison_finds_an_arm_whose_secrets_are_hidden() -> None:
    flags = ["bench", "serve", "--api-key", "hunter2", "--url", "http://me:hunter2@h", "--seed", "1"]
    recorded = shlex.join(["flashstep", *without_secret_flags(flags)])
    plain = shlex.join(["flashstep", *flags])
    assert is_of(plain, recorded) and is_of(f"sh -c '{plain} \"$@\"' arm", recorded)
    assert not is_of(plain.replace("--seed 1", "--seed 2"), recorded)
