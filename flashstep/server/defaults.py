"""What a request gets where it says nothing, by the server's flags (``config.generation``). Takes and gives a body's fields."""

from collections.abc import Mapping
from typing import Any

import msgspec

from flashstep.config.generation import sampling_override, template_defaults
from flashstep.config.server import ServerOptions

TEMPLATE = "chat_template_kwargs"
THINKING = {"thinking", "enable_thinking"}
EFFORT = "reasoning_effort"
NESTED = ("reasoning", "output_config")  # where Responses and Messages say the effort


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """``sampling`` by the names of a body's fields; ``template`` by those of ``chat_template_kwargs``."""

    sampling: Mapping[str, float] = {}
    template: Mapping[str, Any] = {}

    def completed(self, fields: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
        """``fields`` (without nulls) of a body that has the fields ``known``, with what it says nothing of."""
        made = {name: value for name, value in self.sampling.items() if name in known} | dict(fields)
        own = fields.get(TEMPLATE, {})
        is_chat = TEMPLATE in known and "prompt" not in fields  # /tokenize takes mere text, too
        if self.template and is_chat and isinstance(own, dict):
            made[TEMPLATE] = self._open_switches(fields, own) | own
        return made

    def _open_switches(self, fields: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """The switches that the request does not set itself, under whichever name."""
        efforts = [holder[EFFORT] for holder in (fields, own) if holder.get(EFFORT) is not None]
        nested = [fields[name] for name in NESTED if isinstance(fields.get(name), dict)]
        efforts += [holder["effort"] for holder in nested if holder.get("effort") is not None]
        said = {name for holder in (fields, own) for name in THINKING if holder.get(name) is not None}
        is_settled = bool(said) or "none" in efforts
        return {
            name: value
            for name, value in self.template.items()
            if not (is_settled if name in THINKING else bool(efforts) or (value == "none" and is_settled))
        }


def defaults_of(options: ServerOptions) -> Defaults:
    return Defaults(
        sampling=sampling_override(options.override_generation_config),
        template=template_defaults(options.default_chat_template_kwargs),
    )
