"""Fixtures of the tests of operators."""

import pytest

from keras_equiattn.ops.pairs import dispatch


@pytest.fixture
def limited(monkeypatch):
    """Sets how many scores a line of a block may have."""

    def limit(scores):
        for name in ("COMPILED_BLOCK", "EAGER_BLOCK"):
            monkeypatch.setattr(dispatch, name, scores)

    return limit
