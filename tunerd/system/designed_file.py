"""Writes designed models as GGUF files with their ground truth, and reads the truth back."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from tunerd import __version__
from tunerd.core.designed import (
    Design,
    Quant,
    StoredWeights,
    Truth,
    compute_truth,
    metadata,
    region_counts,
)
from tunerd.core.designed_quant import decode
from tunerd.core.designed_vocab import CHAT_TEMPLATE, TokenKind, Vocabulary, vocabulary
from tunerd.errors import HostError, ModelFileError, UsageError

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter

TRUTH_KEY = "tunerd.truth"
_SCHEMA = 1
_EXPECTED_AT = tuple((n_max, p_min) for n_max in (1, 2, 3, 6) for p_min in (0.0, 0.5, 0.75))


@dataclass(frozen=True, slots=True)
class DesignedFile:
    """A model that was written: the file, its truth beside it, and that truth."""

    path: Path
    truth_path: Path
    n_bytes: int
    truth: Truth


def truth_path_of(path: Path) -> Path:
    """Where the ground truth of a designed model stands: beside it."""
    return path.with_name(path.name + ".truth.json")


def write(made: Design, path: Path, *, force: bool = False) -> DesignedFile:
    """Write the model to `path` and its ground truth beside it, each file whole or not at all.

    Raises:
        UsageError: One of the files is already there, and `force` was not given.
        HostError: The folder cannot be written, or is full.
    """
    truth_path = truth_path_of(path)
    for taken in (path, truth_path):
        if taken.exists() and not force:
            raise UsageError(f"`{taken}` is already there", hint="`--force` overwrites it")
    truth = made.truth()
    described = json.dumps(describe(made, truth), separators=(",", ":"))
    try:
        with _replacing(path) as draft:
            _write_gguf(made, described, draft)
        with _replacing(truth_path) as draft:
            draft.write_text(described + "\n", encoding="utf-8")
        n_bytes = path.stat().st_size
    except OSError as error:
        raise HostError(f"cannot write the model to `{path}`", cause=str(error)) from error
    return DesignedFile(path, truth_path, n_bytes, truth)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A draft in the same folder that takes the place of `path` when the block ends well."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    draft = Path(name)
    try:
        yield draft
        os.fchmod(handle, 0o644)  # mkstemp made it 0600, and a server's own user must read it
        os.fsync(handle)
        draft.replace(path)
    finally:
        os.close(handle)
        draft.unlink(missing_ok=True)


def describe(made: Design, truth: Truth) -> dict[str, Any]:
    """The ground truth as JSON: what was asked for, what follows what, and expected counts.

    `expected` is for one request that goes once round a region from its first token.
    """
    drafts = truth.guess is not None
    return {
        "schema": _SCHEMA,
        "tunerd": __version__,
        "seed": made.seed,
        "shape": asdict(made.shape),
        "architecture": made.shape.architecture,
        "regions": [
            {"name": region.name, "first": region.first, "end": region.end}
            for region in made.vocabulary.regions
        ],
        "successor": truth.successor.tolist(),
        "guess": truth.guess.tolist() if truth.guess is not None else None,
        "confidence": _rounded(truth.confidence),
        "expected": list(_expected(made.vocabulary, truth)) if drafts else [],
    }


def _rounded(confidence: Any | None) -> list[float] | None:
    return None if confidence is None else [round(float(value), 4) for value in confidence]


def _expected(words: Vocabulary, truth: Truth) -> Iterator[dict[str, Any]]:
    for region in words.regions:
        for n_max, p_min in _EXPECTED_AT:
            counts = region_counts(truth, region, n_max, p_min)
            yield {
                "region": region.name,
                "n_max": n_max,
                "p_min": p_min,
                "predicted": counts.predicted,
                "drafted": counts.drafted,
                "accepted": counts.accepted,
                "steps": counts.steps,
            }


def _write_gguf(made: Design, described: str, path: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    types = {
        Quant.F32: GGMLQuantizationType.F32,
        Quant.F16: GGMLQuantizationType.F16,
        Quant.Q8_0: GGMLQuantizationType.Q8_0,
    }
    writer = GGUFWriter(path, made.shape.architecture)
    _add_metadata(writer, made)
    _add_vocabulary(writer, made)
    writer.add_string(TRUTH_KEY, described)
    for spec in made.tensors:
        writer.add_tensor_info(
            spec.name, spec.dims, np.dtype(np.float32), spec.n_bytes, raw_dtype=types[spec.quant]
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    with path.open("r+b") as file:
        _write_tensors(made, file, writer.data_alignment)


def _write_tensors(made: Design, file: BinaryIO, align: int) -> None:
    """The data after the header, each tensor aligned; tensors of zeros are left as holes."""
    place = -(-file.seek(0, os.SEEK_END) // align) * align
    for spec in made.tensors:
        data = made.stored(spec)
        if data.any():
            file.seek(place)
            data.tofile(file)
        place += -(-spec.n_bytes // align) * align
    file.truncate(place)


def _add_metadata(writer: GGUFWriter, made: Design) -> None:
    writer.add_name("tunerd designed model")
    writer.add_description("Random blocks that add nothing; head and MTP block with known answers.")
    writer.add_file_type(made.shape.quant.file_type)
    writer.add_quantization_version(2)
    for name, value in metadata(made.shape).items():
        key = f"{made.shape.architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)


def _add_vocabulary(writer: GGUFWriter, made: Design) -> None:
    words = made.vocabulary
    n_unused = made.shape.n_tokens - words.n_tokens
    writer.add_tokenizer_model("gpt2")
    # This pre-tokenizer takes a whole word that is a token before it tries to merge bytes.
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*words.texts, *(f"<|unused_{n}|>" for n in range(n_unused))])
    writer.add_token_types([*words.kinds, *([TokenKind.UNUSED] * n_unused)])
    # Loaders want a list of merges; this one makes a token out of a piece that no text yields.
    writer.add_token_merges(["c ode"])
    writer.add_bos_token_id(words.end_of_text)
    writer.add_eos_token_id(words.end_of_turn)
    writer.add_pad_token_id(words.end_of_text)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def read_truth(path: Path) -> Truth:
    """The truth of a designed model, computed from the tensors of its file.

    Raises:
        ModelFileError: The file cannot be read, or is no designed model.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        if reader.get_field(TRUTH_KEY) is None:
            raise ModelFileError(f"`{path}` is no designed model: it has no `{TRUTH_KEY}`")
        return compute_truth(_stored_weights(reader))
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelFileError(f"cannot read `{path}`", cause=str(error)) from error


def read_description(path: Path) -> Mapping[str, Any]:
    """The ground truth that a designed model carries in its metadata.

    Raises:
        ModelFileError: The file cannot be read, or is no designed model.
    """
    from gguf import GGUFReader

    try:
        field = GGUFReader(path).get_field(TRUTH_KEY)
        if field is None:
            raise ModelFileError(f"`{path}` is no designed model: it has no `{TRUTH_KEY}`")
        described: dict[str, Any] = json.loads(field.contents())
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelFileError(f"cannot read `{path}`", cause=str(error)) from error
    return described


def _stored_weights(reader: GGUFReader) -> StoredWeights:
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    n_used = vocabulary().n_tokens

    def values(name: str, n_rows: int | None) -> Any:
        tensor = tensors[name]
        quant = Quant(tensor.tensor_type.name.lower())
        width, height = int(tensor.shape[0]), int(tensor.shape[1])
        rows = tensor.data.reshape(height, -1)[:n_rows]
        return decode(rows.view("u1"), quant, width)

    projections = [name for name in tensors if name.endswith("nextn.eh_proj.weight")]
    return StoredWeights(
        embedding=values("token_embd.weight", n_used),
        head=values("output.weight", n_used),
        projection=values(projections[0], None) if projections else None,
        n_padding=int(tensors["token_embd.weight"].shape[1]) - n_used,
    )
