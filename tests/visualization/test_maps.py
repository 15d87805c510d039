"""Pictures of attention maps: but for the first test, of NumPy arrays alone."""

import re
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
from attention_helpers import images
from attention_helpers import randomize
from attention_helpers import small_network

from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn import visualization
from keras_equiattn.visualization import attention_maps
from keras_equiattn.visualization import maps as pictures
from keras_equiattn.visualization import plot_attention_maps


def test_panels_show_the_maps():
    model, (image,) = small_network(), images(1, (8, 8, 2))
    figure = plot_attention_maps(model, image, "inner")
    batch = np.stack([np.rot90(image, g) for g in range(4)])
    effective = attention_maps(model, batch)["inner"]["effective"].mean(-1)
    assert len(figure.axes) == 4 * (1 + 1 + 4) + 1
    panels = np.array(figure.axes[:24]).reshape(4, 6)
    maps = np.array(
        [[p.images[-1].get_array() for p in row[2:]] for row in panels]
    )
    np.testing.assert_allclose(
        maps, np.moveaxis(effective, 3, 1), rtol=1e-5, atol=1e-6
    )
    for g in range(4):  # they turn with the image
        for h in range(4):
            np.testing.assert_allclose(
                maps[g, (g + h) % 4], np.rot90(maps[0, h], g), atol=1e-5
            )
        np.testing.assert_allclose(  # two channels are averaged
            panels[g, 0].images[0].get_array(), np.rot90(image.mean(-1), g)
        )
    titles = [panel.get_title() for panel in panels[0]]
    assert titles == [
        "image",
        "all h",
        "h: 0°",
        "h: 90°",
        "h: 180°",
        "h: 270°",
    ]
    assert [row[0].get_ylabel() for row in panels] == [
        "0°",
        "90°",
        "180°",
        "270°",
    ]
    low, high = effective.min(), effective.max()
    title = f"small, inner\nattention {low:.4g} to {high:.4g}"
    assert figure.get_suptitle() == title
    limits = {p.images[-1].get_clim() for row in panels for p in row[2:]}
    np.testing.assert_allclose(*limits, (low, high), rtol=1e-5)
    (bar,) = figure.axes[24:]
    np.testing.assert_allclose(bar.get_ylim(), (low, high), rtol=1e-5)
    assert figure.canvas.manager is None  # no window, no pyplot


@pytest.mark.once
def test_selected_panels():
    model, x = small_network(), images(1, (8, 8, 2))
    figure = plot_attention_maps(
        model, x, "inner", group_element=1, elements=[0, 3], arrows=False
    )
    assert len(figure.axes) == 2 * 2 + 1
    assert figure.axes[1].get_title() == "h: 90°"
    assert figure.axes[2].get_ylabel() == "270°"
    expected = attention_maps(model, x, layers="inner")["inner"]["effective"]
    np.testing.assert_allclose(
        figure.axes[1].images[-1].get_array(),
        expected[0, :, :, 1].mean(-1),
        rtol=1e-5,
    )


@pytest.mark.once
def test_arrows_are_as_long_as_the_attention_is_strong():
    model, (image,) = small_network(), images(1, (8, 8, 2))
    figure = plot_attention_maps(model, image, "inner")
    panels = np.array(figure.axes[:24]).reshape(4, 6)
    values = np.array(
        [[p.images[-1].get_array() for p in row[2:]] for row in panels]
    )
    low, high = values.min(), values.max()
    # A 6 x 6 map in the middle of 8 x 8 pixels, at every third position.
    rows, columns = np.array([[1, 1], [1, 4], [4, 1], [4, 4]]).T
    up = np.array([[0, -1], [-1, 0], [0, 1], [1, 0]])  # (right, down)
    for row, maps in zip(panels, values, strict=True):
        (quiver,) = row[1].collections
        share = (maps[:, rows, columns].T - low) / (high - low)
        expected = share[..., None] * up * 3 / 2
        arrows = np.stack([quiver.U, quiver.V], -1).reshape(4, 4, 2)
        np.testing.assert_allclose(arrows, expected, atol=1e-5)
        np.testing.assert_array_equal(
            quiver.XY[::4], np.stack([columns, rows], -1) + 1
        )


@pytest.mark.once
@pytest.mark.parametrize("step", [1, 2, 5, 8])
def test_positions_are_the_same_from_either_end(step):
    for size in range(1, 40):
        found = pictures._centred(size, step)
        np.testing.assert_array_equal(found, size - 1 - found[::-1])
        assert len(found) >= 1
        assert np.all(np.diff(found) >= min(step, size - 1))


@pytest.mark.once
def test_arrows_of_mirrored_elements():
    """Each is the image of the first under its element, in two colours."""
    inputs = keras.Input((6, 6, 1))
    x = layers.LiftingConv2D(2, 3, group="p4m")(inputs)
    x = layers.InputAttention(group="p4m")(x)
    model = randomize(keras.Model(inputs, x))
    figure = plot_attention_maps(model, images(1, (6, 6, 1)), elements=[0, 5])
    assert len(figure.axes) == 2 * (1 + 1 + 8) + 1
    (quiver,) = figure.axes[1].collections
    offsets = np.stack([quiver.V, quiver.U], -1).reshape(-1, 8, 2)
    lengths = np.linalg.norm(offsets, axis=-1, keepdims=True)
    directions = (offsets / np.where(lengths > 1e-6, lengths, 1)).max(
        axis=0, where=lengths > 1e-6, initial=-1
    )
    matrices = groups.get("p4m").matrices
    np.testing.assert_allclose(directions, matrices @ directions[0], atol=1e-5)
    colors = quiver.get_facecolors().reshape(-1, 8, 4)[0]
    assert len(np.unique(colors, axis=0)) == 2
    assert figure.axes[10].get_ylabel() == "mirror, 90°"


@pytest.mark.once
def test_uniform_maps_say_so():
    model = small_network()
    for variable in model.get_layer("inner").weights:
        variable.assign(0 * variable.value)
    figure = plot_attention_maps(model, images(1, (8, 8, 2)), "inner")
    # sigmoid(0) sigmoid(0) is taken away.
    assert figure.get_suptitle() == (
        "small, inner\nattention 0.75 to 0.75, uniform"
    )
    low, high = figure.axes[2].images[-1].get_clim()
    assert high - low == pytest.approx(pictures.UNIFORM)
    assert (low + high) / 2 == pytest.approx(0.75)
    (quiver,) = figure.axes[1].collections
    np.testing.assert_allclose(np.ptp(quiver.U), np.ptp(quiver.V), rtol=1e-4)


@pytest.mark.once
def test_uniform_maps_are_warned_of():
    model, x = small_network(), images(2, (8, 8, 2))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The attention of layer")
        attention_maps(model, x)
    dead = model.get_layer("inner").channel_kernel_1
    dead.assign(np.zeros(dead.shape))
    message = r"'inner' is uniform: \"channel\" varies .*`reduction_ratio="
    with pytest.warns(UserWarning, match=message) as found:
        attention_maps(model, x)
    ours = [w for w in found if "is uniform" in str(w.message)]
    assert [w.filename for w in ours] == [__file__]


@pytest.mark.once
def test_default_layer_varies_most_over_space():
    model, x = small_network(), images(1, (8, 8, 2))
    for name, factor in (("lift", 0), ("inner", 0), ("conv", 3)):
        for variable in model.get_layer(name).weights:
            if variable.name in ("attention_kernel", "spatial_kernel"):
                variable.assign(factor * variable.value)
    figure = plot_attention_maps(model, x)
    assert figure.get_suptitle().startswith("small, conv\n")


@pytest.mark.once
def test_maps_lie_where_they_come_from():
    """They are centred, and a pixel is as wide as the strides before it."""
    inputs = keras.Input((28, 28, 1))
    attend = layers.InputAttention
    x = attend(group="p4", name="at_28")(inputs)
    x = layers.LiftingConv2D(1, 3, group="p4")(x)
    x = layers.GroupConv2D(1, 3, group="p4")(x)
    x = layers.SpatialPooling2D(2, group="p4")(x)
    x = attend(group="p4", name="at_12")(x)
    x = layers.CoAttentiveGroupConv2D(
        1, 4, strides=2, group="p4", name="before_5"
    )(x)
    x = attend(group="p4", name="at_5")(x)
    model = keras.Model(inputs, x)
    for name, half in (
        ("at_28", 14),
        ("at_12", 12),
        ("before_5", 12),
        ("at_5", 10),
    ):
        figure = plot_attention_maps(model, images(), name, elements=[0])
        panel = figure.axes[-2]
        middle = 13.5
        assert panel.images[-1].get_extent() == [
            middle - half,
            middle + half,
            middle + half,
            middle - half,
        ]
        assert panel.get_xlim() == (-0.5, 27.5)
        assert panel.get_ylim() == (27.5, -0.5)


@pytest.mark.once
def test_attention_on_images_has_one_panel():
    inputs = keras.Input((6, 8, 3))
    x = layers.InputAttention(group="p4", name="attention")(inputs)
    model = randomize(keras.Model(inputs, x))
    x = images(1, (6, 8, 3))
    figure = plot_attention_maps(model, x)
    # A quarter turn of a rectangle would not fit beside it.
    assert len(figure.axes) == 2 * 2 + 1
    assert figure.axes[1].get_title() == "attention"
    assert [figure.axes[n].get_ylabel() for n in (0, 2)] == ["0°", "180°"]
    np.testing.assert_allclose(figure.axes[0].images[0].get_array(), x[0])
    with pytest.raises(ValueError, match=r"on its side.* Received: .0, 1"):
        plot_attention_maps(model, x, elements=[0, 1])
    for argument in ({"group_element": 0}, {"arrows": True}):
        with pytest.raises(ValueError, match="has no group axis"):
            plot_attention_maps(model, x, **argument)


@pytest.mark.once
def test_channels_first():
    keras.config.set_image_data_format("channels_first")
    inputs = keras.Input((3, 8, 8))
    x = layers.LiftingConv2D(2, 3, group="p4", name="lift")(inputs)
    x = layers.InputAttention(group="p4", name="attention")(x)
    model = randomize(keras.Model(inputs, x))
    x = images(1, (3, 8, 8))
    figure = plot_attention_maps(model, x, elements=[0, 1])
    shown = np.moveaxis(x[0], 0, -1)
    np.testing.assert_allclose(
        figure.axes[6].images[0].get_array(), np.rot90(shown)
    )
    maps = [p.images[-1].get_array() for p in figure.axes[2:12]]
    np.testing.assert_allclose(maps[7], np.rot90(maps[0]), atol=1e-5)
    assert maps[0].shape == (6, 6)
    assert figure.axes[2].images[-1].get_extent() == [0.5, 6.5, 6.5, 0.5]


@pytest.mark.once
def test_elements_that_interpolate():
    inputs = keras.Input((9, 9, 1))
    x = layers.LiftingConv2D(1, 3, group="p8")(inputs)
    model = keras.Model(inputs, layers.InputAttention(group="p8")(x))
    figure = plot_attention_maps(
        model, images(1, (9, 9, 1)), group_element=0, arrows=False
    )
    assert len(figure.axes) == 4 * 2 + 1
    figure = plot_attention_maps(model, images(1, (9, 9, 1)), elements=[1])
    assert len(figure.axes) == 1 * (1 + 1 + 8) + 1
    assert figure.axes[0].get_ylabel() == "45°"


@pytest.mark.once
def test_pixels_outside_zero_and_one_are_rescaled_for_display():
    model = small_network()
    x = 4 * images(1, (8, 8, 2)) - 2
    figure = plot_attention_maps(model, x, "inner", elements=[0])
    shown = figure.axes[0].images[0].get_array()
    grey = x[0].mean(-1)
    np.testing.assert_allclose(
        shown, (grey - grey.min()) / np.ptp(grey), rtol=1e-5
    )


@pytest.mark.once
def test_picture_is_written(tmp_path):
    model, x = small_network(), images(1, (8, 8, 2))
    figure = plot_attention_maps(model, x, "inner", elements=[0])
    figure.savefig(tmp_path / "maps.png")
    assert (tmp_path / "maps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.once
def test_wrong_arguments_of_pictures(monkeypatch):
    model, x = small_network(), images(2, (8, 8, 2))
    with pytest.raises(ValueError, match=r"one image.*\(2, 8, 8, 2\)"):
        plot_attention_maps(model, x)
    for argument, message in (
        ({"layer": "lifft"}, "Did you mean 'lift'"),
        ({"layer": "inner", "group_element": 4}, "from 0 to 3 for group 'p4'"),
        ({"elements": [5]}, "from 0 to 3 for group 'p4'"),
        ({"elements": []}, "`elements` must hold one or more"),
        ({"opacity": 2}, "`opacity` must be a number from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            plot_attention_maps(model, x[0], **argument)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"keras-equiattn\[viz\]"):
        plot_attention_maps(model, x[0])


class WithoutEffective(layers.InputAttention):
    def attend_channels_last(self, x, query=None):
        y, maps = super().attend_channels_last(x, query)
        del maps["effective"]
        return y, maps


@pytest.mark.once
def test_layers_without_an_effective_map():
    inputs = keras.Input((8, 8, 1))
    x = WithoutEffective(group="p4", name="other")(inputs)
    model = keras.Model(inputs, x)
    message = "'other' returns no map \"effective"
    with pytest.raises(ValueError, match=message) as error:
        plot_attention_maps(model, images(1, (8, 8, 1)), "other")
    assert "plot_window_attention" not in str(error.value)


@pytest.mark.once
def test_names_of_elements():
    name = visualization.element_name
    assert [name("p4m", g) for g in (0, 1, 4, 7)] == [
        "0°",
        "90°",
        "mirror",
        "mirror, 270°",
    ]
    assert name("p16", 1) == "22.5°"
    with pytest.raises(ValueError, match="from 0 to 3"):
        name("p4", 4)


@pytest.mark.once
def test_import_needs_no_matplotlib():
    folder = Path(visualization.__file__).parent
    for path in folder.rglob("*.py"):
        found = re.search(r"^(import|from) matplotlib", path.read_text(), re.M)
        assert not found, path.name
