"""Files that a user made: what is wrong with one is a sentence with its name."""

from pathlib import Path

import pytest

from flashstep.config.errors import ConfigError
from flashstep.config.files import read_json


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b'{"a": "\xff"}', "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (None, "cannot be read: Is a directory"),
    ],
)
def test_refused_with_the_name(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    file = tmp_path / "some.json"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"some\.json is not usable[^$]*{sentence}"):
        read_json(file)
