"""What is stored of tunerd's own requests, which are no traffic of the people it serves."""

from __future__ import annotations

from tunerd.actions.context import Context
from tunerd.core.own_requests import OwnRequests
from tunerd.core.sample import Timings
from tunerd.system.store import open_to_read

_N_RUNS = 500


def own_requests(ctx: Context) -> OwnRequests:
    """Requests of the newest measurements, whatever server they were put to.

    Raises:
        HostError: the store is damaged or cannot be read.
    """
    store = open_to_read(ctx.paths.evidence)
    if store is None:
        return OwnRequests()
    timings: list[Timings] = []
    n_unknown = 0
    with store:
        for run in store.runs(limit=_N_RUNS):
            for sample in store.samples(run.number):
                one = sample.timings
                if one is None or one.prompt_ms is None or one.predicted_ms is None:
                    n_unknown += 1
                else:
                    timings.append(one)
        n_unknown += sum(one.n_rows for one in store.damage)
    return OwnRequests(tuple(timings), n_unknown)
