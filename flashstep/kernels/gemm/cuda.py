"""Linear layers in CUDA C++ for Hopper (linear.cu): FP8 weights stay in their format and become bf16 in registers, exactly.

A weight lies in blocks of 64 outputs x 64 inputs in the order in which a matrix instruction takes them, each with its scales, so
that what a program reads is one run of bytes. The inputs are cut into chunks by the weight's shape alone; a chunk is one chain of
matrix instructions, chunks are added in order: a row's result depends neither on its neighbours nor on how many there are. Many
rows multiply with the weight expanded to bf16 (``triton.many_rows``), with the same chains. Knows no layer.
"""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional

from flashstep.kernels.gemm import triton as plain
from flashstep.kernels.jit import cuda_library, launched, programmatic
from flashstep.quant import e8m0, fp8_block
from flashstep.quant.tensor import QuantTensor

SOURCE = Path(__file__).with_name("linear.cu")
BLOCK = 64  # outputs, and inputs, of a block
HALF = 32  # inputs that share a scale; a 32-bit word holds two inputs of either half
CODES = BLOCK * BLOCK
RAISED = 120  # a code's bits read as bf16 are 2^-120 of its value
LARGEST_SCALE = 2.0 ** (127 - RAISED)
MULTIPROCESSORS = 132
SMALL_WEIGHT = 11 << 20  # numbers; one that is smaller is cut finer, as less of its time is the memory's
SHORTEST, CLUSTER = (
    4,
    8,
)  # steps of a chunk; chunks whose sums meet within a cluster (what every device can hold)
BF16 = 2  # a format of linear.cu beside 0 (scales of blocks) and 1 (of rows)
TILE_ROWS = (8, 16, 32, 48, 64, 96, 128)
WIDE = 128  # rows of a tile that takes 128 outputs and a multiprocessor of its own
FEW_OF_ONE = 64  # rows up to which a weight of one chunk takes tiles for few rows
ENOUGH_TILES, ENOUGH_PLAIN = 40, 60  # of 128 x 128 for programs that compute all of several chunks
MANY_ROWS = 1024  # from here on expanding the weight pays
SHARED_BYTES = 226 << 10  # of a multiprocessor
# a block as 32-bit words: (half a tile of 16 inputs, warp, row of eight, column of four, later eight inputs, later eight rows)
WORDS = (2, 4, 8, 4, 2, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight8:
    """``blocks`` uint8 [G, tiles, steps, bytes of a block]: codes, then bf16 scales x 2^120, of 32 x 32 or of rows x 32."""

    blocks: Tensor
    inputs: int
    outputs: int
    row_scales: bool
    grouped: bool

    def double(self) -> Tensor:
        """What the reference multiplies with, so that the switch can force one op: [O, I], or [G, I, O] of a grouped one."""
        groups, tiles, steps, _ = self.blocks.shape
        words = self.blocks[..., :CODES].contiguous().view(torch.int32).view(groups, tiles, steps, *WORDS)
        # -> group, tile, warp, later eight rows, row of eight, step, half a tile, later eight inputs, column of four
        words = words.permute(0, 1, 4, 8, 5, 2, 3, 7, 6).reshape(groups, tiles * BLOCK, steps, HALF // 2)
        codes = _codes(words.contiguous().view(torch.int16)).view(torch.float8_e4m3fn).double()
        scales = self.blocks[..., CODES:].contiguous().view(torch.bfloat16).double() * 2.0**-RAISED
        rows = BLOCK if self.row_scales else 2
        scales = scales[..., : rows * 2].unflatten(3, (rows, 2)).transpose(2, 3).flatten(1, 2)
        values = codes * scales.repeat_interleave(BLOCK // rows, 1).unsqueeze(4)  # [G, O, steps, 2, 32]
        weight_GOI = values.flatten(2)[:, : self.outputs, : self.inputs]
        return weight_GOI.transpose(1, 2).contiguous() if self.grouped else weight_GOI[0].contiguous()

    def expanded(self) -> Tensor:
        """bf16 [G * O, I], exactly."""
        groups = self.blocks.shape[0]
        out = torch.empty(groups * self.outputs, self.inputs, dtype=torch.bfloat16, device=self.blocks.device)
        launched(
            "expand",
            _library().expand(
                self.blocks.data_ptr(),
                out.data_ptr(),
                groups,
                self.outputs,
                self.inputs,
                self.row_scales,
                torch.cuda.current_stream(out.device).cuda_stream,
            ),
        )
        return out


def prepare_fp8(*weights: QuantTensor) -> Weight8:
    """See ``Gemm.prepare_fp8``. Scales stay one a block, unless rows of two weights would meet inside a block of 32."""
    row_scales = any(weight.shape[0] % fp8_block.BLOCK for weight in weights[:-1])
    scales = [e8m0.decode(weight.scale) for weight in weights]
    if row_scales:
        scales = [
            scale.repeat_interleave(fp8_block.BLOCK, 0)[: weight.shape[0]]
            for scale, weight in zip(scales, weights, strict=True)
        ]
    codes_OI = torch.cat([weight.data.view(torch.uint8) for weight in weights])
    return Weight8(
        blocks=_blocks(codes_OI, torch.cat(scales), row_scales=row_scales).unsqueeze(0),
        inputs=codes_OI.shape[1],
        outputs=codes_OI.shape[0],
        row_scales=row_scales,
        grouped=False,
    )


def prepare_fp8_grouped(weight: QuantTensor, *, groups: int) -> Weight8:
    """See ``Gemm.prepare_fp8_grouped``."""
    outputs = weight.shape[0] // groups
    assert outputs % fp8_block.BLOCK == 0, f"groups of {outputs} outputs do not begin at a block of 32"
    scales = e8m0.decode(weight.scale).unflatten(0, (groups, -1))
    codes = weight.data.view(torch.uint8).unflatten(0, (groups, -1))
    blocks = [_blocks(c, s, row_scales=False) for c, s in zip(codes, scales, strict=True)]
    return Weight8(
        blocks=torch.stack(blocks),
        inputs=weight.shape[1],
        outputs=outputs,
        row_scales=False,
        grouped=True,
    )


def lin8(quantised: Any, weight: Weight8) -> Tensor:
    """See ``Gemm.lin8``."""
    return _multiply(quantised.bfloat16().unsqueeze(1), weight).squeeze(
        1
    )  # bf16 holds the reference's float64 exactly


def prepare_bf16(*weights: Tensor) -> Tensor:
    """See ``Gemm.prepare_bf16``: bf16 [O, I], of rows that lie whole steps of 64 apart (as every released one does anyway)."""
    inputs = weights[0].shape[1]
    return functional.pad(torch.cat(weights), (0, -inputs % BLOCK)).contiguous()[:, :inputs]


def linb(x_TI: Tensor, weight: Tensor) -> Tensor:
    """See ``Gemm.linb``."""
    return _multiply_plain(x_TI, weight, torch.bfloat16)


def linf(x_TI: Tensor, weight: Tensor) -> Tensor:
    """See ``Gemm.linf``: products of bf16 numbers are exact in fp32, so matrix instructions lose nothing but their sums' bits."""
    return _multiply_plain(x_TI, weight, torch.float32)


def linb_grouped(x_TGI: Tensor, weight: Weight8) -> Tensor:
    """See ``Gemm.linb_grouped``."""
    assert weight.blocks.shape[0] == x_TGI.shape[1]
    return _multiply(x_TGI, weight)


def _blocks(codes_OI: Tensor, scale_OB: Tensor, *, row_scales: bool) -> Tensor:
    """uint8 [tiles, steps, bytes of a block] of codes and fp32 scales (of 32 x 32, or rows x 32), zeros beyond the end."""
    if (scale_OB > LARGEST_SCALE).any():
        raise ValueError(
            f"an FP8 weight has a scale of {scale_OB.max().item():g}; these kernels take scales up to {LARGEST_SCALE:g}"
        )
    codes_OI = functional.pad(codes_OI, (0, -codes_OI.shape[1] % BLOCK, 0, -codes_OI.shape[0] % BLOCK))
    tiles, steps = codes_OI.shape[0] // BLOCK, codes_OI.shape[1] // BLOCK
    words = _words(codes_OI.view(tiles * BLOCK, steps, 2, HALF)).view(torch.int32)  # [O, steps, 16]
    # [tile, warp, later eight rows, row of eight, step, half a tile, later eight inputs, column of four] -> WORDS
    words = words.view(tiles, 4, 2, 8, steps, 2, 2, 4).permute(0, 4, 5, 1, 3, 7, 6, 2)
    body = words.contiguous().view(torch.uint8).view(tiles, steps, CODES)
    rows = BLOCK if row_scales else 2
    scale_OB = functional.pad(
        scale_OB, (0, steps * 2 - scale_OB.shape[1], 0, tiles * rows - scale_OB.shape[0])
    )
    scales = (scale_OB * 2.0**RAISED).bfloat16().view(tiles, rows, steps, 2).transpose(1, 2)
    tail = scales.contiguous().view(torch.uint8).view(tiles, steps, rows * 4)
    return torch.cat((body, functional.pad(tail, (0, -rows * 4 % 16))), dim=2)


def _words(codes: Tensor) -> Tensor:
    """int16 [..., 32] of uint8 codes [..., 2, 32]: the first half lies where bf16's bits are, the other in what that leaves free.

    The sign of a second code lies in its neighbour's word, from where a rotation by four brings it to its place.
    """
    first, second = codes.int().unbind(-2)
    neighbour = second.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    word = ((first & 0x80) << 8) | ((first & 0x7F) << 4)
    word |= ((second & 0x78) << 8) | ((neighbour & 0x80) >> 4) | (second & 7)
    return torch.where(word < 1 << 15, word, word - (1 << 16)).to(torch.int16)


def _codes(words: Tensor) -> Tensor:
    """The uint8 [..., 2, 32] of which ``_words`` made ``words``."""
    word = words.int()
    neighbour = word.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    first = ((word >> 8) & 0x80) | ((word >> 4) & 0x7F)
    second = ((neighbour << 4) & 0x80) | ((word >> 8) & 0x78) | (word & 7)
    return torch.stack((first, second), dim=-2).to(torch.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a weight's inputs are cut: ``chunk`` steps of 64 inputs each, ``chunks`` of them. Follows from the weight alone."""

    chunk: int
    chunks: int

    @classmethod
    def of(cls, *, groups: int, inputs: int, outputs: int) -> "Cut":
        """As many chunks as make two programs of 64 outputs a multiprocessor, four of a small weight; at most a cluster's."""
        steps = triton.cdiv(inputs, BLOCK)
        tiles = triton.cdiv(outputs, BLOCK) * groups
        together = 4 if groups * inputs * outputs < SMALL_WEIGHT else 2
        wanted = min(max(together * MULTIPROCESSORS // tiles, 1), max(steps // SHORTEST, 1), CLUSTER)
        chunk = triton.cdiv(steps, wanted)
        return cls(chunk=chunk, chunks=triton.cdiv(steps, chunk))


def _multiply(x_TGI: Tensor, weight: Weight8) -> Tensor:
    """bf16 [T, G, O] of bf16 [T, G, I]."""
    rows, groups, inputs = x_TGI.shape
    assert inputs == weight.inputs
    cut = Cut.of(groups=groups, inputs=inputs, outputs=weight.outputs)
    if rows >= MANY_ROWS:
        return plain.many_rows(x_TGI, weight.expanded(), chunk=cut.chunk * BLOCK, dtype=torch.bfloat16)
    out_TGO = torch.empty(rows, groups, weight.outputs, dtype=torch.bfloat16, device=x_TGI.device)
    _launch(x_TGI, weight.blocks, out_TGO, cut=cut, form=1 if weight.row_scales else 0)
    return out_TGO


def _multiply_plain(x_TI: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, O] of bf16 [T, I] and a bf16 weight [O, I]."""
    rows, inputs = x_TI.shape
    assert inputs == weight.shape[1]
    cut = Cut.of(groups=1, inputs=inputs, outputs=weight.shape[0])
    x_TGI = x_TI.unsqueeze(1)
    if rows >= MANY_ROWS:
        return plain.many_rows(x_TGI, weight.contiguous(), chunk=cut.chunk * BLOCK, dtype=dtype).squeeze(1)
    out_TO = torch.empty(rows, weight.shape[0], dtype=dtype, device=x_TI.device)
    _launch(x_TGI, weight, out_TO.unsqueeze(1), cut=cut, form=BF16)
    return out_TO


class Tiles(NamedTuple):
    """What a program computes: 64 ``wide`` outputs of ``rows`` rows; all chunks (``loop``) of them, or one of a cluster's.

    ``together`` programs stand on a multiprocessor at once (``loop``), and their next 64 inputs take them ``us``.
    """

    wide: int
    rows: int
    loop: bool
    together: int = 1
    us: float = 0.0

    def programs(self, *, rows: int, groups: int, outputs: int) -> int:
        return triton.cdiv(rows, self.rows) * triton.cdiv(outputs, self.wide * BLOCK) * groups


# measured on an H200, 2026-12-01, at 96 to 768 rows; of bf16 weights those that win
LOOPED = (
    Tiles(wide=1, rows=64, loop=True, together=2, us=0.37),
    Tiles(wide=1, rows=96, loop=True, together=1, us=0.29),
    Tiles(wide=1, rows=96, loop=True, together=2, us=0.44),
    Tiles(wide=2, rows=128, loop=True, us=0.46),
)
LOOPED_PLAIN = (Tiles(wide=2, rows=96, loop=True, us=0.39), Tiles(wide=2, rows=128, loop=True, us=0.43))
# of weights of one chunk, besides
WIDEST, WIDEST_PLAIN = (Tiles(wide=3, rows=128, loop=True, us=us) for us in (0.68, 0.57))


@functools.cache  # every launch comes by
def tiles_of(*, rows: int, groups: int, outputs: int, chunks: int, plain: bool) -> Tiles:
    """Tiles for ``rows`` rows: where programs compute all chunks, those whose waves take the least. No result depends on it."""
    wide_tiles = triton.cdiv(rows, WIDE) * triton.cdiv(outputs, 2 * BLOCK) * groups
    enough = ENOUGH_PLAIN if plain else ENOUGH_TILES
    if rows <= (FEW_OF_ONE if chunks == 1 else WIDE) or (chunks > 1 and wide_tiles < enough):
        tile_rows = next((n for n in TILE_ROWS if n >= rows), WIDE)
        return Tiles(wide=2 if tile_rows == WIDE else 1, rows=tile_rows, loop=False)

    def us(tiles: Tiles) -> float:
        programs = tiles.programs(rows=rows, groups=groups, outputs=outputs)
        return triton.cdiv(programs, MULTIPROCESSORS * tiles.together) * tiles.us

    looped, widest = (LOOPED_PLAIN, WIDEST_PLAIN) if plain else (LOOPED, WIDEST)
    return min((*looped, widest) if chunks == 1 else looped, key=us)


def _launch(x_TGI: Tensor, weight: Tensor, out_TGO: Tensor, *, cut: Cut, form: int) -> None:
    rows, groups, inputs = x_TGI.shape
    if not rows:
        return
    if inputs % BLOCK:  # no released width
        x_TGI = functional.pad(x_TGI, (0, -inputs % BLOCK))
    if x_TGI.stride(2) != 1 or any(stride % 8 for stride in x_TGI.stride()[:2]) or x_TGI.data_ptr() % 16:
        x_TGI = x_TGI.contiguous()
    outputs = out_TGO.shape[2]
    tiles = tiles_of(rows=rows, groups=groups, outputs=outputs, chunks=cut.chunks, plain=form == BF16)
    call = _Call(
        x=x_TGI.data_ptr(),
        weight=weight.data_ptr(),
        out=out_TGO.data_ptr(),
        x_row=x_TGI.stride(0),
        x_group=x_TGI.stride(1),
        rows=rows,
        groups=groups,
        outputs=outputs,
        steps=triton.cdiv(inputs, BLOCK),
        format=form,
        wide=out_TGO.dtype is torch.float32,
        chunk=cut.chunk,
        chunks=cut.chunks,
        tile_rows=tiles.rows,
        loop=tiles.wide if tiles.loop else 0,
        shared=SHARED_BYTES // tiles.together
        if tiles.loop
        else _shared_bytes(
            tiles.rows,
            programs=tiles.programs(rows=rows, groups=groups, outputs=outputs) * cut.chunks,
            chunks=cut.chunks,
            form=form,
        ),
        programmatic=programmatic(x_TGI.device),
        stream=torch.cuda.current_stream(x_TGI.device).cuda_stream,
    )
    launched("linear", _library().linear(ctypes.byref(call)))


def _shared_bytes(tile_rows: int, *, programs: int, chunks: int, form: int) -> int:
    """What a program may take: all of them should stand at once, with room for one of the next launch.

    A large cluster wants more room, as it must lie within a part of the device.
    """
    if tile_rows == WIDE:
        return SHARED_BYTES
    together = triton.cdiv(programs, MULTIPROCESSORS)
    if form == BF16:
        together = min(together, 2)  # a wave of long programs is balanced better by those that come after it
    if chunks > 2 and programs > 0.84 * MULTIPROCESSORS * together:
        together += 1
    return SHARED_BYTES // min(max(together, 2), 5)


class _Call(ctypes.Structure):
    """``Call`` of linear.cu."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("x_group", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("outputs", ctypes.c_int),
        ("steps", ctypes.c_int),
        ("format", ctypes.c_int),
        ("wide", ctypes.c_int),
        ("chunk", ctypes.c_int),
        ("chunks", ctypes.c_int),
        ("tile_rows", ctypes.c_int),
        ("loop", ctypes.c_int),
        ("shared", ctypes.c_int),
        ("programmatic", ctypes.c_int),
        ("stream", ctypes.c_void_p),
    )


@functools.cache
@functools.cache  # every launch comes by
def _library() -> ctypes.CDLL:
    library = cuda_library(SOURCE)
    library.linear.argtypes = (ctypes.POINTER(_Call),)
    library.expand.argtypes = (*[ctypes.c_void_p] * 2, *[ctypes.c_int] * 4, ctypes.c_void_p)
    return library
