"""``flashstep bench chain``: the op chain of routers, one captured graph, timed by replays."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import tyro
from rich.table import Table

from flashstep.cli.flags import too_small
from flashstep.cli.recording import Recording
from flashstep.cli.terminal import INTERRUPTED, OUT, note

if TYPE_CHECKING:
    from flashstep.bench.chain import Measured
    from flashstep.bench.ledger import Entry


@dataclass(frozen=True, kw_only=True)
class BenchChain:
    """Time router GEMM, top-k and a consumer that feeds the next layer, all layers in one captured graph.

    One process gives the median of its replays; `flashstep bench compare` runs two builds in A B B A order and pairs them. On a
    CPU the chain is the references.
    """

    shapes: tuple[str, ...] = ()
    """EXPERTS/CHOSEN/HIDDEN/LAYERS[/SCORING], softmax (the default) or sqrt_softplus; without any the five of the
    specification, 512/10/2560/48 to 128/3/5120/40/sqrt_softplus"""
    tokens: tuple[int, ...] = (1, 16, 48)
    """rows that are routed"""
    replays: int = 21
    """timed replays of each chain, behind one that does not count"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the chain runs"""
    kernels: Literal["auto", "reference"] = "auto"
    """auto, or reference: plain torch everywhere, which on a CUDA device cannot be captured"""
    json: Path | None = None
    """write every replay's time to this file"""
    recording: tyro.conf.OmitArgPrefixes[Recording] = field(default_factory=Recording)

    def run(self) -> int:
        wrong = [f"--tokens holds {count}; it must be at least 1" for count in self.tokens if count < 1]
        wrong += too_small(self, {"replays": 1})
        if not self.tokens:
            wrong.append("--tokens is empty; give at least one number of rows")
        from flashstep.bench.chain import SHAPES, Shape, measure
        from flashstep.kernels.device import pick_device

        shapes = []
        for text in self.shapes:
            try:
                shapes.append(Shape.parse(text))
            except ValueError as error:
                wrong.append(f"--shapes: {error}")
        if self.kernels == "reference" and pick_device(self.device).type == "cuda":
            wrong.append(
                "--kernels reference waits for the host, and no graph can hold that; add --device cpu"
            )
        wrong += self.recording.problems({"--json": self.json})
        if wrong:
            raise ValueError("; ".join(wrong))
        measured: list[Measured] = []
        faults: tuple[str, ...] = ()
        try:
            for item in measure(
                shapes or SHAPES, self.tokens, replays=self.replays, device=self.device, kernels=self.kernels
            ):
                measured.append(item)
                note(f"{item.name}: {item.median_us:,.1f} us")
        except KeyboardInterrupt:
            faults = ("it was interrupted",)
        if self.json is not None:
            self.json.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1))
        OUT.print(_table(measured))
        self.recording.keep(self._entry(measured, faults, shapes=[shape.name for shape in shapes or SHAPES]))
        return INTERRUPTED if faults else 0

    def _entry(self, measured: "list[Measured]", faults: tuple[str, ...], *, shapes: list[str]) -> "Entry":
        """A sample for each chain, the median of its replays; the replays are the detail."""
        from flashstep.bench.ledger import Entry, Samples
        from flashstep.bench.origin import origin

        medians = tuple(item.median_us for item in measured)
        return Entry(
            kind="chain",
            origin=origin(),
            settings={"shapes": shapes, "tokens": list(self.tokens), "replays": self.replays},
            subject={"device": self.device, "kernels": self.kernels},
            samples=Samples(
                unit="chain", keys=tuple(item.name for item in measured), columns={"chain_us": medians}
            ),
            metrics={"chain_us": sum(medians) / len(medians)} if medians else {},
            detail={"chains": msgspec.to_builtins(measured)},
            faults=faults,
            complete=not faults,
        )


def _table(measured: "list[Measured]") -> Table:
    table = Table(
        "chain x tokens", title="op chain: median of one replay, microseconds", title_justify="left"
    )
    table.columns[0].no_wrap = True
    for name in ("us", "a layer", "least", "most", "kernels", "PDL"):
        table.add_column(name, justify="right")
    for item in measured:
        table.add_row(
            item.name,
            f"{item.median_us:,.1f}",
            f"{item.median_us / item.layers:,.2f}",
            f"{min(item.us):,.1f}",
            f"{max(item.us):,.1f}",
            *("-" if count is None else str(count) for count in (item.kernels, item.programmatic)),
        )
    return table
