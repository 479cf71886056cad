"""One step of decoding, on the device: the newest tokens and their drafts through the target, verdict, next drafts.

``DecodeStep`` owns the function (``run``) and its CUDA graphs; ``state`` is what it reads and advances. It has the law of
``speculate.verify`` for point masses and for acceptance by lot, and the sampler's for rows without penalties and grammars, and
waits for no value. A CPU runs the same function, without graphs. Takes a model; knows no plan and no history: ``runner`` says
which slots decode. Suffixes: R requests, W drafts that a request verifies at most, T = R (1 + W) rows, P drafts that are made of
it, V vocabulary; others: ``kernels.decode``.

For benches: ``occupy`` puts made-up requests into the state, ``capture`` and ``replay`` time a step or a part of it.

    step.occupy(8, context=131_072)                 # slots 0 .. 7; records are the caller's to fill (bench.cases.fill)
    step.capture(8)                                 # a CUDA graph; on a CPU nothing
    step.replay(8)                                  # does not wait; each request is 1 to 1 + W tokens further then
    step.capture(8, part=Part.TARGET)
    step.replay(8, part=Part.TARGET)
"""

import enum
import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from flashstep.config.speculative import Speculation
from flashstep.kernels import Ops
from flashstep.kernels.decode import Laid
from flashstep.kernels.sampling.philox import Purpose, uniforms
from flashstep.model.batch import DraftBatch, ForwardBatch
from flashstep.model.transformer import Transformer
from flashstep.runner.staging import send
from flashstep.runner.state import DecodeState, Numbers

SPARE = 4096  # positions that ``occupy`` leaves each request to go on


class Part(enum.Enum):
    """What a graph holds: the whole step, or a piece of it, for benches.

    TARGET: the rows of the state through the backbone to logits (with the records for the draft), nothing sampled. DRAFT: draft
    layers and chain behind the newest tokens; the drafts are thrown away.
    """

    STEP = "step"
    TARGET = "target"
    DRAFT = "draft"


class Form(NamedTuple):
    """What a graph is made for: all that its kernels' launches depend on.

    ``requests`` R, ``verified`` W, ``proposed`` drafts made for the next step, ``cuts`` whether some row has a top-k, top-p or
    min-p.
    """

    requests: int
    verified: int
    proposed: int
    cuts: bool = False
    part: Part = Part.STEP

    @property
    def rows(self) -> int:
        return self.requests * (1 + self.verified)


class DecodeStep:
    """See the module's docstring. ``token_map_V`` int64 holds compressed ids, on the state's device.

    ``speculation`` None: no drafts; its method must be greedy, and not adaptive. Graphs share one pool of memory: they are
    replayed one after the other.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        state: DecodeState,
        ops: Ops,
        token_map_V: Tensor,
        speculation: Speculation | None,
    ) -> None:
        self.state = state
        self._model = model
        self._ops = ops
        self._token_map_V = token_map_V
        self._speculation = speculation
        self._graphs: dict[Form, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if state.device.type == "cuda" else None
        self._rates_W: Tensor | None = None
        if speculation is not None and speculation.synthetic:
            self._rates_W = torch.tensor(_conditional(speculation.acceptance_rates), dtype=torch.float64).to(
                state.device
            )

    # ---- the function --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, form: Form) -> Tensor:
        """A step of what the inbox says -> what came of it: ``kernels.decode.Judged.outcome``, or what another part gives."""
        state, fields = self.state, self.state.fields
        letter = state.letter(form.requests)
        slot_R = letter.slot_R
        laid = self._ops.decode.lay_out(
            state.rows_SF,
            state.tables_2SB,
            slot_R=slot_R,
            bound_R=letter.bound_R,
            news_2U=letter.news_2U,
            token_map_V=self._token_map_V,
            fields=fields,
            verified=form.verified,
        )
        numbers = state.numbers(laid.numbers_RF)
        if form.part is Part.DRAFT:
            return self._drafts(form, laid, numbers, numbers.newest_R, numbers.length_R - 1)
        logits_TV = self._model.forward(self._batch(laid, numbers, slot_R))
        if form.part is Part.TARGET:
            return logits_TV
        judged = self._ops.decode.judge(
            state.rows_SF,
            laid,
            self._sample(form, laid, numbers, logits_TV),
            slot_R=slot_R,
            by_lot_RW=self._by_lot(numbers, form.verified),
            fields=fields,
        )
        if form.proposed:
            drafts_RP = self._drafts(form, laid, numbers, judged.newest_R, judged.position_R)
        else:
            drafts_RP = slot_R.new_empty(form.requests, 0)
        self._ops.decode.keep_drafts(state.rows_SF, judged.outcome, drafts_RP, slot_R=slot_R, fields=fields)
        return judged.outcome

    def _counted(self, numbers: Numbers) -> Tensor | None:
        """Whose rows count as load of the experts: who may have a token, so nobody's do not. None: loads are not recorded."""
        return numbers.room_R > 0 if self._model.records_loads else None

    def _batch(self, laid: Laid, numbers: Numbers, slot_R: Tensor) -> ForwardBatch:
        counted_R = self._counted(numbers)
        return ForwardBatch(
            input_ids_T=laid.input_ids_T,
            positions_T=laid.positions_T,
            request_T=laid.request_T,
            slot_R=slot_R,
            block_table_RB=laid.tables_2RB[0],
            window_table_RB=laid.tables_2RB[1],
            window_start_R=numbers.window_start_R.contiguous(),
            store_T=laid.store_T,
            lookback_TN=laid.lookback_TN,
            logit_rows=None,
            counted_T=None if counted_R is None else laid.store_T & _each_row(counted_R, laid),
        )

    def _sample(self, form: Form, laid: Laid, numbers: Numbers, logits_TV: Tensor) -> Tensor:
        """What the sampler draws in each row, int64 [T]."""

        least_T = None
        if form.cuts:
            least_T = self._ops.sampling.least_kept(
                logits_TV,
                temperature_T=laid.temperature_T,
                top_k_T=_each_row(numbers.top_k_R, laid),
                top_p_T=_each_row(numbers.top_p_R, laid),
                min_p_T=_each_row(numbers.min_p_R, laid),
            )
        return self._ops.sampling.sample(
            logits_TV,
            temperature_T=laid.temperature_T,
            seed_T=laid.seed_T,
            position_T=laid.output_T,
            least_T=least_T,
        )

    def _by_lot(self, numbers: Numbers, verified: int) -> Tensor | None:
        """Whether each draft stands whatever it is, bool [R, W], if acceptance is synthetic."""
        if self._rates_W is None:
            return None
        uniforms_RW = uniforms(numbers.seed_R, numbers.outputs_R - 1, count=verified, purpose=Purpose.ACCEPT)
        return uniforms_RW < self._rates_W[:verified]

    def _drafts(
        self, form: Form, laid: Laid, numbers: Numbers, newest_R: Tensor, position_R: Tensor
    ) -> Tensor:
        """The next drafts behind ``newest_R``, which stands at ``position_R``; int64 [R, form.proposed]."""
        draft = self._model.draft
        assert draft is not None, "a model without draft layers is asked for drafts"
        block = draft.propose(
            DraftBatch(
                anchor_R=newest_R,
                position_R=position_R,
                window_table_RB=laid.tables_2RB[1],
                window_start_R=numbers.window_start_R.contiguous(),
                counted_R=self._counted(numbers),
            )
        )
        return draft.chain(block, newest_R, places=form.proposed)

    # ---- graphs --------------------------------------------------------------------------------------------------

    @property
    def forms(self) -> Sequence[Form]:
        """What has been captured."""
        return tuple(self._graphs)

    def form(self, requests: int, *, verified: int, proposed: int, cuts: bool) -> Form:
        """The smallest captured form in which ``requests`` requests can do this, or, where there is none, just this.

        More drafts than a plan wants may be verified and made: bounds hold the one, ``proposed`` must be met exactly.
        """
        fitting = [
            form
            for form in self._graphs
            if form.part is Part.STEP
            and form.requests >= requests
            and form.verified >= verified
            and form.proposed == proposed
            and form.cuts >= cuts
        ]
        return min(fitting, default=Form(requests, verified, proposed, cuts))

    def capture_all(self, *, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every form that steady decoding has, for 1 to all slots; ``progress`` hears how many of how many are done.

        Nobody decodes meanwhile: nothing is written. The largest come first, so that the smaller find their memory.
        """
        forms = self._steady_forms()
        with _nothing_collected():
            for done, form in enumerate(forms):
                if progress is not None:
                    progress(done, len(forms))
                letter = self.state.blank(form.requests)
                send(letter, self.state.inbox[: len(letter)])
                self.capture_form(form)
        if progress is not None:
            progress(len(forms), len(forms))

    def _steady_forms(self) -> list[Form]:
        """Largest first. Where the number of drafts follows the batch, each size has the depths of the batches that it serves."""
        found, before = [], 0
        for size in sizes(self.state.num_slots):
            depths = {self._depth(requests) for requests in range(before + 1, size + 1)}
            found += [Form(size, depth, depth, cuts) for depth in sorted(depths) for cuts in (False, True)]
            before = size
        return found[::-1]

    def _depth(self, requests: int) -> int:
        return self._speculation.depth(requests) if self._speculation is not None else 0

    def capture_form(self, form: Form) -> None:
        """Warm up and capture ``form``, on whatever the inbox holds: the warm-up is a step, and advances the state."""
        if form in self._graphs or self._pool is None:
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run(form)  # compiles, and allocates what stays
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with (
            torch.inference_mode(),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            outcome = self.run(form)
        self._graphs[form] = (graph, outcome)

    def launch(self, form: Form) -> Tensor:
        """Queue a step of what the inbox says, by its graph if there is one -> what ``run`` gives, until the next launch."""
        if form not in self._graphs:
            return self.run(form)
        graph, outcome = self._graphs[form]
        graph.replay()
        return outcome

    # ---- for benches ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def occupy(
        self,
        requests: int,
        *,
        context: int,
        num_blocks: int,
        num_window_blocks: int,
        window: int,
        vocabulary: int,
        temperature: float = 0.0,
    ) -> None:
        """Slots 0 .. ``requests`` - 1 as if each had ``context`` tokens and a newest one behind them, with random drafts.

        The blocks are those of a pool of ``num_blocks`` and ``num_window_blocks``; requests share them where it holds fewer than
        they need. Tokens lie below ``vocabulary``. There is room to go on for ``SPARE`` positions, or to the limit.
        """
        state = self.state
        if requests > state.num_slots or context + 2 > state.max_model_len:
            raise ValueError(
                f"{requests} requests behind {context} tokens were asked for; this state holds {state.num_slots} of at most "
                f"{state.max_model_len}"
            )
        spare = min(SPARE, state.max_model_len - context - 1)
        columns = min(-(-(context + spare) // state.block_size) + 1, state.columns)
        first = max(context - window, 0) // state.block_size
        here = torch.arange(requests, device=state.device)
        column_B = torch.arange(columns, device=state.device)
        state.tables_2SB[:, :requests] = -1
        state.tables_2SB[0, :requests, :columns] = (here.unsqueeze(1) * columns + column_B) % num_blocks
        state.tables_2SB[1, :requests, first:columns] = (
            here.unsqueeze(1) * (columns - first) + column_B[: columns - first]
        ) % num_window_blocks
        numbers = state.numbers(state.rows_SF[:requests])
        state.rows_SF[:requests] = 0
        numbers.newest_R.random_(0, vocabulary)
        numbers.drafts_RK.random_(0, vocabulary)
        numbers.previous_RN.copy_(self._token_map_V[torch.zeros_like(numbers.previous_RN)])
        numbers.length_R.fill_(context + 1)
        numbers.room_R.fill_(spare)
        numbers.temperature_R.fill_(temperature)
        numbers.top_p_R.fill_(1.0)
        numbers.seed_R.copy_(here)

    def _bench_form(self, requests: int, part: Part) -> Form:
        depth = self._depth(requests)
        return Form(requests, depth, depth, part=part)

    def capture(self, requests: int, *, part: Part = Part.STEP) -> None:
        """Warm up and capture ``part`` for slots 0 .. ``requests`` - 1."""
        self.address(requests)
        self.capture_form(self._bench_form(requests, part))

    def replay(self, requests: int, *, part: Part = Part.STEP) -> Tensor:
        """Launch what was captured, without waiting; where nothing was (a CPU) it runs here and now. Gives what ``run`` gives.

        The inbox must still hold what ``address`` has put there (``capture`` does so too): one number of requests at a time.
        """
        return self.launch(self._bench_form(requests, part))

    def address(self, requests: int) -> None:
        """Put slots 0 .. ``requests`` - 1 into the inbox, with all drafts allowed: what replays read from then on."""
        letter = self.state.blank(requests)
        letter[:requests] = torch.arange(requests)
        letter[requests : 2 * requests] = self.state.drafts
        send(letter, self.state.inbox[: len(letter)])


def sizes(most: int) -> list[int]:
    """Numbers of requests that graphs are captured for, up to ``most``: each up to 8, then an eighth to a quarter apart."""
    found, size = [], 1
    while size < most:
        found.append(size)
        size += max(1, 1 << max(size.bit_length() - 3, 0))
    return [*found, most]


@contextmanager
def _nothing_collected() -> Generator[None]:
    """No garbage is collected inside: another runner's pinned tables would be given back in the middle of a capture, which
    CUDA answers with error 901 and an invalid graph. What is garbage already goes before.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _each_row(of_R: Tensor, laid: Laid) -> Tensor:
    """A value for each request -> [T], for each of its rows."""
    return of_R.unsqueeze(1).expand(-1, laid.input_ids_T.shape[0] // of_R.shape[0]).flatten()


def _conditional(rates: Sequence[float]) -> list[float]:
    """Unconditional rates of acceptance -> each given that the drafts before it stand (``verify.accept_synthetic``)."""
    before = [1.0, *rates]
    return [rate / last if last > 0 else 0.0 for last, rate in zip(before, rates, strict=False)]
