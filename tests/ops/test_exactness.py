"""The exactness rule against what convolution and pooling really do."""

import itertools
import re

import numpy as np
import pytest
from keras import ops

from keras_equiattn.ops.exactness import is_exact
from keras_equiattn.ops.exactness import require_exact
from keras_equiattn.ops.geometry import output_size


def really_exact(operation, x, axes):
    """Whether reversing the axes before or after makes no difference."""
    y = ops.convert_to_numpy(operation(x))
    moved = ops.convert_to_numpy(operation(np.flip(x, axes).copy()))
    return np.abs(np.flip(y, axes) - moved).max() < 1e-5


def reversal_cases(sizes, windows, strides, dilations):
    for n, k, s, d, padding in itertools.product(
        sizes, windows, strides, dilations, ("valid", "same")
    ):
        if d * (k - 1) + 1 <= n and (s == 1 or d == 1):
            yield n, k, s, d, padding


def check_convolution(sizes, windows, strides, dilations):
    """All cases of one axis: a column convolved with a symmetric window."""
    rng = np.random.default_rng(0)
    verdicts = set()
    for n, k, s, d, padding in reversal_cases(
        sizes, windows, strides, dilations
    ):
        half = rng.uniform(0.5, 1, (k, 1, 1, 1)).astype("float32")
        kernel = half + half[::-1]

        def convolve(x, kernel=kernel, s=s, d=d, padding=padding):
            return ops.conv(
                x,
                kernel,
                strides=(s, 1),
                padding=padding,
                data_format="channels_last",
                dilation_rate=(d, 1),
            )

        x = rng.normal(size=(1, n, 1, 1)).astype("float32")
        rule = is_exact("p2", (n, 1), (k, 1), (s, 1), (d, 1), padding)
        assert really_exact(convolve, x, 1) == rule, (n, k, s, d, padding)
        size = output_size(n, k, s, d, padding)
        assert convolve(x).shape[1] == size
        verdicts.add(rule)
    assert verdicts == {True, False}


def check_pooling(sizes, windows, strides, pools):
    rng = np.random.default_rng(0)
    for pool in pools:
        for n, k, s, _, padding in reversal_cases(
            sizes, windows, strides, (1,)
        ):

            def reduce(x, pool=pool, k=k, s=s, padding=padding):
                return pool(
                    x, (k, 1), (s, 1), padding, data_format="channels_last"
                )

            x = rng.normal(size=(1, n, 1, 1)).astype("float32")
            rule = is_exact("p2", (n, 1), (k, 1), (s, 1), 1, padding)
            if rule:  # a maximum can agree by accident where the rule says no
                assert really_exact(reduce, x, 1), (n, k, s, padding)
            else:
                xs = rng.normal(size=(64, n, 1, 1)).astype("float32")
                assert not really_exact(reduce, xs, 1), (n, k, s, padding)


def test_convolution():
    check_convolution((5, 6, 7, 8), (1, 2, 3), (1, 2, 3), (1, 2))


@pytest.mark.slow
def test_convolution_all():
    check_convolution(range(5, 14), range(1, 6), (1, 2, 3, 4), (1, 2, 3))


def test_pooling():
    check_pooling((5, 6, 7), (2, 3), (2, 3), (ops.max_pool,))


@pytest.mark.slow
def test_pooling_all():
    check_pooling(
        range(5, 14), range(1, 6), (1, 2, 3), (ops.max_pool, ops.average_pool)
    )


@pytest.mark.parametrize("n", [31, 32, 33])
def test_known_table(n):
    """What was measured on all backends before the rule was written."""
    odd = n % 2 == 1
    assert is_exact("p4", n, 3, 1, 1, "same")
    assert is_exact("p4", n, 3, 2, 1, "same") == odd
    assert is_exact("p4", n, 3, 2, 1, "valid") == odd
    assert is_exact("p4", n, 2, 2, 1, "valid") != odd
    assert is_exact("p4", n, 2, 2, 1, "same") != odd


@pytest.mark.once
def test_which_axes_matter():
    along_height = {"size": (32, 31), "window": 3, "strides": 2}
    along_width = {"size": (31, 32), "window": 3, "strides": 2}
    assert is_exact("z2", **along_height)
    assert is_exact("z2", **along_width)
    assert is_exact("z2m", **along_height)
    assert not is_exact("z2m", **along_width)
    for group in ("p2", "p2m", "p4", "p4m", "p8", "p12m"):
        assert not is_exact(group, **along_height)
        assert not is_exact(group, **along_width)
        assert is_exact(group, (31, 33), 3, 2)


@pytest.mark.once
def test_quarter_turns_need_equal_axes():
    for unequal in (
        {"window": (3, 5)},
        {"window": 3, "strides": (1, 2)},
        {"window": 3, "dilation": (1, 2)},
    ):
        assert is_exact("p2m", 31, **unequal)
        assert not is_exact("p4", 31, **unequal)
        assert not is_exact("p8", 31, **unequal)


@pytest.mark.once
def test_unknown_sizes():
    assert is_exact("p4", None, 3, 1, 1, "same")
    assert is_exact("p4", (None, 8), 4, 1, 1, "valid")
    assert not is_exact("p4", None, 4, 1, 1, "same")
    assert not is_exact("p4", None, 2, 2)
    assert not is_exact("p4", (8, None), 2, 2)
    assert is_exact("z2m", (None, 8), 2, 2)
    assert is_exact("z2", None, 2, 2)


@pytest.mark.once
def test_unknown_sizes_pass_where_some_size_is_exact():
    cases = itertools.product(range(1, 6), range(1, 5), ("valid", "same"))
    for window, strides, padding in cases:
        some = any(
            is_exact("p4", n, window, strides, 1, padding) for n in range(1, 20)
        )
        try:
            require_exact(
                "w", "p4", None, window, strides, 1, padding, allow_unknown=True
            )
        except ValueError:
            assert not some, (window, strides, padding)
        else:
            assert some, (window, strides, padding)


@pytest.mark.once
def test_huge_strides_are_answered_at_once():
    with pytest.raises(ValueError, match=r"exact strides up to \d+ are: 1"):
        require_exact("conv", "p4", 32, 3, 2**31 - 1, 1, "same")
    with pytest.raises(ValueError, match=r"`strides` must be below 2\*\*31"):
        is_exact("p4", 32, 3, 2**63)


@pytest.mark.once
def test_message_names_what_would_be_exact():
    with pytest.raises(ValueError, match="exactly equivariant") as info:
        require_exact("conv 'c'", "p4", 32, 3, 2, 1, "same")
    message = str(info.value)
    for part in ("conv 'c'", "'p4'", "(32, 32)", "31, 33", "up to 3 are: 1."):
        assert part in message
    assert "`exact=False`" in message
    assert "SpatialPooling2D" in message
    named = [29, 31, 33, 35]
    assert all(is_exact("p4", n, 3, 2, 1, "same") for n in named)

    with pytest.raises(ValueError, match="use an odd window"):
        require_exact("conv", "p4", 32, 2, 1, 1, "same")
    with pytest.raises(ValueError, match="square window"):
        require_exact("conv", "p4", 32, (1, 3))
    with pytest.raises(ValueError, match="known only at run time"):
        require_exact("conv", "p4", None, 3, 2)
    require_exact("conv", "z2", 32, 3, 2)


@pytest.mark.once
@pytest.mark.parametrize("group", ["z2m", "p2", "p4", "p8"])
@pytest.mark.parametrize("size", [(31, 32), (32, 31), (8, 8)])
@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("strides", [2, 3])
def test_every_number_in_the_message_is_exact(
    group, size, padding, window, strides
):
    arguments = (group, size, window, strides, 1, padding)
    if is_exact(*arguments):
        require_exact("conv", *arguments)
        return
    with pytest.raises(ValueError, match="exactly equivariant") as info:
        require_exact("conv", *arguments)
    message = str(info.value)
    assert "  " not in message
    (sizes,) = re.findall(r"nearest exact sizes are: ([\d, ]+)\.", message)
    sizes = [int(n) for n in sizes.split(", ")]
    assert sizes
    assert all(is_exact(group, n, window, strides, 1, padding) for n in sizes)
    steps = [
        n
        for n in range(1, strides + 2)
        if is_exact(group, size, window, n, 1, padding)
    ]
    named = ", ".join(map(str, steps))
    exact = f"exact strides up to {strides + 1} are: {named}."
    assert (exact in message) == bool(steps)


@pytest.mark.once
def test_forms_of_the_arguments():
    assert is_exact("p4", np.array([31, 33]), [3, 3], np.int64(2))
    assert not is_exact("p4", [9, 8], 3, 2)
    assert not is_exact("z2", 3, 5)  # does not fit
    for arguments, message in (
        (("p4", 32, 3, 1, 1, "full"), "'valid' or 'same'.*'full'"),
        (("p4", 9, 0), "`window` must be a positive integer or a pair.*0"),
        (("p4", 7, 5, 3, 0), "`dilation` must be.*0"),
        (("p4", (7, 7, 7), 3), r"`size` must be.*\(7, 7, 7\)"),
        (("p4", -1, 3), "`size` must be a positive integer.*-1"),
    ):
        with pytest.raises(ValueError, match=message):
            is_exact(*arguments)
