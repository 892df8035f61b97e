"""Rounding errors of heads: known ones, and how they are stored; `test_fit` has those of fitted codes."""

from __future__ import annotations

import json

import numpy as np

from calib import rounding
from calib.recipes import ERRORS
from calib.rounding import RoundingErrors
from pallas_kernels.transform_code import TransformCode


def test_unit_variance_leaves_the_known_shares_and_dropped_coordinates_all_of_theirs():
    dim, eye = 64, np.broadcast_to(np.eye(64), (1, 2, 64, 64))
    bits = np.full((1, 2, dim), 2)
    bits[0, 1, 32:] = 0
    code = TransformCode.build(
        mu=np.ones((1, 2, dim)), encode=eye, inverse=eye, bits=bits, delta=np.full(bits.shape, 0.996), weight=bits > 0
    )
    mean = np.ones((1, 2, dim))
    found = rounding.measure(code, mean, eye, eye, scale_dtype="float16")
    np.testing.assert_allclose(found, [[ERRORS[2], (1 + ERRORS[2]) / 2]], rtol=0.05)
    kept_only = eye * (np.arange(dim) < 32)
    found = rounding.measure(code, mean, eye, kept_only, scale_dtype="float16")
    np.testing.assert_allclose(found, [[ERRORS[2]] * 2], rtol=0.08)  # the fitted scale takes 1 in 32
    assert not rounding.measure(code, mean, eye, 0 * eye, scale_dtype="float16").any()


def test_errors_survive_json_and_other_versions_are_left_unread():
    errors = RoundingErrors.of(key=np.array([[0.123456, 0.0]]), value=np.array([[1.0, 2.5e-7]]))
    assert errors == RoundingErrors(((0.1235, 0.0),), ((1.0, 2.5e-7),))
    tree = json.loads(json.dumps({"key": errors.key, "value": errors.value, "version": 1}))
    assert RoundingErrors.from_json(tree) == errors
    assert RoundingErrors.from_json(None) is None
    assert RoundingErrors.from_json({"version": 2, "rows": "other"}) is None
