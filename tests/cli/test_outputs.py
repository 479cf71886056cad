"""Outputs of commands: nothing that is there is lost by a slip; what cannot be written is told before anything is measured."""

from pathlib import Path

import pytest

from flashstep.bench.ledger import append
from flashstep.cli import main
from flashstep.cli.outputs import output_problems
from tests.bench.report.entries import entry


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "l.jsonl"
    append(path, entry("probe", "A", {"step_us": [1.0]}, unit="step"))
    return path


def test_an_output_is_no_input_and_no_other_output(tmp_path: Path, ledger: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(ledger)
    told = output_problems({"--json": link}, inputs={"the ledger": ledger})
    assert told == [f"--json is {link}, which the ledger is, too; name another file"]
    new = tmp_path / "new"
    told = output_problems({"--json": new, "--svg": tmp_path / "." / "new"})
    assert len(told) == 1 and "which --json is, too" in told[0] and not new.exists()


@pytest.mark.parametrize(
    ("flag", "text", "is_fine"),
    [
        ("--json", "", True),
        ("--json", '{\n "a": 1\n}', True),
        ("--json", '{"a": 1}\n', True),
        ("--json", '{"a": 1}\n{"a": 2}\n', False),
        ("--json", "words", False),
        ("--svg", "<?xml version='1.0'?><svg/>", True),
        ("--svg", '{"a": 1}', False),
        ("--raw", "words", True),  # a flag whose kind is not known here
    ],
)
def test_another_kind_of_file_is_not_overwritten(tmp_path: Path, flag: str, text: str, is_fine: bool) -> None:
    path = tmp_path / "there"
    path.write_text(text)
    assert (output_problems({flag: path}) == []) == is_fine
    assert path.read_text() == text


def test_what_cannot_be_written_is_found_by_trying(tmp_path: Path) -> None:
    told = output_problems(
        {
            "--json": Path("/proc/x.jsonl"),
            "--svg": tmp_path,
            "--png": tmp_path / "no" / "x",
            "--trace": tmp_path / "new",
        }
    )
    assert [words.split(";")[1].split(":")[0].strip() for words in told] == [
        "it cannot be written", "that is a folder", f"there is no folder {tmp_path / 'no'}",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_commands_leave_their_inputs_alone(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, path = ledger.read_bytes(), str(ledger)
    for command in (
        ["bench", "report", path, "--out", path],
        ["bench", "money", path, "--prices", path, "--gpus", "1", "--json", path],
        ["eval", path, "--ledger", "x", "--answers", path],
        ["bench", "latency", "--ledger", "x", "--output-json", "x"],
    ):
        assert main(command) == 2
        assert "is, too" in capsys.readouterr().err and ledger.read_bytes() == before


def test_what_is_no_ledger_is_not_appended_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    assert main(["eval", str(file), "--ledger", str(file)]) == 2
    assert main(["bench", "latency", "--ledger", str(file), "--round", "-1", "--num-iters", "0"]) == 2
    told = capsys.readouterr().err
    assert (
        told.count("is there and no ledger") == 2 and "--round is -1" in told and "--num-iters is 0" in told
    )
    assert main(["bench", "latency", "--ledger", str(tmp_path)]) == 2
    assert "that is a folder" in capsys.readouterr().err


def test_a_full_disk_is_told_in_a_sentence(
    tmp_path: Path, ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    assert main(["bench", "report", str(ledger), "--out", str(full)]) == 2
    assert f"{full} was not written: No space left on device" in capsys.readouterr().err
    assert (
        main(["bench", "chain", "--device", "cpu", "--tokens", "1", "--replays", "1", "--ledger", str(full)])
        == 2
    )
    assert "the entry was not written" in capsys.readouterr().err
