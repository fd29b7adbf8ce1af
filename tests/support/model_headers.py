"""Headers of models that are too large to have around, as the reader would return them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.gguf_bytes import MemorySource, gguf, text
from tests.support.shapes import PlainShape, hollow_bytes, pair_of, table_of
from tunerd.model.facts import FileIdentity, ModelFacts, facts_of
from tunerd.model.gguf import read_header
from tunerd.tryout.designed import Shape

# Sizes of the published models; the weights' type is q8_0, which real files rarely have.
QWEN36_27B = Shape(
    n_layer=64, n_embd=5120, n_ff=17408, n_head=24, n_head_kv=4, head_dim=256, ssm_state_size=128,
    ssm_group_count=16, ssm_time_step_rank=48, n_vocab=248320, context_length=262144,
)  # fmt: skip
QWEN36_35B_A3B = Shape(
    is_moe=True, n_layer=40, n_embd=2048, n_head=16, n_head_kv=2, head_dim=256, ssm_state_size=128,
    ssm_group_count=16, ssm_time_step_rank=32, n_expert=256, n_expert_used=8, n_ff_expert=512,
    n_ff_shared=512, n_vocab=248320, context_length=262144,
)  # fmt: skip


class HollowSource(MemorySource):
    """A header in memory that claims the whole file behind it."""

    def __init__(self, header: bytes, data_bytes: int) -> None:
        super().__init__(header)
        self._data_bytes = data_bytes

    @property
    def size(self) -> int:
        return len(self.content) + self._data_bytes


def identity(name: str = "made.gguf", size: int = 1, inode: int = 2) -> FileIdentity:
    return FileIdentity(Path("/models") / name, 1, inode, size, 3, "00" * 32)


def facts_of_shape(shape: Shape | PlainShape) -> ModelFacts:
    """The facts of a hollow model, without writing it."""
    header, data_bytes = hollow_bytes(shape)
    source = HollowSource(header, data_bytes)
    return facts_of([(identity(size=source.size), read_header(source))])


def facts_of_bytes(*shards: bytes) -> ModelFacts:
    files = []
    for index, content in enumerate(shards):
        name = f"part{index}.gguf"
        header = read_header(MemorySource(content, name))
        files.append((identity(name, len(content), inode=index), header))
    return facts_of(files)


def small(
    architecture: str = "llama",
    keys: Mapping[str, int | Sequence[int | bool]] | None = None,
    tensors: Sequence[tuple[str, tuple[int, ...]]] = (),
    extra: Sequence[bytes] = (),
) -> bytes:
    """A little file: keys below the architecture's prefix, and f32 tensors of zeros."""
    pairs = [
        text("general.architecture", architecture),
        *(pair_of(f"{architecture}.{key}", value) for key, value in (keys or {}).items()),
        *extra,
    ]
    table, n_bytes = table_of((name, dims, 0) for name, dims in tensors)
    return gguf(pairs, table, data=n_bytes)
