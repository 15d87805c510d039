"""Parameters of tests of which some run in the sweeps alone."""

import pytest


def swept(values, *fast):
    """All values; the tests of those that are not `fast` are in the sweeps."""
    unknown = [value for value in fast if value not in values]
    if unknown:
        raise ValueError(f"{unknown} are not among the values {values}")
    return [
        value if value in fast else pytest.param(value, marks=pytest.mark.sweep)
        for value in values
    ]
