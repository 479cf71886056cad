"""Packages of the ``bench`` extra, asked for by the command that needs them: absent, the message says what to install."""

import importlib.util


def require_bench(*packages: str) -> None:
    """``ValueError`` if a package of the extra is not there."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"this needs {', '.join(missing)}: pip install 'flashstep[bench]'")
