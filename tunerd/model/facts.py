"""What a model is: sizes, layers and where its bytes are, from the headers of its files."""

from __future__ import annotations

import re
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TypeGuard

from tunerd.errors import ModelFileError
from tunerd.model.gguf import (
    ArrayValue,
    ByteSource,
    Header,
    TensorInfo,
    Value,
    read_header,
    type_name,
)

MAX_BLOCKS = 4096

_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")
_EXPERTS = re.compile(
    r"ffn_(?:gate|up|down|gate_up)_(?:ch)?exps(?:\.|$)|ffn_(?:gate|up|down)\.\d+\."
)
_FEED_FORWARD = re.compile(r"ffn_(?:gate|up|down)\.(?:weight|bias|scale)")
_INPUT = re.compile(r"(?:token_embd|per_layer_token_embd|position_embd|token_types)(?:[._]|$)")
_OUTPUT = re.compile(r"(?:output|output_norm|cls|dec\.output_norm|enc\.output_norm)(?:[._]|$)")
_HEAD = "output.weight"
_EMBEDDING = "token_embd.weight"
_MTP_PROJECTION, _GEMMAS_PROJECTION = "nextn.eh_proj.weight", "nextn.pre_projection.weight"
# What `general.type` says of files that models are served with. Source: gguf-py's `GGUFType`.
_NO_MODELS: Mapping[str, str] = MappingProxyType(
    {
        "mmproj": "a multimodal projector",
        "adapter": "an adapter",
        "imatrix": "a table for quantising",
    }
)
# Files of these architectures only draft for another model.
_COMPANIONS = frozenset(
    {"gemma4-assistant", "gemma4_mtp", "dflash", "dflash-draft", "eagle3", "dspark"}
)
# Every n-th layer attends to everything, the others to a window.
# Source: llama.cpp, `set_swa_pattern` in the loaders of these architectures. Others say it in
# `attention.sliding_window_pattern`, or ignore the window that their metadata names.
_WINDOW_PATTERN: Mapping[str, int] = MappingProxyType(
    {
        "gemma2": 2,
        "gemma3": 6,
        "gemma3n": 5,
        "cohere2": 4,
        "gpt-oss": 2,
        "exaone4": 4,
        "exaone-moe": 4,
        "afmoe": 4,
        "llama4": 4,
        "olmo2": 4,
        # The first of four; which of them it is changes no sum.
        "laguna": 4,
        "smallthinker": 4,
    }
)
# Layers alternate by `full_attention_interval` even where the key is left out.
_INTERVAL_BY_DEFAULT = frozenset({"qwen3next", "qwen35", "qwen35moe", "qwen4exp"})
_DEFAULT_INTERVAL = 4
_ALL_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv7", "arwkv7", "rwkv6qwen2"})
_ATTENTION_AND_STATE = frozenset({"falcon-h1"})
# Far above any real size; keeps arithmetic on a hostile file small.
_MOST = 2**40
_MOST_LETTERS = 300  # of what is shown to people


@dataclass(frozen=True, slots=True)
class Keys:
    """The metadata of one file; `name` is the file in errors."""

    metadata: Mapping[str, Value]
    name: str

    @property
    def architecture(self) -> str | None:
        """`general.architecture`."""
        return self.text("general.architecture")

    def text(self, key: str) -> str | None:
        """A string; None for anything else, also for one that was too long to keep."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int | None:
        """A whole number from 0 on."""
        value = self.metadata.get(key)
        return value if _is_count(value) else None

    def own(self, key: str) -> int | None:
        """A number below the architecture's own prefix."""
        return self.number(f"{self.architecture}.{key}")

    def own_values(self, key: str) -> tuple[int, ...] | None:
        """An array of numbers or truth values below the architecture's prefix."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, ArrayValue) or value.values is None:
            return None
        whole = tuple(int(one) for one in value.values if isinstance(one, bool) or _is_count(one))
        return whole if len(whole) == value.length else None

    def own_per_block(self, key: str, n_blocks: int) -> tuple[int, ...] | None:
        """A number for every block: an array of at least that length, or one number for all."""
        single = self.own(key)
        if single is not None:
            return (single,) * n_blocks
        values = self.own_values(key)
        return values[:n_blocks] if values is not None and len(values) >= n_blocks else None

    def own_most(self, key: str) -> int | None:
        """A number, or the largest of an array."""
        single = self.own(key)
        if single is not None:
            return single
        return max(self.own_values(key) or (), default=None)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """What one recurrent layer keeps for one sequence, in f32 values.

    `n_conv` is the tail of the convolution, `n_state` the state itself. `mixed_width` is the width
    of what goes through the convolution, `inner_width` that of its values.
    """

    n_conv: int
    n_state: int
    mixed_width: int
    inner_width: int


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """One file of a model at one moment; `path` has no links in it."""

    path: Path
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    header_sha256: str = ""

    @property
    def stamp(self) -> tuple[int, int, int, int]:
        """What changes when the file changes."""
        return (self.device, self.inode, self.size_bytes, self.mtime_ns)


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
    def same_sha256(self) -> str:
        """As `sha256`, without the times: machines that have the same files got them at different ones."""
        parts = [f"{one.size_bytes} {one.header_sha256}\n" for one in self.files]
        return sha256("".join(parts).encode()).hexdigest()


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

    `n_nextn` counts the multi-token-prediction blocks that the metadata claims. `input_bytes` are the
    embedding tables, which stay on the CPU; `output_bytes` the head and its norm; `head_bytes` and
    `head_type` the head alone, which is the token embedding where the model has none of its own
    (`is_tied`). `mtp_types` are the bytes of the MTP blocks by type, the most first; `quant` is the
    type that most bytes of all have.
    `no_model` is why no text can be generated with the file alone. `has_index`: attention chooses by
    an index what it looks at.
    """

    identity: ModelIdentity
    architecture: str
    name: str | None
    n_nextn: int
    mtp_problem: str | None
    no_model: str | None
    context_length: int | None
    n_embd: int | None
    n_vocab: int | None
    n_head: int | None
    key_length: int | None
    n_ff: int | None
    n_expert: int | None
    n_expert_used: int | None
    n_ff_expert: int | None
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
    mtp_types: tuple[tuple[str, int], ...] = ()
    quant: str | None = None
    has_index: bool = False

    @property
    def has_mtp(self) -> bool:
        """Whether it can draft for itself, or for another where it is no model; `mtp_problem` says why not where it claims to."""
        return self.n_nextn > 0 and self.mtp_problem is None

    def drafts_by_mtp(self, target: ModelFacts) -> bool:
        """Whether MTP can draft for that model with the block in this file.

        Source: mainline of August 2026 dies at its start of a block of another width; Gemma 4's projects.
        """
        is_as_wide = None in {self.n_embd, target.n_embd} or self.n_embd == target.n_embd
        return self.has_mtp and (self.architecture in _COMPANIONS or is_as_wide)

    @property
    def is_moe(self) -> bool:
        """Whether it has experts."""
        return bool(self.n_expert)

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
    name = str(identity.files[0].path)
    tensors = _all_tensors(files, name)
    by_name = {tensor.name: tensor for tensor in tensors}
    keys = Keys(files[0][1].metadata, name)
    n_blocks, n_nextn = _counts(keys, by_name)
    places = _places(tensors, n_blocks)
    blocks = _blocks(keys, places, n_blocks, n_nextn)
    drafting = [one for one in tensors if n_blocks - n_nextn <= _block_of(one.name) < n_blocks]
    key_length, _ = _head_sizes(keys)
    head = by_name.get(_HEAD, by_name.get(_EMBEDDING))
    name_told, template = keys.text("general.name"), keys.text("tokenizer.chat_template")
    return ModelFacts(
        identity=identity,
        architecture=(keys.architecture or "unknown")[:_MOST_LETTERS],
        name=None if name_told is None else name_told[:_MOST_LETTERS],
        n_nextn=n_nextn,
        mtp_problem=_mtp_problem(n_blocks, n_nextn, by_name),
        no_model=_why_no_model(keys, n_nextn, by_name),
        context_length=keys.own("context_length"),
        n_embd=keys.own("embedding_length"),
        n_vocab=_n_vocab(keys, by_name),
        n_head=keys.own_most("attention.head_count"),
        key_length=key_length,
        n_ff=keys.own_most("feed_forward_length"),
        n_expert=keys.own("expert_count"),
        n_expert_used=keys.own_most("expert_used_count"),
        n_ff_expert=keys.own("expert_feed_forward_length"),
        sliding_window=_window(keys) if any(one.is_windowed for one in blocks) else None,
        is_gated_attention=_is_gated(keys, key_length, tensors),
        recurrent=_recurrent_state(keys) if any(one.is_recurrent for one in blocks) else None,
        chat_template_sha256=sha256(template.encode()).hexdigest() if template else None,
        blocks=blocks,
        input_bytes=sum(places["input", -1]),
        output_bytes=sum(places["output", -1]),
        head_bytes=head.n_bytes if head is not None else 0,
        head_type=type_name(head.type_number) if head is not None else None,
        other_bytes=sum(places["other", -1]),
        is_tied=_HEAD not in by_name,
        mtp_types=_by_type(drafting),
        quant=next((one for one, _ in _by_type(tensors)), None),
        has_index=keys.own("attention.indexer.key_length") is not None,
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


def _block_of(tensor_name: str) -> int:
    """The block that a tensor is of; -1 for those of none."""
    found = _BLOCK.match(tensor_name)
    return int(found[1]) if found is not None else -1


def _counts(keys: Keys, tensors: Mapping[str, TensorInfo]) -> tuple[int, int]:
    """How many blocks there are, and how many of them only draft."""
    declared = keys.own("block_count")
    highest = max(map(_block_of, tensors), default=-1)
    n_blocks = declared if declared is not None else highest + 1
    n_nextn = keys.own("nextn_predict_layers") or 0
    if n_blocks > MAX_BLOCKS:
        raise ModelFileError(
            f"model claims {n_blocks} blocks: `{keys.name}`", cause=f"expected at most {MAX_BLOCKS}"
        )
    if n_nextn and n_nextn + (keys.architecture not in _COMPANIONS) > n_blocks:
        raise ModelFileError(
            f"model claims {n_nextn} MTP blocks of {n_blocks} in all: `{keys.name}`",
            cause="expected at least one block that is not for MTP",
        )
    return n_blocks, n_nextn


def _places(
    tensors: Sequence[TensorInfo], n_blocks: int
) -> defaultdict[tuple[str, int], list[int]]:
    """Bytes of the tensors by where an engine puts them: the part, and its block or -1."""
    places: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for tensor in tensors:
        found = _BLOCK.match(tensor.name)
        if found is not None and int(found[1]) < n_blocks:
            part = "experts" if _EXPERTS.match(found[2]) else "dense"
            places[part, int(found[1])].append(tensor.n_bytes)
            if _FEED_FORWARD.fullmatch(found[2]):
                places["forward", int(found[1])].append(tensor.n_bytes)
        elif _INPUT.match(tensor.name):
            places["input", -1].append(tensor.n_bytes)
        else:
            part = "output" if _OUTPUT.match(tensor.name) else "other"
            places[part, -1].append(tensor.n_bytes)
    return places


def _blocks(
    keys: Keys, places: Mapping[tuple[str, int], list[int]], n_blocks: int, n_nextn: int
) -> tuple[Block, ...]:
    n_layer = n_blocks - n_nextn
    recurrent = _recurrent_layers(keys, n_layer) if _recurrent_state(keys) else frozenset()
    windowed = _windowed_layers(keys, n_layer) if _window(keys) else frozenset()
    sizes = _kv_sizes(keys, n_blocks, windowed)
    without = frozenset() if keys.architecture in _ATTENTION_AND_STATE else recurrent
    return tuple(
        Block(
            index=index,
            dense_bytes=sum(places.get(("dense", index), ())),
            feed_forward_bytes=sum(places.get(("forward", index), ())),
            expert_bytes=sum(places.get(("experts", index), ())),
            largest_dense_bytes=max(places.get(("dense", index), ()), default=0),
            largest_expert_bytes=max(places.get(("experts", index), ()), default=0),
            k_values=0 if index in without else sizes[index][0],
            v_values=0 if index in without else sizes[index][1],
            is_recurrent=index in recurrent,
            is_windowed=index in windowed,
            is_mtp=index >= n_layer,
        )
        for index in range(n_blocks)
    )


def _window(keys: Keys) -> int | None:
    return keys.own("attention.sliding_window") or keys.own("attention.chunk_size") or None


def _head_sizes(keys: Keys) -> tuple[int | None, int | None]:
    n_embd, n_head = keys.own("embedding_length"), keys.own_most("attention.head_count")
    usual = n_embd // n_head if n_embd is not None and n_head else None
    told = (keys.own("attention.key_length"), keys.own("attention.value_length"))
    key_length, value_length = (usual if one is None else one for one in told)
    return key_length, value_length


def _kv_sizes(
    keys: Keys, n_blocks: int, windowed: frozenset[int]
) -> tuple[tuple[int | None, int | None], ...]:
    """K and V values per token of each block, as if every block attended.

    Multi-head latent attention keeps one compressed row per token, from which V is read too; the
    last `shared_kv_layers` blocks use the cache of an earlier one.
    """
    heads = keys.own_per_block("attention.head_count_kv", n_blocks)
    if heads is None:
        heads = keys.own_per_block("attention.head_count", n_blocks)
    usual = _head_sizes(keys)
    told = (keys.own("attention.key_length_swa"), keys.own("attention.value_length_swa"))
    in_window = [one if size is None else size for one, size in zip(usual, told, strict=True)]
    is_latent = keys.own("attention.key_length_mla") is not None
    first_shared = n_blocks - (keys.own("attention.shared_kv_layers") or 0)
    sizes: list[tuple[int | None, int | None]] = []
    for index in range(n_blocks):
        k_size, v_size = in_window if index in windowed else usual
        if index >= first_shared:
            sizes.append((0, 0))
        elif heads is None or k_size is None or v_size is None:
            sizes.append((None, None))
        else:
            sizes.append((heads[index] * k_size, 0 if is_latent else heads[index] * v_size))
    return tuple(sizes)


def _recurrent_state(keys: Keys) -> RecurrentState | None:
    """The state of a recurrent layer.

    Source: llama.cpp, `n_embd_r` and `n_embd_s` of its hyperparameters.
    """
    kernel, inner = keys.own("ssm.conv_kernel"), keys.own("ssm.inner_size")
    size, groups = keys.own("ssm.state_size"), keys.own("ssm.group_count") or 0
    tail = max(0, (kernel or 1) - 1)
    if inner is not None and size is not None:
        mixed = inner + 2 * groups * size
        return RecurrentState(tail * mixed, size * inner, mixed, inner)
    head, n_head = keys.own("kda.head_dim"), keys.own_most("attention.head_count")
    if head is not None and n_head is not None:
        width = head * n_head
        return RecurrentState(3 * tail * width, head * width, 3 * width, width)
    cache, n_embd = keys.own("shortconv.l_cache"), keys.own("embedding_length")
    if cache is not None and n_embd is not None:
        return RecurrentState(n_embd * max(0, cache - 1), 0, n_embd, n_embd)
    return None


def _recurrent_layers(keys: Keys, n_layer: int) -> frozenset[int]:
    everything = frozenset(range(n_layer))
    if keys.architecture in _ALL_RECURRENT or keys.architecture in _ATTENTION_AND_STATE:
        return everything
    marked = keys.own_values("attention.recurrent_layers")
    if marked is not None:
        return frozenset(index for index in everything if index < len(marked) and marked[index])
    interval = keys.own("full_attention_interval")
    if interval is None and keys.architecture in _INTERVAL_BY_DEFAULT:
        interval = _DEFAULT_INTERVAL
    if interval:
        return frozenset(index for index in everything if (index + 1) % interval)
    heads = keys.own_values("attention.head_count_kv")
    if heads is not None:
        return frozenset(index for index in everything if index < len(heads) and not heads[index])
    return frozenset()


def _windowed_layers(keys: Keys, n_layer: int) -> frozenset[int]:
    marked = keys.own_values("attention.sliding_window_pattern")
    if marked is not None:
        return frozenset(index for index in range(min(n_layer, len(marked))) if marked[index])
    pattern = keys.own("attention.sliding_window_pattern")
    if pattern is None:
        pattern = _WINDOW_PATTERN.get(keys.architecture or "")
    if pattern is None:
        return frozenset()
    return frozenset(
        index for index in range(n_layer) if pattern == 0 or index % pattern < pattern - 1
    )


def _by_type(tensors: Sequence[TensorInfo]) -> tuple[tuple[str, int], ...]:
    by_type: Counter[str] = Counter()
    for tensor in tensors:
        by_type[type_name(tensor.type_number)] += tensor.n_bytes
    return tuple(sorted(by_type.items(), key=lambda item: (-item[1], item[0])))


def _mtp_problem(n_blocks: int, n_nextn: int, tensors: Mapping[str, TensorInfo]) -> str | None:
    """Why a model that claims MTP blocks cannot draft with them.

    Source: engines abort on a file that has the key without the tensors; llama.cpp's loaders, of which
    Gemma 4's asks for a projection beside the blocks.
    """
    wanted = f"blk.{n_blocks - 1}.{_MTP_PROJECTION}"
    if n_nextn == 0 or wanted in tensors or _GEMMAS_PROJECTION in tensors:
        return None
    return f"its metadata claims {n_nextn} MTP block(s), but it has no tensor `{wanted}`"


def _why_no_model(keys: Keys, n_nextn: int, tensors: Mapping[str, TensorInfo]) -> str | None:
    """Why no text can be generated with this file alone; None where nothing is known against it."""
    kind = keys.text("general.type") or ""
    if keys.architecture == "clip" or kind in _NO_MODELS:
        return f"it is {_NO_MODELS.get(kind, _NO_MODELS['mmproj'])}"
    if not tensors:
        return "it has no tensors"
    if keys.metadata.get(f"{keys.architecture}.attention.causal") is False:
        return "it is not causal, like models for embeddings"
    has_trunk = n_nextn == 0 or any(name.startswith("blk.0.") for name in tensors)
    is_companion = keys.architecture in _COMPANIONS or not has_trunk
    return "it only drafts for another model" if is_companion else None


def _is_gated(keys: Keys, key_length: int | None, tensors: Sequence[TensorInfo]) -> bool:
    """Whether queries come with a gate of the same width (Qwen3-Next and its successors)."""
    n_head = keys.own_most("attention.head_count")
    if n_head is None or key_length is None:
        return False
    queries = (one for one in tensors if one.name.endswith(".attn_q.weight"))
    return any(len(one.dims) > 1 and one.dims[1] == 2 * n_head * key_length for one in queries)


def _n_vocab(keys: Keys, tensors: Mapping[str, TensorInfo]) -> int | None:
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, ArrayValue):
        return tokens.length
    size, table = keys.own("vocab_size"), tensors.get(_EMBEDDING)
    if size is not None or table is None:
        return size
    return table.dims[1] if len(table.dims) > 1 else None


_MOST_APART = 128
_FIRST_COMPARED = 5
_LENGTH = struct.Struct("<Q")


def why_apart(target: ByteSource, draft: ByteSource) -> str | None:
    """Why one model file cannot draft for another; None where it can.

    Raises:
        ModelFileError: A header is damaged.
    """
    ours, theirs = read_header(target), read_header(draft)
    our_tokens, their_tokens = (one.metadata.get("tokenizer.ggml.tokens") for one in (ours, theirs))
    if not (
        isinstance(our_tokens, ArrayValue) and our_tokens.span is not None
        and isinstance(their_tokens, ArrayValue) and their_tokens.span is not None
    ):  # fmt: skip
        return "one of the two files has no vocabulary"
    kind, its_kind = (Keys(one.metadata, "").text("tokenizer.ggml.model") for one in (ours, theirs))
    if kind != its_kind:
        return f"its tokenizer is {its_kind}, the model's is {kind}"
    for name, end in (("first", "bos"), ("last", "eos")):
        (added, token), (its_added, its_token) = _end(ours, end), _end(theirs, end)
        if None not in (added, its_added) and added != its_added:
            return f"only one of the two adds a {name} token"
        if added and None not in (token, its_token) and token != its_token:
            return f"its {name} token is {its_token}, the model's is {token}"
    if abs(our_tokens.length - their_tokens.length) > _MOST_APART:
        return f"it has {their_tokens.length} tokens, the model {our_tokens.length}"
    wanted, found = target.read_at(*our_tokens.span), draft.read_at(*their_tokens.span)
    pairs = enumerate(zip(_texts(wanted), _texts(found), strict=False))
    different = (number for number, (one, other) in islice(pairs, _FIRST_COMPARED, None)
                 if one != other)  # fmt: skip
    number = next(different, None) if wanted != found else None
    return None if number is None else f"token {number} differs"


def _end(header: Header, end: str) -> tuple[bool | None, int | None]:
    """Whether a token is put before or behind a text, and which; None where the file is silent."""
    added = header.metadata.get(f"tokenizer.ggml.add_{end}_token")
    token = Keys(header.metadata, "").number(f"tokenizer.ggml.{end}_token_id")
    return (added if isinstance(added, bool) else None), token


def _texts(stored: bytes) -> Iterator[bytes]:
    """Every token in order, from their lengths and texts as in the file."""
    at = 0
    while at < len(stored):
        (length,) = _LENGTH.unpack_from(stored, at)
        at += _LENGTH.size + length
        yield stored[at - length : at]
