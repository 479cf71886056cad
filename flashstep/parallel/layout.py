"""Layouts: how many devices share a model and how, and the view that one rank has of a model's configuration (torch-free).

Two layouts: ``tpN`` splits heads, output groups, inner widths and vocabulary N ways and repeats the rest; ``depN`` repeats
everything but the routed experts, of which each rank holds its part and some replicas. Emulation builds one rank on one device,
with nobody to exchange with. Knows configurations and shapes; no tensor, no device.
"""

import re

import msgspec

from flashstep.config.errors import ConfigError
from flashstep.config.model import MX_GROUP, ModelConfig

TP, DEP = "tp", "dep"
WRITTEN = re.compile(r"(tp|dep)([1-9][0-9]*):([0-9]+)")
REPLICA_SHARE = 12  # one replica for so many experts of a rank (48 + 4, 12 + 1: spec/performance.md 3.1)


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """``size`` devices that share a model by ``kind`` ("tp" or "dep"), seen from ``rank``."""

    kind: str = TP
    size: int = 1
    rank: int = 0

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read "tp4:0" or "dep8:3"; ``ConfigError`` for anything else."""
        found = WRITTEN.fullmatch(text)
        if found is None:
            raise ConfigError(
                "--emulate", [f"it is {text!r}; it is written tpN:RANK or depN:RANK, e.g. tp4:0 or dep8:3"]
            )
        kind, size, rank = found[1], int(found[2]), int(found[3])
        if rank >= size:
            raise ConfigError(
                "--emulate", [f"{text} asks for rank {rank}; ranks of {kind}{size} are 0..{size - 1}"]
            )
        return cls(kind=kind, size=size, rank=rank)

    @property
    def name(self) -> str:
        return f"{self.kind}{self.size}:{self.rank}"

    @property
    def tensor_parts(self) -> int:
        """How many parts heads, inner widths and vocabulary are cut into."""
        return self.size if self.kind == TP else 1

    @property
    def expert_parts(self) -> int:
        """How many parts the routed experts are dealt out to."""
        return self.size if self.kind == DEP else 1

    def local_experts(self, experts: int, *, replicas: bool = True) -> int:
        """Routed experts that a rank holds of ``experts``: its part, and its replicas of crowded ones."""
        part = experts // self.expert_parts
        return part + (part // REPLICA_SHARE if replicas and self.expert_parts > 1 else 0)

    def view(self, model: ModelConfig) -> ModelConfig:
        """``model`` with the sizes of one rank; ``ConfigError`` if it cannot be divided so.

        Token ids of ``model`` are folded onto the rank's part of the vocabulary.
        """
        problems = self._problems(model)
        if problems:
            raise ConfigError(f"--emulate {self.name}", problems)
        parts = self.tensor_parts
        if parts == 1:
            return model
        vocabulary = model.vocab_size // parts
        ids = (
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "image_token_id",
            "engram_pad_token_id",
            "dspark_noise_token_id",
        )
        return msgspec.structs.replace(
            model,
            num_attention_heads=model.num_attention_heads // parts,
            o_groups=model.o_groups // parts,
            moe_intermediate_size=model.moe_intermediate_size // parts,
            vocab_size=vocabulary,
            engram_compressed_vocab_size=min(model.engram_compressed_vocab_size, vocabulary),
            **{name: getattr(model, name) % vocabulary for name in ids},
        )

    def _problems(self, model: ModelConfig) -> list[str]:
        parts = self.tensor_parts
        divided = {
            "num_attention_heads": model.num_attention_heads,
            "o_groups": model.o_groups,
            "vocab_size": model.vocab_size,
            "(hc_mult + 1) * hidden_size": (model.hc_mult + 1) * model.hidden_size,
        }
        problems = [
            f"{name} is {size}, which {parts} ranks cannot share equally"
            for name, size in divided.items()
            if size % parts
        ]
        if model.moe_intermediate_size % (parts * MX_GROUP):
            problems.append(
                f"moe_intermediate_size is {model.moe_intermediate_size}; a rank's part of it must be a multiple of {MX_GROUP}"
            )
        counts = {"n_routed_experts": model.n_routed_experts}
        if model.num_nextn_predict_layers:
            counts["dspark_n_routed_experts"] = model.dspark_n_routed_experts
        problems += [
            f"{name} is {count}, which {self.expert_parts} ranks cannot share equally"
            for name, count in counts.items()
            if count % self.expert_parts
        ]
        return problems


WHOLE = Layout()


def local_expert_of(experts: int, *, parts: int, local: int) -> list[int]:
    """For each of ``experts`` the local expert, of ``local``, that its pairs go to on an emulated rank of ``parts``.

    A rank of N receives, from the rows of all N, as many pairs as its own rows send out, spread over its experts: those with a
    replica elsewhere, and its own replicas of others, see half of what the rest see (spec/floors.py counts them so). Folding the
    ids of all experts onto the local ones, twice as many onto the rest, gives the rank's own rows the same statistics. Ids stay
    in ascending order.
    """
    part = experts // parts
    halves = 2 * (local - part)  # replicated ones of its own, and its replicas of others
    rest = local - halves
    assert rest >= 0, f"{local} local experts of {part} are more than one replica each"
    shares = [2] * rest + [1] * halves
    total = sum(shares)
    bounds, seen = [], 0
    for share in shares:
        seen += share
        bounds.append(seen * experts // total)
    folded, place = [], 0
    for expert in range(experts):
        while expert >= bounds[place]:
            place += 1
        folded.append(place)
    return folded
