"""What a server's /v1/models says: the models, and, of this engine's servers, what makes their texts wrong on purpose.

Takes the body of the answer, or None; gives nothing where it cannot be read. Knows no connection.
"""

import json


def falsified_by(listed: bytes | None) -> dict[str, tuple[str, ...]]:
    """By model, in the server's order: "synthetic acceptance", "uniform routing", "filled cache" (``EngineConfig.falsifies``).

    Only flashstep says such things; for any other server they are empty, which says nothing.
    """
    try:
        cards = json.loads(listed or b"{}").get("data", [])
        return {str(card["id"]): tuple(map(str, card.get("falsified_by", ()))) for card in cards}
    except (ValueError, AttributeError, TypeError, KeyError):
        return {}
