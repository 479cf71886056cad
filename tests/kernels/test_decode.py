"""Rows, verdict and drafts of decoding steps against the same said token by token, for every row of the table."""

import random
from typing import NamedTuple

import pytest
import torch

from flashstep.kernels.decode import NO_DRAFT, Decode, Fields, Laid
from tests.kernels.implementations import DEVICE, families

FAMILIES = families(Decode)
SLOTS, COLUMNS, PAD = 5, 7, 77
SHAPES = [
    (0, 1, 0),
    (1, 1, 1),
    (5, 4, 5),
    (5, 4, 2),
    (3, 2, 3),
    (8, 3, 8),
]  # drafts kept, look-back, verified
TOKENS = torch.arange(50) + 100  # compressed ids


class Case(NamedTuple):
    """A state of ``SLOTS`` slots and nobody's, and a step of three of them, nobody twice among them."""

    rows_SF: torch.Tensor
    tables_2SB: torch.Tensor
    slot_R: torch.Tensor
    bound_R: torch.Tensor
    news_2U: torch.Tensor


def case(fields: Fields, *, seed: int) -> Case:
    chance = random.Random(seed)
    rows_SF = torch.zeros(SLOTS + 1, fields.count, dtype=torch.int64)
    for slot in range(SLOTS):
        rows_SF[slot, :4] = torch.tensor(
            [chance.randrange(50), chance.randint(9, 20), chance.randint(1, 5), chance.randint(0, 9)]
        )
        rows_SF[slot, 4 : fields.previous] = torch.tensor(
            [chance.choice([chance.randrange(50)] * 5 + [NO_DRAFT]) for _ in range(fields.drafts)],
            dtype=torch.int64,
        )
        rows_SF[slot, fields.previous : fields.fixed] = torch.randint(100, 150, (fields.lookback - 1,))
        rows_SF[slot, fields.fixed :] = torch.randint(1 << 40, (6,))
    rows_SF[-1, :4] = torch.tensor([0, 1, 0, 0])
    rows_SF[-1, 4 : fields.previous] = NO_DRAFT
    rows_SF[-1, fields.previous : fields.fixed] = PAD
    tables_2SB = torch.randint(0, 99, (2, SLOTS + 1, COLUMNS))
    tables_2SB[:, -1] = -1
    slots = [*chance.sample(range(SLOTS), 3), -1, -1]
    places = [chance.randrange(SLOTS * COLUMNS), SLOTS * COLUMNS + COLUMNS, SLOTS * COLUMNS]
    return Case(
        rows_SF.to(DEVICE),
        tables_2SB.to(DEVICE),
        torch.tensor(slots, device=DEVICE),
        torch.tensor([chance.randint(0, fields.drafts) for _ in slots[:3]] + [-1, -1], device=DEVICE),
        torch.tensor([places, [1000, 1001, -1]], device=DEVICE),
    )


def lay_out(ops: Decode, case: Case, fields: Fields, verified: int) -> Laid:
    return ops.lay_out(
        case.rows_SF,
        case.tables_2SB,
        slot_R=case.slot_R,
        bound_R=case.bound_R,
        news_2U=case.news_2U,
        token_map_V=TOKENS.to(DEVICE),
        fields=fields,
        verified=verified,
    )


@pytest.mark.parametrize(("drafts", "lookback", "verified"), SHAPES)
@pytest.mark.parametrize("ops", FAMILIES)
def test_lay_out(ops: Decode, drafts: int, lookback: int, verified: int) -> None:
    fields = Fields(drafts=drafts, lookback=lookback)
    for seed in range(6):
        given = case(fields, seed=seed)
        before = given.tables_2SB.clone()
        laid = lay_out(ops, given, fields, verified)
        before.view(-1)[given.news_2U[0]] = given.news_2U[1]
        assert torch.equal(given.tables_2SB, before)
        assert torch.equal(laid.tables_2RB, before[:, given.slot_R])
        assert torch.equal(laid.numbers_RF, given.rows_SF[given.slot_R])
        row = 0
        for request, (slot, bound) in enumerate(
            zip(given.slot_R.tolist(), given.bound_R.tolist(), strict=True)
        ):
            numbers = given.rows_SF[slot].tolist()
            newest, length, outputs, room = numbers[:4]
            kept = numbers[4 : 4 + verified]
            wanted = [d if n < min(bound, room - 1) else NO_DRAFT for n, d in enumerate(kept)]
            assert laid.drafts_RW[request].tolist() == wanted
            tokens = [newest, *wanted]
            known = [*numbers[fields.previous : fields.fixed], *(100 + max(token, 0) for token in tokens)]
            assert laid.compressed_RX[request].tolist() == known
            for place, token in enumerate(tokens):
                end = lookback - 1 + place
                assert laid.input_ids_T[row] == max(token, 0) and laid.positions_T[row] == length - 1 + place
                assert laid.request_T[row] == request and bool(laid.store_T[row]) == (token >= 0)
                assert laid.lookback_TN[row].tolist() == [known[end - back] for back in range(lookback)]
                assert laid.temperature_T.view(torch.int64)[row] == numbers[fields.fixed]
                assert laid.seed_T[row] == numbers[fields.fixed + 3] and laid.output_T[row] == outputs + place
                row += 1


@pytest.mark.parametrize("by_lot", [False, True])
@pytest.mark.parametrize(("drafts", "lookback", "verified"), SHAPES)
@pytest.mark.parametrize("ops", FAMILIES)
def test_judge_and_keep_drafts(ops: Decode, drafts: int, lookback: int, verified: int, by_lot: bool) -> None:
    fields = Fields(drafts=drafts, lookback=lookback)
    chance = random.Random(drafts)
    for seed in range(12):
        given = case(fields, seed=seed)
        laid = lay_out(ops, given, fields, verified)
        targets = [
            [d if chance.random() < 0.7 else 49 - d for d in row] + [chance.randrange(50)]
            for row in laid.drafts_RW.tolist()
        ]
        lots = torch.tensor(
            [[chance.random() < 0.7 for _ in range(verified)] for _ in targets], dtype=torch.bool
        )
        expected = given.rows_SF.clone()
        outcomes = []
        proposed = [[chance.randrange(50) for _ in range(max(drafts - 1, 0))] for _ in targets]
        for request, slot in enumerate(given.slot_R.tolist()):
            wanted, target = laid.drafts_RW[request].tolist(), targets[request]
            accepted = 0
            while accepted < verified and wanted[accepted] >= 0:
                stands = lots[request, accepted] if by_lot else wanted[accepted] == target[accepted]
                if not stands:
                    break
                accepted += 1
            room = int(expected[slot, 3])
            steps = accepted + 1 if room > 0 else 0
            tokens = [*wanted[:accepted], *target[accepted:]]
            next_drafts = [*proposed[request], *[NO_DRAFT] * drafts][:drafts]
            if room - steps <= 1:
                next_drafts = [NO_DRAFT] * drafts
            outcomes.append([steps, sum(d >= 0 for d in wanted), *tokens, *next_drafts])
            known = laid.compressed_RX[request].tolist()
            if steps:
                expected[slot, 0] = target[accepted]
            expected[slot, 1:4] += torch.tensor([steps, steps, -steps], device=DEVICE)
            expected[slot, 4 : fields.previous] = torch.tensor(next_drafts, dtype=torch.int64)
            expected[slot, fields.previous : fields.fixed] = torch.tensor(
                known[steps : steps + lookback - 1], dtype=torch.int64
            )
        judged = ops.judge(
            given.rows_SF,
            laid,
            torch.tensor(targets, device=DEVICE).flatten(),
            slot_R=given.slot_R,
            by_lot_RW=lots.to(DEVICE) if by_lot else None,
            fields=fields,
        )
        assert torch.equal(judged.newest_R, expected[:, 0][given.slot_R])
        assert torch.equal(judged.position_R, expected[:, 1][given.slot_R] - 1)
        drafts_RP = torch.tensor(proposed, dtype=torch.int64, device=DEVICE).view(len(targets), -1)
        ops.keep_drafts(given.rows_SF, judged.outcome, drafts_RP, slot_R=given.slot_R, fields=fields)
        assert torch.equal(given.rows_SF, expected)
        assert judged.outcome.tolist() == outcomes
