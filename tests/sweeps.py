"""Parameters of tests of which some run in the sweeps alone."""

import pytest


def swept(values, *fast):
    """All values; the tests of those that are not `fast` are in the sweeps."""
    return [
        value if value in fast else pytest.param(value, marks=pytest.mark.sweep)
        for value in values
    ]
