"""Reading a JSON file that a user has made: whatever is wrong with it is one ``ConfigError`` that names the file."""

import json
from pathlib import Path
from typing import Any

from flashstep.config.errors import ConfigError


def read_json(file: Path) -> Any:
    """What ``file`` holds. Which shape it must have is the caller's affair."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(file), [f"it cannot be read: {error.strerror}"]) from error
    except ValueError as error:  # no JSON, or no UTF-8
        raise ConfigError(str(file), [f"it is not JSON: {error}"]) from error
    except RecursionError as error:
        raise ConfigError(str(file), ["it is nested too deeply"]) from error
