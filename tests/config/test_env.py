"""What the command line sets before torch is loaded."""

import os

import pytest

from flashstep.config.env import limit_spinning


def test_threads_sleep_soon_unless_the_user_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "20000"  # noqa: TID251 - what is tested
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"  # noqa: TID251 - what is tested
