"""Log lines: one line an event, fields quoted, nothing a user wrote."""

import re

import pytest

from flashstep.telemetry.log import Log, configure


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]):
    return lambda: capsys.readouterr().err.splitlines()


def test_a_line_has_time_level_place_event_and_fields(lines) -> None:
    configure()
    Log("engine.loop").info("finished", request="cmpl-1", tokens_out=7, seconds=0.12345678)
    (line,) = lines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO engine\.loop finished request=cmpl-1 tokens_out=7 seconds=0.123457",
        line,
    )


def test_what_users_wrote_is_never_logged(lines) -> None:
    configure()
    Log("server").warning("refused", prompt="my secret", messages=[{"content": "my secret"}], text=None)
    (line,) = lines()
    assert (
        "secret" not in line and "prompt=<9>" in line and "messages=<1>" in line and "text=<private>" in line
    )


def test_values_stay_on_one_line(lines) -> None:
    configure()
    Log("server").error("died", reason='a "b"\nc')
    assert lines()[0].endswith(r'reason="a \"b\"\nc"')


def test_level_and_second_configure(lines) -> None:
    configure()
    log = Log("x")
    log.debug("unseen")
    configure("error")
    log.warning("unseen")
    configure("debug")
    log.debug("seen")
    assert len(lines()) == 1
