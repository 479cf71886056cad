"""Rows, verdict and drafts of a decoding step in plain torch; it waits for no value."""

import torch
from torch import Tensor
from torch.nn import functional

from flashstep.kernels.decode import NO_DRAFT, Fields, Judged, Laid


def lay_out(
    rows_SF: Tensor,
    tables_2SB: Tensor,
    *,
    slot_R: Tensor,
    bound_R: Tensor,
    news_2U: Tensor,
    token_map_V: Tensor,
    fields: Fields,
    verified: int,
) -> Laid:
    """See ``Decode.lay_out``."""
    tables_2SB.view(-1)[news_2U[0]] = news_2U[1]
    numbers_RF = rows_SF[slot_R]
    newest_R1, length_R1, outputs_R1, room_R1 = numbers_RF[:, :4].split(1, dim=1)
    places_T = torch.arange(1 + verified, device=slot_R.device)
    allowed_R1 = torch.minimum(bound_R.unsqueeze(1), room_R1 - 1)
    drafts_RW = numbers_RF[:, 4 : 4 + verified]
    drafts_RW = torch.where(places_T[:verified] < allowed_R1, drafts_RW, NO_DRAFT)
    tokens_RT = torch.cat((newest_R1, drafts_RW), dim=1)
    ids_RT = tokens_RT.clamp(min=0)  # a draft that is none: some token, whose row nobody reads
    previous_RN = numbers_RF[:, fields.previous : fields.fixed]
    compressed_RX = torch.cat((previous_RN, token_map_V[ids_RT]), dim=1)

    def each_row(of_R: Tensor) -> Tensor:
        return of_R.unsqueeze(1).expand_as(ids_RT).flatten()

    return Laid(
        numbers_RF=numbers_RF,
        drafts_RW=drafts_RW,
        compressed_RX=compressed_RX,
        input_ids_T=ids_RT.flatten(),
        positions_T=(length_R1 - 1 + places_T).flatten(),
        request_T=each_row(torch.arange(slot_R.shape[0], device=slot_R.device)),
        store_T=(tokens_RT >= 0).flatten(),
        lookback_TN=compressed_RX.unfold(1, fields.lookback, 1).flip(2).flatten(0, 1),
        temperature_T=each_row(numbers_RF.view(torch.float64)[:, fields.fixed]),
        seed_T=each_row(numbers_RF[:, fields.fixed + 3]),
        output_T=(outputs_R1 + places_T).flatten(),
        tables_2RB=tables_2SB[:, slot_R],
    )


def judge(
    rows_SF: Tensor,
    laid: Laid,
    targets_T: Tensor,
    *,
    slot_R: Tensor,
    by_lot_RW: Tensor | None,
    fields: Fields,
) -> Judged:
    """See ``Decode.judge``."""
    newest_R, length_R, outputs_R, room_R = laid.numbers_RF[:, :4].unbind(1)
    drafts_RW, targets_RT = laid.drafts_RW, targets_T.view(slot_R.shape[0], -1)
    present_RW = drafts_RW >= 0
    stands_RW = present_RW & (drafts_RW == targets_RT[:, :-1] if by_lot_RW is None else by_lot_RW)
    accepted_R1 = stands_RW.long().cumprod(dim=1).sum(dim=1, keepdim=True)
    steps_R = torch.where(room_R > 0, accepted_R1.squeeze(1) + 1, 0)
    newest_R = torch.where(room_R > 0, targets_RT.gather(1, accepted_R1).squeeze(1), newest_R)
    before_N = torch.arange(fields.lookback - 1, device=slot_R.device)
    four_R4 = torch.stack((newest_R, length_R + steps_R, outputs_R + steps_R, room_R - steps_R), dim=1)
    rows_SF[:, :4][slot_R] = four_R4
    rows_SF[:, fields.previous : fields.fixed][slot_R] = laid.compressed_RX.gather(
        1, steps_R.unsqueeze(1) + before_N
    )
    places_T = torch.arange(targets_RT.shape[1], device=slot_R.device)
    tokens_RT = torch.where(places_T < accepted_R1, functional.pad(drafts_RW, (0, 1)), targets_RT)
    counts_R2 = torch.stack((steps_R, present_RW.sum(dim=1)), dim=1)
    outcome = functional.pad(torch.cat((counts_R2, tokens_RT), dim=1), (0, fields.drafts), value=NO_DRAFT)
    return Judged(newest_R=newest_R, position_R=length_R + steps_R - 1, outcome=outcome)


def keep_drafts(
    rows_SF: Tensor, outcome: Tensor, drafts_RP: Tensor, *, slot_R: Tensor, fields: Fields
) -> None:
    """See ``Decode.keep_drafts``."""
    room_R1 = rows_SF[:, 3][slot_R].unsqueeze(1)
    drafts_RK = functional.pad(drafts_RP, (0, fields.drafts - drafts_RP.shape[1]), value=NO_DRAFT)
    drafts_RK = torch.where(room_R1 > 1, drafts_RK, NO_DRAFT)
    rows_SF[:, 4 : fields.previous][slot_R] = drafts_RK
    if fields.drafts:
        outcome[:, -fields.drafts :] = drafts_RK
