"""Group self-attention: contract, oracle, sizes, arguments."""

import keras
import numpy as np
import pytest
from group_attention_helpers import case
from group_attention_helpers import LAYERS
from group_attention_helpers import oracle
from group_attention_helpers import order_of
from group_attention_helpers import random_layer
from group_attention_helpers import sample
from group_attention_helpers import SLOW
from group_attention_helpers import tolerance
from keras import ops
from layer_contract import as_array
from layer_contract import DTYPE
from layer_contract import gradients
from layer_contract import LayerContract
from layer_contract import weights_of

from keras_equiattn.layers import GroupPooling
from keras_equiattn.layers import GroupSelfAttention2D
from keras_equiattn.layers import LiftingSelfAttention2D
from keras_equiattn.layers import RelativePositionEncoding
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import relative_difference

ARGUMENTS = {
    "filters": 5,
    "key_dim": 4,
    "num_heads": 2,
    "kernel_size": 3,
    "group": "p4m",
    "attention_dropout": 0.1,
    "epsilon": 1e-12,
    "recompute": False,
    "kernel_initializer": keras.initializers.HeNormal(seed=1),
    "bias_initializer": keras.initializers.Constant(0.5),
    "kernel_regularizer": keras.regularizers.L2(0.01),
    "seed": 7,
    "scale": 0.3,
    "window_shape": "disc",
    "data_format": "channels_first",
}


class TestLiftingSelfAttention2D(LayerContract):
    layer = LiftingSelfAttention2D
    cases = (case(layer, "p4", (5, 5), 3, 2),)
    arguments = (ARGUMENTS,)


class TestGroupSelfAttention2D(LayerContract):
    layer = GroupSelfAttention2D
    cases = (
        case(layer, "p4", (4, 4), 3, 2, rectangle=(4, 5)),
        case(layer, "z2m", (4, 3), None, 1),
    )
    arguments = (
        {
            **ARGUMENTS,
            "embedding_initializer": keras.initializers.RandomUniform(seed=3),
        },
    )


@pytest.mark.sweep
class TestEveryGroupSelfAttention(LayerContract):
    """The same on all groups, windows, heads, even and odd sizes."""

    # Tested above, for each class by itself.
    test_golden_weights = None
    test_config_holds_every_argument_with_its_value = None

    cases = tuple(
        case(layer, group, size, window, heads, rectangle)
        for group, size, window, heads, rectangle, layers in (
            ("z2", (5, 6), 3, 1, None, LAYERS),
            ("z2", (4, 4), None, 2, (3, 5), LAYERS),
            ("z2m", (6, 5), 3, 2, (5, 6), LAYERS),
            ("z2m", (4, 5), None, 1, (3, 3), LAYERS),
            ("p4", (5, 5), 3, 2, (4, 6), LAYERS[:1]),
            ("p4", (4, 4), None, 2, (5, 3), LAYERS),
            ("p4", (5, 5), None, 1, None, LAYERS[1:]),
            ("p4m", (6, 6), 3, 1, (5, 4), LAYERS),
            ("p4m", (4, 4), None, 2, None, LAYERS[:1]),
            ("p4m", (3, 3), None, 1, (2, 3), LAYERS[1:]),
            ("p8", (4, 4), 3, 2, None, LAYERS),
            ("p8", (3, 3), None, 1, None, LAYERS[:1]),
        )
        for layer in layers
    )
    layer = GroupSelfAttention2D
    arguments = (ARGUMENTS,)


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("group", "window", "size"),
    [
        ("p4m", 3, (4, 3)),
        ("p8", 3, (3, 4)),
        ("z2m", None, (3, 4)),
        pytest.param("p4m", None, (3, 4), marks=SLOW),
        pytest.param("p8", None, (4, 3), marks=SLOW),
        pytest.param("z2m", 5, (4, 3), marks=SLOW),
        pytest.param("p8m", 5, (4, 3), marks=SLOW),
    ],
)
def test_oracle(layer, group, window, size):
    made = random_layer(layer, group, window)
    x = sample(made, size)
    y, maps = made(x, return_attention_maps=True)
    expected, expected_maps = oracle(made, x)
    assert relative_difference(as_array(y), expected) < tolerance()
    actual = as_array(maps["window" if window else "image"])
    assert relative_difference(actual, expected_maps) < tolerance()


@pytest.mark.parametrize("layer", LAYERS)
def test_shapes_of_windows(layer):
    options = {"filters": 4, "key_dim": 4, "num_heads": 1}
    for group, size, shape, scale in (
        ("p4m", 3, "square", 0.5),
        ("p8", None, "square", 0.5),
        ("p8", 3, "disc", 0.125),
    ):
        made = layer(**options, kernel_size=size, group=group)
        made.build((None, 4, 4, *order_of(made), 4))
        assert (made.window_shape, made._scale) == (shape, scale)
        assert made.window is None or made.window.shape == shape
        if size:
            config = made.get_config()
            del config["window_shape"]  # as in older files
            assert layer.from_config(config).window_shape == "square"
    with pytest.raises(ValueError, match=r"A disc needs.*kernel_size=None"):
        layer(**options, kernel_size=None, window_shape="disc")
    with pytest.raises(ValueError, match=r"`window_shape`.*'circle'"):
        layer(**options, window_shape="circle")
    with pytest.raises(ValueError, match=r"`scale` must be None or.*0"):
        layer(**options, scale=0)


def test_weights_of_one_kind_start_differently():
    layer = GroupSelfAttention2D(6, 6, 2)
    layer.build((None, 6, 6, 4, 12))
    w = weights_of(layer)
    for first, second in (
        ("query_kernel", "key_kernel"),
        ("key_kernel", "value_kernel"),
        ("row_kernel_1", "column_kernel_1"),
        ("row_kernel_2", "column_kernel_2"),
    ):
        values = np.stack([w[first].ravel(), w[second].ravel()])
        assert abs(np.corrcoef(values)[0, 1]) < 0.6
    # By the fan-in of each linear map: channels, or those of all heads.
    wide = GroupSelfAttention2D(64, 32, 4)
    wide.build((None, 6, 6, 4, 50))
    w = weights_of(wide)
    assert np.isclose(w["query_kernel"].std(), (2 / 50) ** 0.5, rtol=0.1)
    assert np.isclose(w["output_kernel"].std(), (2 / 128) ** 0.5, rtol=0.1)


@pytest.mark.torch_first
@pytest.mark.parametrize("group", ["z2", "p4"])
def test_a_window_larger_than_the_image(group):
    layer = random_layer(GroupSelfAttention2D, group, window=7)
    x = sample(layer, (2, 3))
    expected, _ = oracle(layer, x)
    assert relative_difference(as_array(layer(x)), expected) < tolerance()


@pytest.mark.torch_first
def test_a_window_of_one_pixel():
    for layer in LAYERS:
        made = random_layer(layer, "z2m", window=1)
        x = sample(made, (2, 3))
        expected, _ = oracle(made, x)
        assert relative_difference(as_array(made(x)), expected) < tolerance()


@pytest.mark.torch_first
def test_images_on_the_group_of_translations():
    layer = random_layer(GroupSelfAttention2D, "z2")
    x = sample(layer, (4, 5))
    expected = as_array(layer(x))[:, :, :, 0]
    flat = as_array(layer(x[:, :, :, 0]))
    assert relative_difference(flat, expected) < 1e-6


@pytest.mark.torch_first
@pytest.mark.parametrize("window", [3, None])
def test_trains_at_sizes_known_only_at_run_time(window):
    inputs = keras.Input((None, None, 2))
    x = LiftingSelfAttention2D(3, 2, 1, window, attention_dropout=0.2)(inputs)
    x = GroupSelfAttention2D(3, 3, 2, window, attention_dropout=0.2)(x)
    x = keras.layers.GlobalAveragePooling2D()(GroupPooling()(x))
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    model.compile("sgd", "mse")
    start = [as_array(v) for v in model.trainable_variables]
    rng = np.random.default_rng(0)
    for size in ((4, 3), (5, 5)):
        images = rng.normal(size=(2, *size, 2)).astype("float32")
        model.fit(images, rng.normal(size=(2, 2)), verbose=0)
    for before, variable in zip(start, model.trainable_variables, strict=True):
        after = as_array(variable)
        assert np.isfinite(after).all(), variable.path
        # The softmax does not see the bias of the keys.
        blind = variable.name == "key_bias"
        assert blind or (after != before).any(), variable.path


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("window", "shape"), [(3, (3, 3)), (None, (7, 9))])
@pytest.mark.parametrize("recompute", [True, False])
def test_distinct_offsets_are_encoded_once(
    layer, window, shape, recompute, monkeypatch
):
    """Not once for every pair of pixels, nor again for every block."""
    given = []
    call = RelativePositionEncoding.call

    def recorded(self, inputs):
        given.append(tuple(inputs.shape))
        return call(self, inputs)

    monkeypatch.setattr(RelativePositionEncoding, "call", recorded)
    made = random_layer(layer, window=window, recompute=recompute)
    x = sample(made, (4, 5))
    y = as_array(made(x))
    assert given == [(*shape, 2)]
    gradients(made, x, np.ones_like(y))
    made(x, return_attention_maps=True)
    assert given == 3 * [(*shape, 2)]


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("window", [3, None])
@pytest.mark.parametrize("recompute", [True, False])
def test_empty_batches(layer, window, recompute):
    made = random_layer(layer, window=window, recompute=recompute)
    x, some = sample(made, (3, 4), batch=0), sample(made, (3, 4), batch=2)
    y, maps = made(x, return_attention_maps=True)
    assert tuple(y.shape) == (0, 3, 4, 4, 4)
    _, expected = made(some, return_attention_maps=True)
    for name, one in expected.items():
        assert tuple(maps[name].shape) == (0, *one.shape[1:])
    of_x, *found = gradients(made, x, np.ones(tuple(y.shape), DTYPE))
    assert of_x.shape == x.shape
    assert not any(gradient.any() for gradient in found)
    # Also where the size of the batch is known only at run time.
    inputs = keras.Input(x.shape[1:], dtype=DTYPE)
    model = keras.Model(inputs, made(inputs))
    assert model.predict_on_batch(x).shape == y.shape


@pytest.mark.torch_first
def test_offsets_of_images_turn():
    """The longer side is their unit, or a rectangle would not turn."""
    layer = random_layer(LiftingSelfAttention2D, "p4", None)
    assert_equivariant(layer, "p4", sample(layer, (3, 5)), rtol=tolerance())


def test_regularizer_is_of_the_linear_maps():
    layer = GroupSelfAttention2D(
        4, 3, 1, 3, kernel_regularizer=keras.regularizers.L2(0.5)
    )
    layer.build((None, 4, 4, 4, 3))
    w = weights_of(layer)
    expected = 0.5 * sum(
        (w[f"{name}_kernel"] ** 2).sum()
        for name in ("query", "key", "value", "output")
    )
    total = float(ops.convert_to_numpy(sum(layer.losses)))
    assert np.isclose(total, expected, rtol=1e-5)


@pytest.mark.once
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filters": 0}, "`filters`.*0"),
        ({"key_dim": 1}, "`key_dim`.*at least .*1"),
        ({"num_heads": -1}, "`num_heads`.*-1"),
        ({"kernel_size": 4}, "`kernel_size` must be an odd.*or None.*4"),
        ({"kernel_size": 0}, "`kernel_size`.*0"),
        ({"kernel_size": (3, 3)}, r"`kernel_size`.*\(3, 3\)"),
        ({"attention_dropout": 1}, "`attention_dropout`.*below 1.*1"),
        ({"attention_dropout": -0.1}, "`attention_dropout`.*-0.1"),
        ({"epsilon": 0}, "`epsilon`.*positive.*0"),
        ({"recompute": 1}, "`recompute`.*1"),
        ({"group": "p5"}, "p5"),
        ({"data_format": "last"}, "`data_format`.*last"),
    ],
)
def test_bad_arguments(layer, arguments, message):
    good = {"filters": 4, "key_dim": 4, "num_heads": 2}
    with pytest.raises(ValueError, match=message):
        layer(**{**good, **arguments})


@pytest.mark.once
def test_channels_of_a_head_are_shared_out():
    LiftingSelfAttention2D(4, 2, 1)
    with pytest.raises(ValueError, match=r"`key_dim`.*at least 3.*2"):
        GroupSelfAttention2D(4, 2, 1)


@pytest.mark.once
def test_bad_shapes():
    lift = LiftingSelfAttention2D(4, 2, 1)
    with pytest.raises(ValueError, match="takes images"):
        lift.build((None, 6, 6, 4, 3))
    layer = GroupSelfAttention2D(4, 3, 1)
    with pytest.raises(ValueError, match=r"group axis.*8.*'p4'.*4"):
        layer.build((None, 6, 6, 8, 3))
    with pytest.raises(ValueError, match="feature maps on 'p4'"):
        layer.build((None, 6, 6, 3))
    with pytest.raises(ValueError, match="known number of channels"):
        layer.build((None, 6, 6, 4, None))


@pytest.mark.once
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("shape", [(), (3,), (3, 3), (3, 3, 3)])
def test_too_few_axes_of_a_layer_that_is_built(layer, data_format, shape):
    made = layer(4, 3, 1, data_format=data_format)
    made.build((None, 4, 4, 4, *order_of(made)))
    with pytest.raises(ValueError, match=r"expected min_ndim=4") as error:
        made(np.zeros(shape, "float32"))
    assert str(shape) in str(error.value)
