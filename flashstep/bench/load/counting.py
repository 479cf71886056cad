"""How many tokens a text has, told by a tokenizer.json.

Gives what bench.load.lengths asks with. Knows no server, no word and no trace.
"""

from pathlib import Path

from tokenizers import Tokenizer

from flashstep.bench.load.lengths import Count


def tokenizer_at(path: Path) -> Tokenizer:
    """Of a tokenizer.json, or of the folder it is in; ``ValueError`` where there is none."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"--tokenizer is {path}; there is no file {file}")
    return Tokenizer.from_file(str(file))


def by_tokenizer(path: Path) -> Count:
    tokenizer = tokenizer_at(path)

    async def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count
