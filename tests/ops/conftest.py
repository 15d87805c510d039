"""Fixtures of the tests of operators."""

import pytest


@pytest.fixture
def limited(monkeypatch):
    """Sets how many scores a line of a block may have."""
    # Not before: what `jaxtyping` checks must not be imported when pytest
    # starts, which reads this file first where it is asked for this folder.
    from keras_equiattn.ops.pairs import dispatch

    def limit(scores):
        for name in ("COMPILED_BLOCK", "EAGER_BLOCK"):
            monkeypatch.setattr(dispatch, name, scores)

    return limit


@pytest.fixture
def unchecked(monkeypatch):
    """Switches off the checks of annotations, which only tests run."""
    from jaxtyping import config

    monkeypatch.setattr(config, "jaxtyping_disable", True)
