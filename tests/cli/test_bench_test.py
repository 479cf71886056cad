"""``flashstep bench test``: published analyses from the shell, and what is refused."""

import io
from pathlib import Path

import pytest

from flashstep.cli import main

A, B = "0.9067 0.9030 0.9075 0.9030".split(), "0.8999 0.8992 0.9014 0.9014".split()
PUBLISHED = [
    ("mcnemar 34 25 --of 1319", "McNemar 34/25: p = 0.2976"),
    ("mcnemar 34 25 --of 1319", "B - A -0.682 points, SE 0.582, 95% interval -1.82"),
    ("mcnemar 35 34", "p = 1 "),
    (
        " ".join(["runs --a", *A, "--b", *B]),
        "exchange of 4 and 4 runs: p = 2/70 = 0.0286 (smallest possible 0.0286)",
    ),
    (" ".join(["runs --a", *A, "--b", *B, "--jobs-a x x y z --jobs-b x x y z"]), "p = 2/24 = 0.0833"),
    ("welch 891.9 3.3 2 964.0 3.0 2", "t = 22.863, 1.98 degrees of freedom"),
]


@pytest.mark.parametrize(("words", "said"), PUBLISHED)
def test_published_numbers(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "test", *words.split()]) == 0
    assert said in capsys.readouterr().out


def test_pairs_from_a_file_and_from_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pairs"
    file.write_text("1\n2\n3\n-1\n4\n5\n")
    assert main(["bench", "test", "pairs", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "sign-flip over 6 of 6 pairs: p = exact = 0.0938 (smallest possible 0.0312)" in shown
    assert "median +2.5, range -1 to +5" in shown and "BCa over 6 pairs" in shown
    monkeypatch.setattr("sys.stdin", io.StringIO(file.read_text()))
    assert main(["bench", "test", "pairs", "-"]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("mcnemar -3 25", "neither may be negative"),
        ("mcnemar 34 25 --of 20", "34 + 25 items differ of 20"),
        ("runs --a 1 2 --b 3 4 --jobs-a x y", "--jobs-a and --jobs-b go together"),
        ("runs --a 1 2 --b 3 4 --jobs-a x y --jobs-b p q", "no block has runs of both arms"),
        ("welch 1 0 2 2 0 2", "neither arm has any spread"),
        ("welch 1 1 1 2 1 2", "Welch's t needs two runs"),
        ("welch 1 1 2 2 1 2 --confidence 95", "--confidence is 95.0; it must be between 0 and 1"),
        ("pairs none", "it must have one number a line"),
    ],
)
def test_numbers_that_cannot_be(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "test", *words.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_what_is_no_finite_number_is_no_difference(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pairs"
    file.write_text(f"1\n{text}\n2\n")
    assert main(["bench", "test", "pairs", str(file)]) == 2
    assert f"{file}: nan or inf is no difference" in capsys.readouterr().err
