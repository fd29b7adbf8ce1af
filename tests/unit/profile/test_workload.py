"""Workload files: what may stand in them, what is measured of them, and what is learned from a log."""

from __future__ import annotations

import tomllib
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.bench_samples import logged
from tests.support.folders import ROOT
from tunerd.engine.log import LEAST_REQUESTS, learn
from tunerd.profile.workload import (
    RequestClass,
    Workload,
    WorkloadShape,
    WorkloadTable,
    fitted,
    parse_tokens,
    shape_of,
    to_toml,
)

SHIPPED = ROOT / "profiles" / "workloads"
NAMES = ("chat", "coding-agent", "long-generation", "rag")


def shipped(name: str) -> WorkloadShape:
    data = tomllib.loads((SHIPPED / f"{name}.toml").read_text())
    return shape_of(name, WorkloadTable.model_validate(data))


def test_every_shipped_workload_is_right_and_says_where_its_figures_come_from() -> None:
    assert sorted(path.stem for path in SHIPPED.glob("*.toml")) == sorted(NAMES)
    for name in NAMES:
        shape = shipped(name)
        assert shape.description
        assert shape.source
        assert sum(shape.shares) == pytest.approx(1.0)


def test_the_coding_agent_has_the_prompt_and_the_reuse_of_the_write_up() -> None:
    tool = shipped("coding-agent").plain().classes[0]
    assert tool.cached_tokens + tool.new_tokens == 43241
    assert 700 < tool.new_tokens < 780
    assert tool.n_predict < 300


def test_percentiles_are_a_quantile_function_with_a_mean() -> None:
    length = parse_tokens({"p10": 100, "p50": 200, "p90": 600})
    assert (length.at(0.0), length.at(0.3), length.at(0.5), length.at(1.0)) == (100, 150, 200, 600)
    normal, n = NormalDist(), 20_000
    quantiles = [normal.inv_cdf((i + 0.5) / n) / normal.inv_cdf(0.9) for i in range(n)]
    lengths = [200 * (3.0 if z > 0 else 2.0) ** z for z in quantiles]
    assert length.mean == pytest.approx(sum(lengths) / n, rel=0.002)
    span = parse_tokens({"min": 10, "max": 30})
    assert span.mean == pytest.approx(20)


@pytest.mark.parametrize(
    "value",
    [-1, 2.5, True, "many", {}, {"p50": -1}, {"p0": 1}, {"p100": 2}, {"p10": 5, "p90": 4},
     {"min": 3}, {"median": 4}, None],
)  # fmt: skip
def test_what_is_no_length_is_refused_with_what_may_stand_there(value: object) -> None:
    with pytest.raises(ValueError, match="percentiles such as"):
        parse_tokens(value)
    with pytest.raises(ValidationError, match="percentiles such as"):
        WorkloadTable.model_validate({"classes": [{"prompt_tokens": 5, "answer_tokens": value}]})


def test_what_is_written_is_read_back_as_it_was() -> None:
    for name in NAMES:
        shape = shipped(name)
        data = tomllib.loads(to_toml(shape, {"requests": 3, "prompt_tokens": {"64": 3}}))
        table = WorkloadTable.model_validate(data)
        assert shape_of(name, table) == shape
        assert table.learned == {"requests": 3, "prompt_tokens": {"64": 3}}


def test_the_hash_is_of_what_is_measured() -> None:
    shape = shipped("rag")
    renamed = WorkloadShape(name="other", classes=shape.classes, description="other words")
    assert renamed.sha256 == shape.sha256
    assert shipped("chat").sha256 != shape.sha256


@given(
    st.lists(
        st.tuples(st.integers(0, 60000), st.integers(1, 60000), st.integers(2, 9000)),
        min_size=1, max_size=4,
    ),
    st.integers(256, 65536),
)  # fmt: skip
def test_what_does_not_fit_is_cut_until_it_does(
    sizes: list[tuple[int, int, int]], n_ctx: int
) -> None:
    workload = Workload(
        tuple(RequestClass(1.0, "chat", cached, new, out) for cached, new, out in sizes)
    )
    cut, indices = fitted(workload, n_ctx, margin_tokens=32)
    for index, (one, given_class) in enumerate(zip(cut.classes, workload.classes, strict=True)):
        assert one.depth_tokens <= n_ctx - 32
        assert one.new_tokens >= 1
        assert one.cached_tokens >= 0
        assert (one == given_class) == (index not in indices)


def test_a_log_becomes_classes_by_length_with_their_reuse_and_weight() -> None:
    agent = [logged(700 + i, 60 + i % 20, cached_n=42000) for i in range(60)]
    chat = [logged(300 + i, 500 + i, cached_n=100) for i in range(40)]
    learned = learn([*agent, *chat], name="mine", description="", source="")
    assert learned is not None
    talk, tools = learned.shape.classes
    assert (talk.weight, tools.weight) == (0.4, 0.6)
    assert tools.cached_share == pytest.approx(0.983, abs=0.002)
    assert 42700 < tools.prompt_tokens.at(0.5) < 42760
    assert 500 < talk.answer_tokens.at(0.5) < 540
    assert learned.rates.prompt_tok_s == pytest.approx(500.0)
    assert learned.rates.decode_tok_s == pytest.approx(50.0)
    assert {one.reasoning_tokens for one in learned.shape.classes} == {None}


def test_rare_requests_join_the_nearest_class_and_none_is_lost() -> None:
    requests = [logged(300, 100) for _ in range(98)] + [logged(30000, 100), logged(3000, 100)]
    learned = learn(requests, name="mine", description="", source="")
    assert learned is not None
    assert [one.weight for one in learned.shape.classes] == [1.0]
    assert learned.n_requests == 100


def test_probes_read_prefixes_and_requests_of_unknown_length_do_not_count() -> None:
    requests = [
        *[logged(300, 100) for _ in range(LEAST_REQUESTS)],
        *[logged(8, 4) for _ in range(4)],
        *[logged(24_000, 1) for _ in range(3)],
        *[logged(300, 100, cached_n=None) for _ in range(5)],
    ]
    learned = learn(requests, name="mine", description="", source="")
    assert learned is not None
    assert (learned.n_requests, learned.n_short, learned.n_unsure) == (LEAST_REQUESTS, 7, 5)
    assert learn(requests[1:], name="mine", description="", source="") is None


def test_the_mean_that_was_observed_is_kept_in_the_file() -> None:
    requests = [logged(200 + n, 60 if n % 10 else 250) for n in range(60)]
    learned = learn(requests, name="x", description="learned", source="a log")
    assert learned is not None
    (only,) = learned.shape.classes
    assert only.answer_tokens.mean == pytest.approx((54 * 60 + 6 * 250) / 60, abs=0.05)
    table = WorkloadTable.model_validate(tomllib.loads(to_toml(learned.shape, {})))
    assert shape_of("x", table).classes == learned.shape.classes


# The mix of requests, and the turn time that it adds up to.

SHORT = RequestClass(3.0, "chat", cached_tokens=500, new_tokens=100, n_predict=200)
LONG = RequestClass(1.0, "code", cached_tokens=0, new_tokens=9000, n_predict=400)


def test_the_turn_time_is_the_mean_of_the_classes_by_weights_that_need_not_add_up_to_one() -> None:
    assert Workload((SHORT, LONG)).shares == (0.75, 0.25)
    assert Workload((SHORT, LONG)).turn_time_s([2.0, 10.0]) == pytest.approx(4.0)


def test_weights_whose_sum_has_no_end_are_refused() -> None:
    """All shares were 0 then, and a measurement divided by them once production was stopped."""
    row = {"prompt_tokens": 5, "answer_tokens": 5, "weight": 1e308}
    with pytest.raises(ValidationError, match="less than or equal to 1000000"):
        WorkloadTable.model_validate({"classes": [row, row]})


def test_the_deepest_class_is_the_one_that_uses_most_context() -> None:
    assert Workload((SHORT, LONG)).deepest == 1
    assert Workload((LONG, SHORT)).deepest == 0
    assert SHORT.depth_tokens == 800
