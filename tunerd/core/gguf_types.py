"""Tensor types of GGUF files: their number, name, and how many bytes a row takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class TensorType:
    """How values of one type are stored.

    A row of `n` values takes `n / block * block_bytes + row_bytes` bytes.
    """

    name: str
    block: int
    block_bytes: int
    row_bytes: int = 0

    def row_size(self, n_values: int) -> int | None:
        """Bytes of a row of so many values; None if they do not fill whole blocks."""
        if n_values % self.block:
            return None
        return n_values // self.block * self.block_bytes + self.row_bytes

    @property
    def bytes_per_value(self) -> float:
        """Bytes of one value, without what is kept per row."""
        return self.block_bytes / self.block


# Source: ggml-common.h and ggml.h of llama.cpp and ik_llama.cpp. Numbers from 97 on are ik's own
# (`_R4`, `_R8`, `_R16` are rows interleaved for its CPU kernels). Types that exist only while
# computing (q8_1, q8_K) are never stored and left out.
_ROWS: tuple[tuple[int, TensorType], ...] = (
    (0, TensorType("f32", 1, 4)),
    (1, TensorType("f16", 1, 2)),
    (2, TensorType("q4_0", 32, 18)),
    (3, TensorType("q4_1", 32, 20)),
    (6, TensorType("q5_0", 32, 22)),
    (7, TensorType("q5_1", 32, 24)),
    (8, TensorType("q8_0", 32, 34)),
    (10, TensorType("q2_K", 256, 84)),
    (11, TensorType("q3_K", 256, 110)),
    (12, TensorType("q4_K", 256, 144)),
    (13, TensorType("q5_K", 256, 176)),
    (14, TensorType("q6_K", 256, 210)),
    (16, TensorType("iq2_xxs", 256, 66)),
    (17, TensorType("iq2_xs", 256, 74)),
    (18, TensorType("iq3_xxs", 256, 98)),
    (19, TensorType("iq1_s", 256, 50)),
    (20, TensorType("iq4_nl", 32, 18)),
    (21, TensorType("iq3_s", 256, 110)),
    (22, TensorType("iq2_s", 256, 82)),
    (23, TensorType("iq4_xs", 256, 136)),
    (24, TensorType("i8", 1, 1)),
    (25, TensorType("i16", 1, 2)),
    (26, TensorType("i32", 1, 4)),
    (27, TensorType("i64", 1, 8)),
    (28, TensorType("f64", 1, 8)),
    (29, TensorType("iq1_m", 256, 56)),
    (30, TensorType("bf16", 1, 2)),
    (34, TensorType("tq1_0", 256, 54)),
    (35, TensorType("tq2_0", 256, 66)),
    (39, TensorType("mxfp4", 32, 17)),
    (40, TensorType("nvfp4", 64, 36)),
    (41, TensorType("q1_0", 128, 18)),
    (133, TensorType("q6_0", 32, 26)),
    (137, TensorType("iq2_k", 256, 76)),
    (138, TensorType("iq3_k", 256, 110)),
    (139, TensorType("iq4_k", 256, 144)),
    (140, TensorType("iq5_k", 256, 176)),
    (141, TensorType("iq6_k", 256, 212)),
    (144, TensorType("iq4_ks", 256, 136, 4)),
    (145, TensorType("iq2_ks", 256, 70, 2)),
    (146, TensorType("iq4_kss", 256, 128, 4)),
    (151, TensorType("q8_KV", 32, 32, 8)),
    (152, TensorType("iq5_ks", 256, 168, 4)),
    (153, TensorType("iq2_kt", 256, 68, 4)),
    (154, TensorType("iq3_kt", 256, 100, 4)),
    (155, TensorType("iq4_kt", 256, 128, 4)),
    (156, TensorType("iq3_ks", 256, 102, 2)),
    (157, TensorType("iq2_kl", 256, 86, 2)),
    (158, TensorType("iq1_kt", 256, 56, 4)),
    (202, TensorType("q4_0_r8", 32, 18)),
    (206, TensorType("q5_0_r4", 32, 22)),
    (208, TensorType("q8_0_r8", 32, 34)),
    (210, TensorType("q2_k_r4", 256, 84)),
    (211, TensorType("q3_k_r4", 256, 110)),
    (212, TensorType("q4_k_r4", 256, 144)),
    (213, TensorType("q5_k_r4", 256, 176)),
    (214, TensorType("q6_k_r4", 256, 210)),
    (216, TensorType("iq2_xxs_r4", 256, 66)),
    (217, TensorType("iq2_xs_r4", 256, 74)),
    (218, TensorType("iq3_xxs_r4", 256, 98)),
    (219, TensorType("iq1_s_r4", 32, 6, 2)),
    (220, TensorType("iq4_nl_r4", 32, 18)),
    (221, TensorType("iq3_s_r4", 256, 110)),
    (222, TensorType("iq2_s_r4", 256, 82)),
    (223, TensorType("iq4_xs_r8", 256, 136)),
    (229, TensorType("iq1_m_r4", 32, 7, 2)),
    (230, TensorType("bf16_r16", 1, 2)),
    (233, TensorType("q6_0_r4", 32, 26)),
    (337, TensorType("iq2_k_r4", 256, 76)),
    (338, TensorType("iq3_k_r4", 256, 110)),
    (339, TensorType("iq4_k_r4", 256, 144)),
    (340, TensorType("iq5_k_r4", 256, 176)),
    (344, TensorType("iq4_ks_r4", 256, 136, 4)),
    (352, TensorType("iq5_ks_r4", 256, 168, 4)),
    (353, TensorType("mxfp4_r8", 32, 17)),
    (398, TensorType("q8_KV_r8", 32, 32, 4)),
    (399, TensorType("q8_k_r8", 256, 258)),
)

TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(dict(_ROWS))
TYPES_BY_NAME: Mapping[str, TensorType] = MappingProxyType(
    {kind.name.lower(): kind for _, kind in _ROWS}
)


def type_name(number: int) -> str:
    """The name of a tensor type, `type 200` for one that is not known here."""
    known = TENSOR_TYPES.get(number)
    return known.name if known is not None else f"type {number}"
