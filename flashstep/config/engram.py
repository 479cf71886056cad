"""Where the Engram tables live: what the user may say, under the field names of vLLM's ``--engram-config``, and what it means.

The released tables are 2 x 97 GB. A GPU reads them out of pinned host memory over PCIe (``cpu_offload``, the default), or out of
its own; a CPU has one memory. Torch-free; who holds the bytes is ``flashstep.engram``.
"""

import enum
import json
from typing import Any

import msgspec

from flashstep.config.errors import ConfigError
from flashstep.config.objects import read_object

SUBJECT = "--engram-config"
AUTO = "auto"


class Place(enum.Enum):
    """Where a table's rows lie: the value says it in a sentence that begins "the Engram tables are"."""

    DEVICE = "in the GPU's memory"
    PINNED = "in pinned host memory"
    SHARED = "in pinned host memory, one copy for all processes of this host"
    MEMORY = "in memory"
    MAPPED = "memory-mapped on disk"


class EngramOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``--engram-config``.

    ``cpu_offload``: the rows stay in host memory. ``use_thp``: that memory is asked of the kernel as transparent huge pages.
    ``dp_shared_memory``: one copy a host; None ("auto") means where several ranks of a host would each hold one.
    ``embedding_across_dp``: each rank holds a part.
    """

    cpu_offload: bool = True
    use_thp: bool = False
    embedding_across_dp: bool = False
    dp_shared_memory: bool | None = None

    @classmethod
    def parse(cls, text: str) -> "EngramOptions":
        """The options that the JSON object ``text`` holds, or ``ConfigError`` with everything that is wrong on any device."""
        fields, problems = read_object(text, example='{"cpu_offload": false}')
        values: dict[str, Any] = {}
        for name, value in fields.items():
            if name not in cls.__struct_fields__:
                known = ", ".join(cls.__struct_fields__)
                problems.append(f"{name} is not a known field; known are {known}")
            elif name == "dp_shared_memory" and value == AUTO:
                values[name] = None
            elif not isinstance(value, bool):
                also = f', or "{AUTO}"' if name == "dp_shared_memory" else ""
                problems.append(f"{name} is {json.dumps(value)}; it must be true or false{also}")
            else:
                values[name] = value
        options = cls(**values)
        problems += options.problems()
        if problems:
            raise ConfigError(SUBJECT, problems)
        return options

    @property
    def text(self) -> str:
        """The JSON object that says what differs from the defaults."""
        default = type(self)()
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return json.dumps({name: value for name, value in fields.items() if value != getattr(default, name)})

    def problems(self) -> list[str]:
        """Mixes that cannot be meant, on whatever device."""
        found = []
        if self.embedding_across_dp:
            found.append(
                "embedding_across_dp is true, and there is one rank, with nobody to share rows with; leave it out"
            )
        if self.dp_shared_memory and not self.cpu_offload:
            found.append("dp_shared_memory is true and cpu_offload is false: only host memory can be shared")
        if self.use_thp and not self.cpu_offload:
            found.append("use_thp is true and cpu_offload is false: huge pages are of host memory")
        if self.use_thp and self.dp_shared_memory:
            found.append(
                "use_thp and dp_shared_memory are both true: a shared copy has pages of its own kind; leave use_thp out"
            )
        return found

    def problems_on(self, device: str, *, has_files: bool) -> list[str]:
        """What cannot be meant on ``device`` ("cpu", "cuda"); ``has_files`` where the tables come of a checkpoint."""
        found = []
        if device == "cpu" and not self.cpu_offload:
            found.append("cpu_offload is false and the device is the CPU, which has one memory; leave it out")
        if device == "cpu" and self.dp_shared_memory and not has_files:
            found.append(
                "dp_shared_memory on a CPU maps the checkpoint's files, and dummy weights lie in none; leave it out"
            )
        return found

    def told(self, device: str) -> str:
        """Where the rows lie, in words; "auto" is not known yet."""
        places = [self.place(name).value for name in (("cuda", "cpu") if device == AUTO else (device,))]
        return places[0] if len(set(places)) == 1 else f"{places[0]}, or without a GPU {places[1]}"

    def place(self, device: str) -> Place:
        """Where the rows lie on ``device``."""
        if not self.cpu_offload:
            return Place.DEVICE
        if device == "cpu":
            return Place.MAPPED if self.dp_shared_memory else Place.MEMORY
        return Place.SHARED if self.dp_shared_memory else Place.PINNED
