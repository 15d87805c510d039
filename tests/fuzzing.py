"""What the tests with random arguments share."""

import os

import hypothesis
import keras
import pytest

MARKS = [
    pytest.mark.slow,
    pytest.mark.every_backend,
    pytest.mark.skipif(
        keras.backend.backend() != "torch",
        reason="The others compile each case for a second.",
    ),
]
# Cases of each layer: more than 9,000 of all layers together.
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "300"))


def settings(examples):
    """How many cases are drawn, the same ones each time."""
    return hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
