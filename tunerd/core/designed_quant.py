"""How designed models store numbers: f32, f16, or ggml's q8_0."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

BLOCK = 32
Q8_0_LEVELS = 127


class Quant(StrEnum):
    """How matrices are stored; vectors are f32 in any case, as real files have them."""

    Q8_0 = "q8_0"
    F16 = "f16"
    F32 = "f32"

    @property
    def file_type(self) -> int:
        """The number that `general.file_type` has for it."""
        return {Quant.F32: 0, Quant.F16: 1, Quant.Q8_0: 7}[self]

    def n_bytes(self, n_values: int) -> int:
        """Bytes of `n_values` stored this way (a multiple of 32 for q8_0)."""
        match self:
            case Quant.F32:
                return 4 * n_values
            case Quant.F16:
                return 2 * n_values
            case Quant.Q8_0:
                return n_values // BLOCK * (BLOCK + 2)


def encode(values: npt.NDArray[np.float32], quant: Quant) -> npt.NDArray[np.uint8]:
    """Values as a file stores them; the last axis of the result counts bytes.

    Source:
        ggml's q8_0: blocks of 32 as an f16 scale (largest magnitude / 127) and 32 signed bytes,
        rounded half away from zero. Compared with gguf's own in tests/unit/test_designed.py.
    """
    rows = values.reshape(-1, values.shape[-1])
    match quant:
        case Quant.F32:
            return np.ascontiguousarray(rows, "<f4").view(np.uint8)
        case Quant.F16:
            return np.ascontiguousarray(rows, "<f2").view(np.uint8)
        case Quant.Q8_0:
            blocks = rows.reshape(rows.shape[0], -1, BLOCK)
            scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(Q8_0_LEVELS)
            with np.errstate(divide="ignore"):
                inverse = np.where(scale > 0, 1 / scale, 0).astype(np.float32)
            steps = blocks * inverse
            levels = np.trunc(steps + np.copysign(np.float32(0.5), steps)).astype(np.int8)
            return pack_q8_0(levels.reshape(rows.shape), scale[:, :, 0].astype(np.float16))


def pack_q8_0(
    levels: npt.NDArray[np.int8], scale: npt.NDArray[np.float16] | np.float16
) -> npt.NDArray[np.uint8]:
    """Rows of signed steps and the size of a step, for each block of 32 or for all."""
    n_rows, n_blocks = levels.shape[0], levels.shape[1] // BLOCK
    packed = np.empty((n_rows, n_blocks, 2 + BLOCK), np.uint8)
    scales = np.broadcast_to(scale, (n_rows, n_blocks)).astype("<f2")
    packed[:, :, :2] = scales[:, :, None].view(np.uint8)
    packed[:, :, 2:] = levels.view(np.uint8).reshape(n_rows, n_blocks, BLOCK)
    return packed.reshape(n_rows, -1)


def decode(data: npt.NDArray[np.uint8], quant: Quant, width: int) -> npt.NDArray[np.float32]:
    """The values of stored rows of `width` values each, as an engine reads them."""
    match quant:
        case Quant.F32:
            return data.reshape(-1).view("<f4").reshape(-1, width).astype(np.float32)
        case Quant.F16:
            return data.reshape(-1).view("<f2").reshape(-1, width).astype(np.float32)
        case Quant.Q8_0:
            blocks = np.ascontiguousarray(data).reshape(-1, 2 + BLOCK)
            scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
            levels = np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)
            return (scale * levels).reshape(-1, width)
