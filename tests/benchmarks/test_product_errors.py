"""The errors that benchmarks.products prints beside times."""

from __future__ import annotations

import io

import numpy as np
import pytest
from bench_support import FAKE, case_of, settings

from benchmarks import products
from benchmarks.peers.base import Rotated
from benchmarks.products.engines import OUTLIER, CpuEngine, errors, with_outliers

X = np.random.default_rng(7).standard_normal((5, 256), np.float32)


def in_8_bits(x, values):
    """x with a scale for each so many values of a row."""
    parts = x.reshape(len(x), -1, values)
    scale = np.abs(parts).max(-1, keepdims=True) / 127
    return (np.rint(parts / scale) * scale).reshape(x.shape)


def contender(case, change=lambda x: x):
    made = Rotated([case.dense()], lambda x, w: change(x).astype(np.float32) @ w.T)
    made.bind(X)()
    return made


def test_one_value_of_each_row_is_large():
    changed, columns = with_outliers(X)
    assert (changed != X).sum() == len(X)
    assert all(changed[row, column] == OUTLIER for row, column in enumerate(columns))


def test_float32_sums_have_hardly_an_error():
    plain, outlier = errors(case_of("q4_0"), X, contender(case_of("q4_0")))
    assert 0 < plain < 1e-6
    assert 0 < outlier < 1e-4


def test_a_scale_for_a_whole_row_loses_what_is_beside_an_outlier():
    case = case_of("q4_0")
    by_32, by_row = (errors(case, X, contender(case, lambda x, v=v: in_8_bits(x, v))) for v in (32, 256))
    assert by_32[0] < by_row[0] < 0.02
    assert by_32[1] < 0.5
    assert by_row[1] > 0.6


@pytest.mark.parametrize(("activations", "most"), [("exact", 1e-6), ("q16", 1e-4), ("q8", 0.02)])
def test_our_own_error(activations, most):
    ours, _ = CpuEngine().prepare(case_of("q4_0", activations), 0)
    ours.bind(X)()
    plain, outlier = errors(case_of("q4_0", activations), X, ours)
    assert 0 < plain < most
    assert 0 < outlier < 60 * most


def test_weights_of_another_format_have_no_error_of_their_own():
    """They would be compared with weights that they do not have."""
    run = products.Bench(settings(formats="q4_0", m="1"), FAKE)
    case = run.settings.cases[0]
    ours, nbytes = run.engine.prepare(case, 0)
    seconds, found = run._time(case, 1, {"billfish": ours, "other": contender(case), "other:u4": contender(case)})
    assert seconds.keys() == {"billfish", "other", "other:u4"}
    assert found.keys() == {"billfish", "other"}
    record = run._record(case, 1, nbytes, seconds.pop("billfish"), seconds)
    run.report.records.append(record | {"error": found.pop("billfish"), "peer_errors": found})
    out = io.StringIO()
    products.print_report(run.report, out)
    head, row = out.getvalue().splitlines()[:2]
    assert head.split().count("error") == 3
    assert row.split()[-2] == "-"
