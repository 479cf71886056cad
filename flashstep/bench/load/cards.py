"""What a server's /v1/models says: the models, and, of this engine's servers, what makes their texts wrong on purpose.

Takes the body of the answer, or None; gives nothing where it cannot be read. Knows no connection.
"""

import json
from typing import Any

ACCEPTANCE = "synthetic acceptance"


def cards(listed: bytes | None) -> dict[str, dict[str, Any]]:
    """Each model's card, by its name and in the server's order."""
    try:
        return {str(card["id"]): dict(card) for card in json.loads(listed or b"{}").get("data", [])}
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
        return {}


def reasons(card: Any) -> tuple[str, ...]:
    """Why ``card``'s texts are wrong on purpose: "synthetic acceptance", "uniform routing" (``EngineConfig.falsifies``).

    Only flashstep says such things; for any other server there are none, which says nothing.
    """
    told = card.get("falsified_by") if isinstance(card, dict) else None
    return tuple(map(str, told)) if isinstance(told, list) else ()


def falsified_by(card: Any, *, synthetic: bool) -> tuple[str, ...]:
    """The ``reasons`` of a run; ``synthetic``: drafts were counted under the name of those that stand by lot."""
    told = reasons(card)
    return (ACCEPTANCE, *told) if synthetic and ACCEPTANCE not in told else told
