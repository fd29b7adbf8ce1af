"""How often a fuzzer tries: a sample that is the same each time, or as often as is asked for, at random.

`TUNERD_TEST_EXAMPLES=20000 pytest tests/integration/engine/test_fuzz.py` tries so many of each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

VARIABLE = "TUNERD_TEST_EXAMPLES"
# What programs print where a number is meant.
ODD_NUMBERS = ("0", "-1", "-0", "1e999", "-1e400", "nan", "inf", "NaN", "9" * 25, "9" * 5000,
               "0x10", "1_0", "\uff11\uff12", "", "-", "1e-400", "4294967295", "18446744073709551615")  # fmt: skip


def is_asked_for() -> bool:
    """Whether more than a sample is wanted."""
    return VARIABLE in os.environ


def often(sample: int, *, most: int = 10**9) -> settings:
    """Settings of a fuzzer: `sample` examples, or as many as `TUNERD_TEST_EXAMPLES` says, but for `most`."""
    asked = os.environ.get(VARIABLE)
    return settings(
        max_examples=min(int(asked), most) if asked else sample,
        derandomize=asked is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def torn(lines: Sequence[str]) -> st.SearchStrategy[str]:
    """A line of a real log, whole or with pieces of it replaced: numbers by odd ones, ends cut, joined."""
    whole = st.sampled_from(lines)

    @st.composite
    def changed(draw: st.DrawFn) -> str:
        words = draw(whole).split(" ")
        for _ in range(draw(st.integers(0, 3))):
            at = draw(st.integers(0, len(words) - 1))
            words[at] = draw(
                st.sampled_from(ODD_NUMBERS)
                | st.text(max_size=12)
                | st.from_regex(r"[0-9]{1,30}", fullmatch=True)
                | st.just(words[draw(st.integers(0, len(words) - 1))])
            )
        line = " ".join(words)
        cut = draw(st.integers(0, len(line)))
        return draw(st.sampled_from([line, line[:cut], line[cut:], line[:cut] + draw(whole)]))

    return changed() | st.text(max_size=80)
