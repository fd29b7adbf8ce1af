"""What `-hf` means is what real builds make of it: the same file of the cache of Hugging Face."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import needs
from tests.support.server_process import serving
from tunerd.model.files import cached_models, hub_cache
from tunerd.tryout.designed import SHAPES, design, write

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOADED = r"from (\S+\.gguf) \(version"
REPOSITORIES = {
    "maker/usual": ("x-Q8_0.gguf", "x-Q4_K_M.gguf", "x-UD-Q4_K_XL.gguf", "imatrix-x.gguf"),
    "maker/eight": ("x-Q8_0.gguf", "x-Q6_K.gguf", "mtp-x-Q4_K_M.gguf"),
    "maker/drafters": (
        "dflash-x-Q4_K_M.gguf",
        "x-eagle3-Q4_K_M.gguf",
        "MTP-x-Q4_K_M.gguf",
        "x-mtp-Q4_K_M.gguf",
    ),
    "maker/letters": ("x-MMProj-iMatrix-Q4_K_M.gguf",),
    "maker/small": ("x-27b-mtp-Q4_K_M.gguf",),
    "maker/split": ("Q4_K_M/x-Q4_K_M-00001-of-00001.gguf", "x-BF16.gguf"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache as `hf download` leaves it: links from snapshots to one real file each."""
    made = tmp_path_factory.mktemp("hf")
    model = write(design(SHAPES["tiny-nomtp"]), made / "tiny.gguf")
    for repository, names in REPOSITORIES.items():
        folder = made / "hub" / f"models--{repository.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs/main").write_text(COMMIT)
        for name in names:
            link = folder / "snapshots" / COMMIT / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(model)
    return made


NEWER, OLDER, OLDEST = "mainline-2026-08-18", "mainline-2026-05-16", "mainline-2026-04-26"


@pytest.mark.engine
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (NEWER, ("maker/usual",)),
        (OLDER, ("maker/usual:UD-Q4_K_XL",)),
        (NEWER, ("maker/usual:q8_0",)),
        (NEWER, ("maker/usual:Q4_K_XL",)),
        (NEWER, ("maker/usual", "-hff", "x-Q8_0.gguf")),
        (OLDER, ("maker/eight:Q6_K",)),
        (NEWER, ("maker/drafters",)),
        (NEWER, ("maker/letters",)),
        (OLDEST, ("maker/small",)),
        (NEWER, ("maker/split",)),
    ],
)
def test_the_file_behind_a_repository_is_the_one_that_a_server_loads(
    home: Path, build: str, words: tuple[str, ...]
) -> None:
    hub = hub_cache({"HF_HOME": str(home)})
    assert hub is not None
    (found,) = cached_models(hub, words[0], words[2] if len(words) > 1 else None)

    options = ("-hf", *words, "--offline", "-lv", "4", "-t", "1", "-c", "512", "-np", "1")
    argv, environment = (str(needs.engine(build)), *options), {"HF_HOME": str(home)}
    with serving(argv, home / "log", environment=environment) as server:
        loaded = server.wait_logged(LOADED)

    assert Path(loaded[1]) == found
