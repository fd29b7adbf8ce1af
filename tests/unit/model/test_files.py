"""Model files on disk: opening, remembering, refusing, and finding them."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.gguf_bytes import number
from tests.support.model_headers import small
from tunerd.errors import ModelFileError
from tunerd.machine.files import Files
from tunerd.model.files import ModelFiles, find_models

MTP = [("blk.0.attn_q.weight", (8, 2)), ("blk.1.nextn.eh_proj.weight", (8, 2))]


def made(path: Path, architecture: str = "llama", *, mtp: bool = False) -> Path:
    keys = {"block_count": 2} | ({"nextn_predict_layers": 1} if mtp else {})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(small(architecture, keys, MTP if mtp else MTP[:1]))
    return path


def part(path: Path, index: int) -> Path:
    extra = [number("split.no", index), number("split.count", 3)]
    tensors = [(f"blk.{index}.attn_q.weight", (8, 2))]
    path.write_bytes(small("llama", {"block_count": 3}, tensors, extra))
    return path


@pytest.fixture
def models(tmp_path: Path) -> ModelFiles:
    return ModelFiles(tmp_path / "cache", Files())


def only(folders: list[Path], name: str, models: ModelFiles) -> Path:
    (found,) = find_models(folders, models, file_name=name).paths
    return found


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("*"))


def test_what_is_remembered_is_answered_until_the_file_changes(
    tmp_path: Path, models: ModelFiles
) -> None:
    path = made(tmp_path / "a.gguf", "llama")
    before = models.read_facts(path)
    (entry,) = entries(tmp_path)
    entry.write_text(json.dumps({**json.loads(entry.read_text()), "name": "from the cache"}))
    assert models.read_facts(path).name == "from the cache"

    made(path, "qwen35")
    os.utime(path, ns=(1, 1))
    after = models.read_facts(path)

    assert (before.architecture, after.architecture) == ("llama", "qwen35")
    assert before.identity.sha256 != after.identity.sha256


DAMAGES: tuple[bytes | dict[str, object], ...] = (
    b"", b"{", b"[]", b"null", b'{"written_by": "tunerd 0"}', b"\xff" * 100, b"[" * 100_000,
    {"blocks": "many"}, {"identity": {"files": []}}, {"n_nextn": None},
)  # fmt: skip


def test_a_damaged_cache_is_as_good_as_none(tmp_path: Path, models: ModelFiles) -> None:
    path = made(tmp_path / "a.gguf")
    facts = models.read_facts(path)
    (entry,) = entries(tmp_path)
    whole = json.loads(entry.read_text())
    for damage in DAMAGES:
        changed = damage if isinstance(damage, bytes) else json.dumps(whole | damage).encode()
        entry.write_bytes(changed)
        assert models.read_facts(path) == facts, damage


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")

    facts = ModelFiles(tmp_path / "cache", Files()).read_facts(made(tmp_path / "a.gguf"))

    assert facts.architecture == "llama"


def test_what_is_no_regular_file_is_refused_without_waiting(
    tmp_path: Path, models: ModelFiles
) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket.gguf"))
    kinds = {"pipe.gguf": "a pipe", "socket.gguf": "a socket", ".": "a directory", "/dev/zero": "a character device"}  # fmt: skip
    for path, kind in kinds.items():
        with pytest.raises(ModelFileError, match="not a regular file") as caught:
            models.read_facts(tmp_path / path)
        assert caught.value.cause == f"it is {kind}"


@dataclass(slots=True)
class Swapper(Files):
    """Puts a pipe in a model's place while its facts are looked up."""

    model: Path
    writer: threading.Thread

    def recall(self, *words: Any, **more: Any) -> Any:
        del words, more
        self.model.unlink()
        os.mkfifo(self.model)
        self.writer.start()
        time.sleep(0.2)  # until it waits for a reader


def test_what_takes_a_models_place_meanwhile_is_looked_at_before_it_is_opened(
    tmp_path: Path,
) -> None:
    """Root would have opened whatever the owner of the folder put there, a device too."""
    path = made(tmp_path / "a.gguf")
    writer = threading.Thread(target=lambda: os.close(os.open(path, os.O_WRONLY)))

    with pytest.raises(ModelFileError, match="changed while it was read"):
        ModelFiles(tmp_path / "cache", Swapper(path, writer)).read_facts(path)

    writer.join(0.3)
    was_opened = not writer.is_alive()
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer.join()  # which may come to it only now
    os.close(reader)
    assert not was_opened


def test_a_missing_file_is_named_with_what_to_do(tmp_path: Path, models: ModelFiles) -> None:
    with pytest.raises(ModelFileError, match="no such model file") as caught:
        models.read_facts(tmp_path / "gone.gguf")

    assert "models.dirs" in str(caught.value.hint)


def test_all_parts_are_read_whichever_is_given(tmp_path: Path, models: ModelFiles) -> None:
    paths = [part(tmp_path / f"big-0000{n + 1}-of-00003.gguf", n) for n in range(3)]

    first, *others = (models.read_facts(path) for path in paths)

    assert others == [first, first]
    assert len(first.blocks) == 3
    assert [file.path for file in first.identity.files] == paths
    assert len(entries(tmp_path)) == 1


def test_a_model_is_found_by_name_whatever_the_case(tmp_path: Path, models: ModelFiles) -> None:
    path = made(tmp_path / "models" / "deep" / "Qwen3.6-27B-Q4_K_M.gguf")
    made(tmp_path / "models" / "other.gguf")

    for name in ("qwen3.6-27b-q4_k_m.gguf", "*27B*", "deep/qwen*.GGUF"):
        assert only([tmp_path / "models"], name, models) == path


def test_a_split_model_is_found_once_by_its_plain_name(tmp_path: Path, models: ModelFiles) -> None:
    for n in range(3):
        part(tmp_path / f"big-0000{n + 1}-of-00003.gguf", n)

    for name in ("big.gguf", "BIG*", "big-00001-of-00003.gguf", None):
        found = find_models([tmp_path], models, file_name=name)
        assert [path.name for path in found.paths] == ["big-00001-of-00003.gguf"]
    assert only([tmp_path], "big-00002-of-00003.gguf", models).exists()


def test_a_model_is_found_by_what_its_header_says(tmp_path: Path, models: ModelFiles) -> None:
    made(tmp_path / "a.gguf", "llama")
    made(tmp_path / "b.gguf", "qwen35")
    wanted = made(tmp_path / "c.gguf", "qwen35", mtp=True)
    alone = small("qwen35", {"block_count": 2, "nextn_predict_layers": 1}, MTP[1:])
    (tmp_path / "mtp-c.gguf").write_bytes(alone)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")

    found = find_models([tmp_path], models, needs_mtp=True)

    assert found.paths == (wanted,)
    (problem,) = found.problems
    assert "broken.gguf" in problem


def test_links_that_lead_back_do_not_make_the_search_endless(
    tmp_path: Path, models: ModelFiles
) -> None:
    folder = tmp_path / "models"
    path = made(folder / "sub" / "a.gguf")
    (folder / "sub" / "back").symlink_to(folder)
    (folder / "self.gguf").symlink_to(folder / "self.gguf")

    found = find_models([folder, folder / "sub"], models)

    assert (found.paths, found.problems) == ((path,), ())


def test_where_nothing_and_what_else_was_found_is_said(tmp_path: Path, models: ModelFiles) -> None:
    made(tmp_path / "a1.gguf")
    made(tmp_path / "a2.gguf")
    for pattern, said in (("b*", str(tmp_path)), ("a*", "a1.gguf")):
        found = find_models([tmp_path], models, file_name=pattern)
        assert said in found.why_not_one([tmp_path])
    nowhere = find_models([], models, file_name="b*")
    assert "`models.dirs` is empty" in nowhere.why_not_one([])


def test_nothing_is_told_of_the_content_of_what_is_no_model(
    tmp_path: Path, models: ModelFiles
) -> None:
    """Whoever may ask for a plan may name any file that root can read."""
    path = tmp_path / "secret"
    path.write_text("root:hash" * 100)

    with pytest.raises(ModelFileError) as caught:
        models.read_facts(path)

    assert "root" not in str(vars(caught.value)).replace(str(path), "")
