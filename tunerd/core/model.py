"""What a model is: sizes, layers and where its bytes are, from the headers of its files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tunerd.core.gguf import Header, TensorInfo
from tunerd.core.gguf_types import type_name
from tunerd.core.model_keys import Keys
from tunerd.core.model_layers import LayerPlan, RecurrentState, read_layers
from tunerd.errors import ModelFileError

_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")
_EXPERTS = re.compile(
    r"ffn_(?:gate|up|down|gate_up)_(?:ch)?exps(?:\.|$)|ffn_(?:gate|up|down)\.\d+\."
)
_FEED_FORWARD = re.compile(r"ffn_(?:gate|up|down)\.(?:weight|bias|scale)")
_INPUT = re.compile(r"(?:token_embd|per_layer_token_embd|position_embd|token_types)(?:[._]|$)")
_OUTPUT = re.compile(r"(?:output|output_norm|cls|dec\.output_norm|enc\.output_norm)(?:[._]|$)")
_HEAD = "output.weight"
_EMBEDDING = "token_embd.weight"
_MTP_PROJECTION = "nextn.eh_proj.weight"
# Files of these architectures only draft for another model.
_COMPANIONS = frozenset(
    {"gemma4-assistant", "gemma4_mtp", "dflash", "dflash-draft", "eagle3", "dspark"}
)


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """One file of a model as it was when its header was read; `path` has no links in it."""

    path: Path
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    header_sha256: str


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What tells one model from another without reading its weights."""

    files: tuple[FileIdentity, ...]

    @property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(file.size_bytes for file in self.files)

    @property
    def sha256(self) -> str:
        """One hash over size, time and header of every file; the path plays no part."""
        parts = [f"{one.size_bytes} {one.mtime_ns} {one.header_sha256}\n" for one in self.files]
        return sha256("".join(parts).encode()).hexdigest()

    @property
    def short(self) -> str:
        """The first twelve digits of the hash."""
        return self.sha256[:12]


@dataclass(frozen=True, slots=True)
class Block:
    """One block: where its bytes are and what it keeps per token.

    `k_values` and `v_values` are the values that its KV cache keeps for one token, 0 where it has
    none, None where they are not known. A windowed block keeps only the last tokens.
    `feed_forward_bytes` are those of `dense_bytes` that belong to a plain feed-forward network; the
    `largest` are bytes of one tensor.
    """

    index: int
    dense_bytes: int
    feed_forward_bytes: int
    expert_bytes: int
    largest_dense_bytes: int
    largest_expert_bytes: int
    k_values: int | None
    v_values: int | None
    is_recurrent: bool
    is_windowed: bool
    is_mtp: bool

    @property
    def n_bytes(self) -> int:
        """All its tensors."""
        return self.dense_bytes + self.expert_bytes

    @property
    def has_attention(self) -> bool:
        """Whether it has a KV cache, as far as is known."""
        return self.k_values != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Everything that placement and memory need to know of a model; None is unknown.

    `n_layer_all` counts all blocks and `n_nextn` the multi-token-prediction blocks that the
    metadata claims, `n_layer` the rest, the trunk. `input_bytes` are the embedding tables, which
    stay on the CPU; `output_bytes` the head and its norm; `head_bytes` and `head_type` the head
    alone, which is the token embedding where the model has none of its own (`is_tied`).
    `tensor_types` are bytes by type, the most first, `mtp_types` those of the MTP blocks alone.
    """

    identity: ModelIdentity
    architecture: str
    name: str | None
    size_label: str | None
    file_type: int | None
    tensor_types: tuple[tuple[str, int], ...]
    n_layer_all: int | None
    n_nextn: int
    mtp_problem: str | None
    is_companion: bool
    context_length: int | None
    n_embd: int | None
    n_vocab: int | None
    n_head: int | None
    n_head_kv: int | None
    key_length: int | None
    value_length: int | None
    n_ff: int | None
    n_expert: int | None
    n_expert_used: int | None
    n_expert_shared: int | None
    n_ff_expert: int | None
    n_ff_shared: int | None
    sliding_window: int | None
    is_gated_attention: bool
    recurrent: RecurrentState | None
    chat_template_sha256: str | None
    blocks: tuple[Block, ...]
    input_bytes: int
    output_bytes: int
    head_bytes: int
    head_type: str | None
    other_bytes: int
    is_tied: bool
    n_tensors: int
    tensor_bytes: int
    mtp_types: tuple[tuple[str, int], ...] = ()

    @property
    def n_layer(self) -> int | None:
        """Blocks of the trunk."""
        return None if self.n_layer_all is None else self.n_layer_all - self.n_nextn

    @property
    def has_mtp(self) -> bool:
        """Whether it can draft for itself; `mtp_problem` says why not where it claims to."""
        return self.n_nextn > 0 and self.mtp_problem is None

    @property
    def has_chat_template(self) -> bool:
        """Whether the file brings a chat template."""
        return self.chat_template_sha256 is not None

    @property
    def is_moe(self) -> bool:
        """Whether it has experts."""
        return bool(self.n_expert)

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers keep a recurrent state, which an engine cannot cut back."""
        return any(block.is_recurrent for block in self.blocks)

    @property
    def quant(self) -> str:
        """The type that most bytes have."""
        return self.tensor_types[0][0] if self.tensor_types else "none"

    @property
    def trunk(self) -> tuple[Block, ...]:
        """The blocks that every token passes."""
        return tuple(block for block in self.blocks if not block.is_mtp)

    @property
    def mtp_blocks(self) -> tuple[Block, ...]:
        """The blocks that only draft."""
        return tuple(block for block in self.blocks if block.is_mtp)

    @property
    def file_bytes(self) -> int:
        """Size of all files."""
        return self.identity.size_bytes


def facts_of(files: Sequence[tuple[FileIdentity, Header]]) -> ModelFacts:
    """The facts of a model from all its files, the first shard first.

    Raises:
        ModelFileError: The shards do not belong together, or a count is beyond any real model.
    """
    identity = ModelIdentity(tuple(file for file, _ in files))
    headers = [header for _, header in files]
    name = str(identity.files[0].path)
    tensors = _all_tensors(files, name)
    keys = Keys(headers[0].metadata, name)
    plan = read_layers(keys, {tensor.name for tensor in tensors})
    places = _places(tensors, plan)
    matrices = {one.name: one for one in tensors if one.name in (_HEAD, _EMBEDDING)}
    head = matrices.get(_HEAD, matrices.get(_EMBEDDING))
    return ModelFacts(
        identity=identity,
        architecture=keys.architecture or "unknown",
        name=keys.text("general.name"),
        size_label=keys.text("general.size_label"),
        file_type=keys.number("general.file_type"),
        tensor_types=_by_type(tensors),
        n_layer_all=plan.n_layer_all,
        n_nextn=plan.n_nextn,
        mtp_problem=_mtp_problem(plan, tensors),
        is_companion=_is_companion(keys, plan, tensors),
        context_length=keys.own("context_length"),
        n_embd=keys.own("embedding_length"),
        n_vocab=_n_vocab(keys, tensors),
        n_head=keys.own_most("attention.head_count"),
        n_head_kv=keys.own_most("attention.head_count_kv"),
        key_length=plan.key_length,
        value_length=plan.value_length,
        n_ff=keys.own_most("feed_forward_length"),
        n_expert=keys.own("expert_count"),
        n_expert_used=keys.own_most("expert_used_count"),
        n_expert_shared=keys.own("expert_shared_count"),
        n_ff_expert=keys.own("expert_feed_forward_length"),
        n_ff_shared=keys.own("expert_shared_feed_forward_length"),
        sliding_window=plan.sliding_window,
        is_gated_attention=_is_gated(keys, plan, tensors),
        recurrent=plan.recurrent,
        chat_template_sha256=_template_hash(keys),
        blocks=places.blocks,
        input_bytes=places.input_bytes,
        output_bytes=places.output_bytes,
        head_bytes=head.n_bytes if head is not None else 0,
        head_type=type_name(head.type_number) if head is not None else None,
        other_bytes=places.other_bytes,
        is_tied=_HEAD not in matrices,
        n_tensors=len(tensors),
        tensor_bytes=sum(tensor.n_bytes for tensor in tensors),
        mtp_types=_by_type([tensor for tensor in tensors if _is_of_mtp(tensor, plan)]),
    )


def _all_tensors(files: Sequence[tuple[FileIdentity, Header]], name: str) -> tuple[TensorInfo, ...]:
    """The tensors of all shards, after a check that these are all shards of one model."""
    shards = [Keys(header.metadata, str(file.path)) for file, header in files]
    count = shards[0].number("split.count") or 1
    if count != len(files):
        raise ModelFileError(
            f"model has {count} parts, {len(files)} were given: `{name}`",
            hint="put all its parts into one folder",
        )
    for index, (shard, (file, _)) in enumerate(zip(shards, files, strict=True)):
        found = (shard.number("split.no") or 0, shard.number("split.count") or 1)
        if found != (index, count):
            raise ModelFileError(
                f"not part {index + 1} of {count} of its model: `{file.path}`",
                cause=f"its header says part {found[0] + 1} of {found[1]}",
                hint="the parts must keep the names that they were published with",
            )
    tensors = tuple(tensor for _, header in files for tensor in header.tensors)
    claimed = shards[0].number("split.tensors.count") if count > 1 else None
    if claimed is not None and claimed != len(tensors):
        raise ModelFileError(
            f"parts hold {len(tensors)} tensors, the model has {claimed}: `{name}`",
            hint="fetch all its parts again",
        )
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ModelFileError(f"a tensor is in two parts of the model: `{name}`")
    return tensors


@dataclass(frozen=True, slots=True)
class _Places:
    blocks: tuple[Block, ...]
    input_bytes: int
    output_bytes: int
    other_bytes: int


def _places(tensors: Sequence[TensorInfo], plan: LayerPlan) -> _Places:
    """Bytes by where an engine puts them."""
    loose: dict[str, int] = {"input": 0, "output": 0, "other": 0}
    dense: dict[int, list[int]] = {}
    forward: dict[int, int] = {}
    experts: dict[int, list[int]] = {}
    n_blocks = len(plan.layers)
    for tensor in tensors:
        found = _BLOCK.match(tensor.name)
        if found is not None and int(found[1]) < n_blocks:
            side = experts if _EXPERTS.match(found[2]) else dense
            side.setdefault(int(found[1]), []).append(tensor.n_bytes)
            if _FEED_FORWARD.fullmatch(found[2]):
                forward[int(found[1])] = forward.get(int(found[1]), 0) + tensor.n_bytes
        elif _INPUT.match(tensor.name):
            loose["input"] += tensor.n_bytes
        elif _OUTPUT.match(tensor.name):
            loose["output"] += tensor.n_bytes
        else:
            loose["other"] += tensor.n_bytes
    blocks = tuple(
        Block(
            index=layer.index,
            dense_bytes=sum(dense.get(layer.index, ())),
            feed_forward_bytes=forward.get(layer.index, 0),
            expert_bytes=sum(experts.get(layer.index, ())),
            largest_dense_bytes=max(dense.get(layer.index, ()), default=0),
            largest_expert_bytes=max(experts.get(layer.index, ()), default=0),
            k_values=layer.k_values,
            v_values=layer.v_values,
            is_recurrent=layer.is_recurrent,
            is_windowed=layer.is_windowed,
            is_mtp=layer.is_mtp,
        )
        for layer in plan.layers
    )
    return _Places(blocks, loose["input"], loose["output"], loose["other"])


def _by_type(tensors: Sequence[TensorInfo]) -> tuple[tuple[str, int], ...]:
    by_type: dict[str, int] = {}
    for tensor in tensors:
        kind = type_name(tensor.type_number)
        by_type[kind] = by_type.get(kind, 0) + tensor.n_bytes
    return tuple(sorted(by_type.items(), key=lambda item: (-item[1], item[0])))


def _is_of_mtp(tensor: TensorInfo, plan: LayerPlan) -> bool:
    found = _BLOCK.match(tensor.name)
    index = int(found[1]) if found is not None else len(plan.layers)
    return index < len(plan.layers) and plan.layers[index].is_mtp


def _mtp_problem(plan: LayerPlan, tensors: Sequence[TensorInfo]) -> str | None:
    """Why a model that claims MTP blocks cannot draft with them.

    Source: engines abort on a file that has the key without the tensors.
    """
    if plan.n_nextn == 0 or plan.n_layer_all is None:
        return None
    wanted = f"blk.{plan.n_layer_all - 1}.{_MTP_PROJECTION}"
    if any(tensor.name == wanted for tensor in tensors):
        return None
    return f"its metadata claims {plan.n_nextn} MTP block(s), but it has no tensor `{wanted}`"


def _is_companion(keys: Keys, plan: LayerPlan, tensors: Sequence[TensorInfo]) -> bool:
    """Whether the file can only draft for another model: an MTP block alone, or a draft head."""
    if keys.architecture in _COMPANIONS:
        return True
    names = {tensor.name for tensor in tensors}
    return plan.n_nextn > 0 and not any(name.startswith("blk.0.") for name in names)


def _is_gated(keys: Keys, plan: LayerPlan, tensors: Sequence[TensorInfo]) -> bool:
    """Whether queries come with a gate of the same width (Qwen3-Next and its successors)."""
    n_head = keys.own_most("attention.head_count")
    if n_head is None or plan.key_length is None:
        return False
    width = n_head * plan.key_length
    queries = (one for one in tensors if one.name.endswith(".attn_q.weight"))
    return any(len(one.dims) > 1 and one.dims[1] == 2 * width for one in queries)


def _n_vocab(keys: Keys, tensors: Sequence[TensorInfo]) -> int | None:
    length = keys.length("tokenizer.ggml.tokens")
    if length is not None:
        return length
    size = keys.own("vocab_size")
    if size is not None:
        return size
    rows = (one.dims[1] for one in tensors if one.name == _EMBEDDING and len(one.dims) > 1)
    return next(rows, None)


def _template_hash(keys: Keys) -> str | None:
    template = keys.text("tokenizer.chat_template")
    return sha256(template.encode()).hexdigest() if template else None
