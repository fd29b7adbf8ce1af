"""Random profiles: every key that leaves a flag, with every kind of value that its schema takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st
from pydantic import BaseModel

from tunerd.app import Context
from tunerd.engine.capabilities import Engine
from tunerd.engine.flags import CommandLine, RenderContext
from tunerd.engine.serving import read_live_unit
from tunerd.production.plan import Plan, unit_spec, unit_text_of
from tunerd.profile.layers import Layer, LayerFile, Resolved, default_layer, resolve
from tunerd.profile.schema import BuildsWords, KvType, Memory, Serving, Speculation, nest

# Letters that mean something to a shell, to systemd, to TOML or to a template.
HOSTILE = st.sampled_from(
    [" ", '"', "'", "\\", "$", "%", "@", "#", ";", "=", ",", "-", "--port", "%d/api-key", "@UNIT@",
     "#@end", "#@if system", "[Service]", "ExecStartPre=/bin/true", "${HOME}", "$$", "é", "日本",
     "\u2028", "\u00a0", "a"]
)  # fmt: skip
TEXT = st.lists(HOSTILE, min_size=1, max_size=6).map("".join)
MOST = 200_000
JSON = st.dictionaries(
    st.sampled_from(["a", "enable_thinking", "b.c"]),
    st.one_of(st.booleans(), st.integers(-5, 5), TEXT, st.lists(st.integers(0, 3), max_size=2)),
    max_size=3,
)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    str: TEXT,
    tuple: st.lists(st.sampled_from(["blk\\.1\\..*=CPU", r"exps=CPU", "a b=CUDA0"]), max_size=2),
    dict: JSON,
}


def _values(kind: Any, bounds: Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    """Values of a type of the schema; of a union of words and any text the words alone."""
    if kind is KvType:
        return st.sampled_from(["f16", "q8_0", "q4_0"])
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _values(
            parts[0], [one for part in parts[1:] for one in getattr(part, "metadata", ())]
        )
    if origin is Literal:
        return st.sampled_from(parts)
    if origin in {Union, UnionType}:
        wanted = [part for part in parts if part not in {type(None), BuildsWords}]
        return st.one_of([_values(part) for part in wanted])
    if kind in {int, float}:
        least = max((one.ge for one in bounds if hasattr(one, "ge")), default=0)
        most = min((one.le for one in bounds if hasattr(one, "le")), default=MOST)
        if kind is int:
            return st.integers(least, min(most, MOST))
        return st.floats(least, most, allow_nan=False).map(lambda value: round(value, 4))
    return PLAIN[origin or kind]


SECTIONS: dict[str, type[BaseModel]] = {
    "serving": Serving,
    "speculation": Speculation,
    "memory": Memory,
}
KEYS: dict[str, st.SearchStrategy[Any]] = {
    "model.mmproj": TEXT,
    "model.chat_template_file": TEXT,
    **{
        f"{section}.{name}": _values(field.annotation)
        for section, table in SECTIONS.items()
        for name, field in table.model_fields.items()
        if name not in {"api_key_file", "draft_hf_repo"}
    },
    "serving.host": st.sampled_from(["127.0.0.1", "0.0.0.0", "::1", "localhost"]),  # noqa: S104
    "memory.device": st.sampled_from(["CUDA0", "none"]),
}
PROFILE_DATA = st.lists(st.sampled_from(sorted(KEYS)), max_size=14, unique=True).flatmap(
    lambda keys: st.fixed_dictionaries({key: KEYS[key] for key in keys})
)


def profile_of(data: dict[str, Any]) -> Resolved:
    """A profile with these keys over tunerd's defaults, as a site's file would have them."""
    layers = (default_layer(), LayerFile(Layer.SITE, "site.toml", nest(data)))
    result = resolve("random", layers)
    assert isinstance(result, Resolved), [str(problem) for problem in result]
    return result


def context(*, has_gpu: bool, cores: int | None = 8) -> RenderContext:
    """A machine for which random profiles are rendered."""
    return RenderContext("/usr/bin/llama-server", "/models/m.gguf", has_gpu, cores)


def a_plan_for(ctx: Context, program: Path) -> Plan:
    """What a profile with an engine in a home would deploy; nothing stands against it."""
    engine = Engine(program, "settings", "home")
    resolved, live, command = profile_of({}), read_live_unit(ctx), CommandLine(str(program), ())
    spec = unit_spec(ctx, resolved, engine, command, live)
    unread: Any = None
    return Plan(
        engine, resolved, command, program, (), False, (), unit_text_of(ctx, spec), live,
        diff="", messages=(), live_sha256=None, facts=unread, memory=unread, host=unread, stamps={},
    )  # fmt: skip
