"""What all tests share: the ``--bench`` option (a rate is a benchmark, not a test: it runs where somebody asked for it) and
``--cpu-answers``, what a CPU answered elsewhere (``tests/e2e/answers.py``)."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bench", action="store_true", help="also run what measures speed (on a quiet machine)")
    parser.addoption("--cpu-answers", type=Path, help="the file of python -m tests.e2e.answers FILE")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--bench"):
        return
    for item in items:
        if item.get_closest_marker("bench") is not None:
            item.add_marker(pytest.mark.skip(reason="a benchmark: pytest --bench"))
