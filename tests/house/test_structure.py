"""The documents name what exists: ARCHITECTURE.md every package once, tests/ mirrors flashstep/, modules say what they own."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ROOT / "flashstep"
PACKAGES = sorted(folder.name for folder in PRODUCT.iterdir() if any(folder.glob("*.py")))
HARD_LIMIT = 600  # lines
LIMITS = {"kernels": 800, "oracle": 900}  # the oracle is one file on purpose
TEST_FOLDERS_BESIDE = {"e2e", "house", "oracle", "train", "vectors"}


def modules() -> list[Path]:
    roots = [PRODUCT, ROOT / "oracle", ROOT / "train"]
    return [file for root in roots for file in sorted(root.rglob("*.py"))]


def test_architecture_names_every_package_once() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
    assert sorted(rows) == PACKAGES


def test_every_folder_with_code_is_a_package() -> None:
    for root in (PRODUCT, ROOT / "oracle", ROOT / "train"):
        for folder in {file.parent for file in root.rglob("*.py")}:
            assert (folder / "__init__.py").is_file(), f"{folder} would vanish from the import graph"


def test_tests_mirror_the_product() -> None:
    folders = {folder.name for folder in (ROOT / "tests").iterdir() if any(folder.rglob("test_*.py"))}
    assert folders <= set(PACKAGES) | TEST_FOLDERS_BESIDE
    assert set(PACKAGES) <= folders, "these packages have no tests"


@pytest.mark.parametrize("package", ["cache"])
def test_mixed_packages_re_export_nothing(package: str) -> None:
    """A re-export here would give the scheduler torch, unseen by the import contracts."""
    body = ast.parse((PRODUCT / package / "__init__.py").read_text(encoding="utf-8")).body
    assert len(body) == 1 and isinstance(body[0], ast.Expr)


def test_no_file_is_over_the_hard_limit() -> None:
    for file in modules():
        station = next((part for part in file.relative_to(ROOT).parts if part in LIMITS), None)
        limit = HARD_LIMIT if station is None else LIMITS[station]
        lines = len(file.read_text(encoding="utf-8").splitlines())
        assert lines <= limit, f"{file.relative_to(ROOT)} has {lines} lines; cut it at a noun"


def test_names_are_nouns_of_ours() -> None:
    banned = {"utils", "util", "misc", "base", "manager", "helper", "helpers", "impl", "new", "v2"}
    for file in modules():
        assert not banned & set(file.stem.split("_")), file.relative_to(ROOT)


def test_decisions_are_numbered_and_dated() -> None:
    files = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [int(file.name[:3]) for file in files] == list(range(1, len(files) + 1))
    for file in files:
        assert re.search(r"^\d{4}-\d\d-\d\d, \w+", file.read_text(encoding="utf-8"), flags=re.MULTILINE), (
            file.name
        )
