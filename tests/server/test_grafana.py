"""The Grafana board reads metrics that exist, by labels that they have, and no panel hides another."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import MODEL, ROOT, Server

BOARD = json.loads((ROOT / "deploy" / "grafana" / "flashstep.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
ADDED_BY_PROMETHEUS = {"job", "instance"}
NAME = re.compile(r"\b(?:(?:vllm|flashstep):\w+|process_\w+)")


def expressions() -> Iterator[str]:
    for panel in PANELS:
        yield from (target["expr"] for target in panel["targets"])
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def labels_of(expression: str) -> set[str]:
    """Every label that it names: in selectors, in ``by``, in ``label_values``."""
    selected = re.findall(r"(\w+)=~?\"", expression)
    grouped = [name for names in re.findall(r"by \(([^)]*)\)", expression) for name in names.split(", ")]
    listed = re.findall(r"label_values\([^,]*, (\w+)\)", expression)
    return {*selected, *grouped, *listed}


def test_every_expression_reads_what_a_server_tells(own_server: Callable[..., Server]) -> None:
    server = own_server(drafts=3)
    server.client.completions.create(model=MODEL, prompt="hi", max_tokens=5)
    told: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.get("/metrics")[1]):
        for sample in family.samples:
            told.setdefault(sample.name, set()).update(sample.labels)
    read = set()
    for expression in expressions():
        names = NAME.findall(expression)
        assert names, expression
        for name in names:
            assert name in told, f"{name} is no metric: {expression}"
            assert labels_of(expression) <= told[name] | ADDED_BY_PROMETHEUS | {"position"}, expression
        read.update(names)
    assert "vllm:spec_decode_num_accepted_tokens_per_pos_total" in read
    assert "position" in told["vllm:spec_decode_num_accepted_tokens_per_pos_total"]


def test_parentheses_close_and_variables_exist() -> None:
    known = {"datasource", *(variable["name"] for variable in BOARD["templating"]["list"])}
    for expression in expressions():
        for pair in ("()", "{}", "[]"):
            assert expression.count(pair[0]) == expression.count(pair[1]), expression
        assert set(re.findall(r"\$(\w+)", expression)) <= known | {"__rate_interval"}


def test_panels_have_names_units_and_places_of_their_own() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place: dict[str, Any] = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
