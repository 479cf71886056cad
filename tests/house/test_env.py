"""The environment is read in one module, and that module lists what it reads."""

import ast
from pathlib import Path

from flashstep.config import env

ROOT = Path(__file__).parents[2]
READERS = {"environ", "environb", "getenv", "getenvb"}


def readers_of(root: Path) -> dict[str, list[int]]:
    """Files of ``flashstep`` that touch the environment, with the lines."""
    found = {}
    for file in sorted(root.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        lines = [
            node.lineno
            for node in ast.walk(tree)
            if (isinstance(node, ast.Attribute) and node.attr in READERS)
            or (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and READERS & {name.name for name in node.names}
            )
        ]
        if lines:
            found[file.relative_to(root).as_posix()] = lines
    return found


def test_only_env_reads_the_environment() -> None:
    assert set(readers_of(ROOT / "flashstep")) <= {"config/env.py"}


def test_the_search_finds_readers(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os\nx = os.environ['HOME']\n")
    (tmp_path / "b.py").write_text("from os import getenv\n")
    (tmp_path / "c.py").write_text("import os\nx = os.getpid()\n")
    assert readers_of(tmp_path) == {"a.py": [2], "b.py": [1]}


def test_every_variable_read_is_listed() -> None:
    source = (ROOT / "flashstep" / "config" / "env.py").read_text(encoding="utf-8")
    literals = {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = {text for text in literals if text.isupper() and text.isidentifier()}
    assert names <= set(env.VARIABLES)
    assert all(reason.strip() for reason in env.VARIABLES.values())
