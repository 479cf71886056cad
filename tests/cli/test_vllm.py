"""``flashstep vllm ...``: pasted lines become ours or are refused whole, and nothing is started."""

import dataclasses
import shutil
from pathlib import Path

import pytest

import flashstep
from flashstep.cli import main
from flashstep.cli.model import resolve, served_name, tiny_model
from flashstep.cli.serve import Serve
from flashstep.cli.vllm import OTHER_DEFAULTS, own_arguments
from flashstep.config.errors import ConfigError
from flashstep.config.vllm.commands import COMMANDS, VARIABLES
from flashstep.config.vllm.line import own_shapes


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_all_that_is_refused_is_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    line = "vllm serve nosuch/model -tp 4 --enable-lora --max-num-seq 3 --kv-cache-dtype bfloat16 --engram-config {"
    assert main(line.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    told = (
        "5 problem(s)",
        "-tp 4",
        "--enable-lora",
        "--max-num-seq is no flag",
        "bfloat16",
        "--engram-config: it is not JSON",
    )
    assert [one for one in told if one not in shown.err] == []
    assert "loading" not in shown.err and "Traceback" not in shown.err


def test_serve_takes_the_same_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "-tp", "4", "--enable-eplb"]) == 2
    shown = capsys.readouterr().err
    assert "-tp 4 (allowed: 1)" in shown and "--enable-eplb" in shown
    assert own_arguments(["serve", "--max-model-len", "2k"]) == ["serve", "--max-model-len", "2000"]


def test_a_pasted_line_serves_the_name_as_it_is_written() -> None:
    assert own_arguments("vllm serve /models/x/ --max-num-seqs 4".split())[-2:] == [
        "--served-model-name",
        "/models/x/",
    ]
    named = own_arguments("vllm serve /models/x --served-model-name y".split())
    assert named == ["serve", "/models/x", "--served-model-name", "y"]
    assert own_arguments(["vllm", "serve"]) == ["serve"]


def test_defaults_that_are_not_vllms_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    own_arguments("vllm serve x --max-num-seqs 4".split())
    shown = capsys.readouterr().err
    assert "--host is 127.0.0.1 (vLLM: every interface)" in shown
    assert "--max-num-seqs is" not in shown
    assert set(OTHER_DEFAULTS) <= set(own_shapes())


def test_variables_that_are_set_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    monkeypatch.setenv("VLLM_SOMETHING", "1")
    own_arguments("vllm serve x".split())
    shown = capsys.readouterr().err
    assert (
        "VLLM_USE_RUST_FRONTEND is set and not read here; in its place: nothing: there is one front end"
        in shown
    )
    assert "VLLM_SOMETHING is set and not read here; in its place: flags" in shown


def test_a_key_that_would_not_be_asked_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "geheim")
    for line in ("vllm serve x", "serve x"):
        with pytest.raises(ConfigError, match="VLLM_API_KEY is set, and not read here") as error:
            own_arguments(line.split())
        assert "geheim" not in str(error.value)
    assert "--api-key" in own_arguments("vllm serve x --api-key k".split())
    file = tmp_path / "keys"
    file.write_text("k\n")
    assert "--api-key-file" in own_arguments(["vllm", "serve", "x", "--api-key-file", str(file)])


@pytest.mark.parametrize("command", COMMANDS)
def test_other_commands_name_ours(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm", *command.split(), "--model", "x"]) == 2
    assert f"vllm {command}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "begin"),
    [("vllm", "vllm needs a command; "), ("vllm swerve x", "vllm swerve x is not known; ")],
)
def test_what_is_no_command(words: str, begin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    shown = capsys.readouterr().err
    assert f"flashstep: {begin}known behind vllm are serve, bench forward" in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--version", f"flashstep {flashstep.__version__} "),
        ("vllm --version", f"flashstep {flashstep.__version__} "),
        ("vllm --help", "usage: flashstep vllm serve MODEL"),
    ],
)
def test_about(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 0
    assert capsys.readouterr().out.startswith(told)


def test_a_wrong_value_is_told_before_any_notice(capsys: pytest.CaptureFixture[str]) -> None:
    """One message, and nothing about defaults of a server that does not start."""
    assert main("vllm serve x --max-num-seqs 0 --scheduling-policy lifo".split()) == 2
    shown = capsys.readouterr().err
    assert "2 problem(s)" in shown and "left out" not in shown


def test_help_of_a_pasted_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main("vllm serve x --help".split())
    assert stop.value.code == 0
    assert "usage: flashstep serve" in capsys.readouterr().out


def test_every_flag_of_serve_is_known_to_the_reader() -> None:
    own = {field.name.replace("_", "-") for field in dataclasses.fields(Serve)}
    assert own - {"model", "engine", "server"} <= set(own_shapes())


def test_other_commands_of_ours_are_left_alone() -> None:
    assert own_arguments(["generate", "--tensor-parallel-size", "2"]) == [
        "generate",
        "--tensor-parallel-size",
        "2",
    ]


# ---- a name in the Hugging Face cache -----------------------------------------------------------------------------------------


def test_a_name_is_looked_up_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--V4.1"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(tiny_model() / name, snapshot / name)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    name = Path("org/V4.1")
    assert resolve(name) == snapshot
    assert resolve(name, "a" * 40) == snapshot
    assert served_name(name, snapshot) == "org/V4.1"
    with pytest.raises(ConfigError, match=r"`hf download org/V4\.1 --revision other`"):
        resolve(name, "other")
    with pytest.raises(ConfigError, match="not in the Hugging Face cache"):
        resolve(Path("org/unknown"))


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a folder has none"):
        resolve(tmp_path, "main")
    with pytest.raises(ConfigError, match="a folder has none"):
        resolve(None, "main")
