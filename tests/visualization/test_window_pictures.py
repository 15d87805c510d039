"""Pictures of what the pixels of a network attend to."""

import keras
import numpy as np
import pytest
from attention_helpers import images
from attention_helpers import randomize

from keras_equiattn import layers
from keras_equiattn.ops import group_action
from keras_equiattn.testing import relative_difference
from keras_equiattn.visualization import attention_maps
from keras_equiattn.visualization import pixel_attention
from keras_equiattn.visualization import plot_attention_maps
from keras_equiattn.visualization import plot_window_attention


def network():
    """Windows on the pixels of the image, and on a map of half the size."""
    inputs = keras.Input((8, 8, 2))
    x = layers.LiftingConv2D(2, 3, padding="same", group="p4")(inputs)
    x = layers.AffineSelfConv2D(4, 3, 2, group="p4", name="fine")(x)
    x = layers.InputAttention(group="p4", name="other")(x)
    x = layers.SpatialPooling2D(2, group="p4")(x)
    x = layers.StandAloneSelfAttention2D(
        4, 3, 2, group="p4", border="mask", name="coarse"
    )(x)
    return randomize(keras.Model(inputs, x, name="small"))


def panels(figure, rows, columns):
    return np.array(figure.axes[: rows * columns]).reshape(rows, columns)


def test_panels_show_the_window_of_the_pixel():
    model, (image,) = network(), images(1, (8, 8, 2))
    figure = plot_window_attention(model, image, (2, 5))
    assert len(figure.axes) == 4 * 3 + 1
    assert figure.get_suptitle() == "small, fine\npixel (2, 5)"
    weights = attention_maps(model, image[None])["fine"]["window"][0, 2, 5]
    for h, row in enumerate(panels(figure, 4, 3)):
        for head, panel in enumerate(row[1:]):
            drawn = panel.images[-1]
            np.testing.assert_allclose(
                drawn.get_array(), weights[h, head], rtol=1e-5
            )
            assert drawn.get_extent() == [3.5, 6.5, 3.5, 0.5]
            assert panel.get_xlim() == (2.0, 8.0)
            assert panel.get_ylim() == (5.0, -1.0)
    titles = [panel.get_title() for panel in panels(figure, 4, 3)[0]]
    assert titles == ["image", "head 0", "head 1"]


@pytest.mark.once
def test_the_picture_turns_with_the_image():
    model, (image,) = network(), images(1, (8, 8, 2))
    upright = plot_window_attention(model, image, (2, 5))
    turned = plot_window_attention(model, np.rot90(image), (7 - 5, 2))
    for h, row in enumerate(panels(upright, 4, 3)):
        moved = panels(turned, 4, 3)[(h + 1) % 4]
        for before, after in zip(row[1:], moved[1:], strict=True):
            np.testing.assert_allclose(
                after.images[-1].get_array(),
                np.rot90(before.images[-1].get_array()),
                atol=1e-5,
            )


@pytest.mark.once
def test_a_pixel_of_a_smaller_map():
    model, (image,) = network(), images(1, (8, 8, 2))
    figure = plot_window_attention(
        model, image, (7, 0), "coarse", elements=[1], zoom=False
    )
    assert len(figure.axes) == 3 + 1
    panel = figure.axes[1]
    # Row 3, column 0 of 4 x 4: two pixels wide, at the border.
    assert panel.images[-1].get_extent() == [-2.5, 3.5, 9.5, 3.5]
    assert panel.get_xlim() == (-0.5, 7.5)
    own = panel.lines[0]
    assert set(own.get_xdata()) == {-0.5, 1.5}
    assert set(own.get_ydata()) == {5.5, 7.5}
    weights = attention_maps(model, image[None])["coarse"]["window"][0, 3, 0]
    values = panel.images[-1].get_array()
    np.testing.assert_allclose(values, weights[1, 0], rtol=1e-5)
    assert not values[2].any()


@pytest.mark.once
def test_weights_below_zero_have_colours_of_their_own():
    inputs = keras.Input((6, 6, 2))
    x = layers.PatchwiseACmix2D(4, 3, 3, share=2, name="mix")(inputs)
    model, (image,) = keras.Model(inputs, x), images(1, (6, 6, 2))
    bias = model.get_layer("mix").expand_bias
    bias.assign(np.random.default_rng(0).normal(size=bias.shape))
    figure = plot_window_attention(model, image, (3, 2))
    weights = pixel_attention(model, image, (3, 2))
    assert weights.shape == (1, 2, 1, 3, 3)
    assert weights.min() < 0
    norm = figure.axes[1].images[-1].norm
    np.testing.assert_allclose(
        (norm.vmin, norm.vmax), (weights.min(), weights.max()), rtol=1e-5
    )


@pytest.mark.once
@pytest.mark.parametrize("size", [(10, 12), (11, 12)])
def test_a_pixel_outside_of_a_smaller_map(size):
    """Maps lie centred; of 11 rows, 9 and the halves of two are covered."""
    inputs = keras.Input((*size, 1))
    x = keras.layers.Cropping2D((0, 2))(inputs)
    x = keras.layers.MaxPooling2D(2)(x)
    x = layers.LiftingSelfAttention2D(2, 2, 1, 3, "z2", name="near")(x)
    model, (image,) = keras.Model(inputs, x), images(1, (*size, 1))
    covered = rf"'near' covers: rows 0 to {size[0] - 1} and columns 2 to 9 of"
    for column in (1, 10):
        with pytest.raises(ValueError, match=covered):
            pixel_attention(model, image, (0, column))
    maps = attention_maps(model, image[None])["near"]["window"][0]
    last = size[0] - 1
    for pixel, query in (((0, 2), (0, 0)), ((last, 9), (4, 3))):
        found = pixel_attention(model, image, pixel)
        np.testing.assert_allclose(found, maps[query], rtol=1e-5)


@pytest.mark.once
def test_pixels_that_crops_cut_off():
    inputs = keras.Input((8, 8, 1))
    x = layers.LiftingSelfAttention2D(3, 2, 1, 3, "p4", name="lift")(inputs)
    x = keras.layers.Cropping3D((2, 1, 0))(x)
    x = layers.GroupSelfAttention2D(2, 3, 1, None, "p4", name="far")(x)
    model, (image,) = keras.Model(inputs, x), images(1, (8, 8, 1))
    plot_window_attention(model, image, (0, 0), "lift")
    plot_window_attention(model, image, (2, 1), "far")
    message = r"'far' covers: rows 2 to 5 and columns 1 to 6 of .*\(1, 1\)"
    with pytest.raises(ValueError, match=message):
        plot_window_attention(model, image, (1, 1), "far")


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pixel": (8, 0)}, r"`pixel`.*\(8, 8\).*\(8, 0\)"),
        ({"pixel": (1,)}, r"`pixel`.*\(1,\)"),
        ({"pixel": 3}, r"`pixel`.*3"),
        (
            {"layer": "other"},
            "layer with a window 'other'.*The layers with a window are: fine",
        ),
        ({"elements": [4]}, "from 0 to 3 for group.*4"),
        ({"elements": []}, "`elements`.*none"),
        ({"size": 0}, "`size`.*0"),
        ({"opacity": 2}, "`opacity`.*2"),
        ({"zoom": None}, "`zoom`.*None"),
        ({"key_element": 1}, "`key_element`.*None: 'fine' does not.*1"),
    ],
)
def test_bad_arguments(arguments, message):
    model, (image,) = network(), images(1, (8, 8, 2))
    with pytest.raises(ValueError, match=message):
        plot_window_attention(model, image, **{"pixel": (0, 0), **arguments})


@pytest.mark.once
@pytest.mark.parametrize("show", [plot_window_attention, pixel_attention])
def test_a_model_without_windows(show):
    inputs = keras.Input((8, 8, 2))
    model = keras.Model(inputs, layers.InputAttention("p4")(inputs))
    with pytest.raises(ValueError, match="no layer that attends to windows"):
        show(model, images(1, (8, 8, 2))[0], (0, 0))


def group_network():
    """Windows, then attention to all of a map of half the size."""
    inputs = keras.Input((6, 6, 2))
    x = layers.LiftingSelfAttention2D(3, 2, 1, 3, "p4", name="lift")(inputs)
    x = layers.GroupSelfAttention2D(4, 3, 2, 3, "p4", name="near")(x)
    x = layers.SpatialPooling2D(2, group="p4")(x)
    x = layers.GroupSelfAttention2D(4, 3, 1, None, "p4", name="far")(x)
    model = keras.Model(inputs, x, name="small")
    rng = np.random.default_rng(1)
    for variable in model.weights:
        variable.assign(rng.normal(size=variable.shape))
    return model


def test_maps_of_a_network():
    model, batch = group_network(), images(2, (6, 6, 2))
    maps = attention_maps(model, batch, layers=["lift", "far"])
    assert maps["lift"]["window"].shape == (2, 6, 6, 4, 1, 1, 3, 3)
    assert maps["far"]["image"].shape == (2, 3, 3, 4, 1, 4, 3, 3)
    one = attention_maps(model, batch, query=(2, 1), layers="far")
    found = one["far"]["image"], maps["far"]["image"][:, 2, 1]
    assert relative_difference(*found) < 1e-4


def test_panels_show_what_a_pixel_of_a_group_attends_to():
    model, (image,) = group_network(), images(1, (6, 6, 2))
    maps = attention_maps(model, image[None], query=(2, 4), layers="near")
    (weights,) = maps["near"]["window"]
    assert weights.shape == (4, 2, 4, 3, 3)
    for element in (None, 3):
        figure = plot_window_attention(
            model, image, (2, 4), "near", key_element=element
        )
        shown = weights.sum(2) if element is None else weights[:, :, element]
        for h, row in enumerate(panels(figure, 4, 3)):
            for head, panel in enumerate(row[1:]):
                drawn = panel.images[-1]
                np.testing.assert_allclose(
                    drawn.get_array(), shown[h, head], rtol=1e-4
                )
                assert drawn.get_extent() == [2.5, 5.5, 3.5, 0.5]
    title = "small, near\npixel (2, 4), input at 270°"
    assert figure.get_suptitle() == title


@pytest.mark.once
def test_a_pixel_that_sees_the_whole_image():
    model, (image,) = group_network(), images(1, (6, 6, 2))
    figure = plot_window_attention(model, image, (1, 4), "far", elements=[2])
    panel = figure.axes[1]
    drawn = panel.images[-1]
    assert drawn.get_extent() == [-0.5, 5.5, 5.5, -0.5]
    assert panel.get_xlim() == (-0.5, 5.5)
    assert set(panel.lines[0].get_xdata()) == {3.5, 5.5}
    weights = pixel_attention(model, image, (1, 4), "far")
    assert weights.shape == (4, 1, 4, 3, 3)
    np.testing.assert_allclose(drawn.get_array(), weights.sum(2)[2, 0])
    np.testing.assert_allclose(weights.sum((2, 3, 4)), 4, rtol=1e-5)


@pytest.mark.once
@pytest.mark.parametrize("layer", [None, "near", "far"])
def test_what_draws_windows_is_said(layer):
    model, (image,) = group_network(), images(1, (6, 6, 2))
    message = '"effective" .*`plot_window_attention` draws what a pixel attends'
    with pytest.raises(ValueError, match=message):
        plot_attention_maps(model, image, layer)


@pytest.mark.once
@pytest.mark.parametrize("layer", ["lift", "near", "far"])
def test_what_a_pixel_attends_to_turns_with_the_image(layer):
    model, (image,) = group_network(), images(1, (6, 6, 2))
    still = pixel_attention(model, image, (1, 4), layer)
    turned = pixel_attention(model, np.rot90(image), (5 - 4, 1), layer)
    windows = np.moveaxis(still, 2, 4)[..., None]  # (h, head, y, x, m, 1)
    if still.shape[2] == 1:  # images have no elements to permute
        moved = np.rot90(windows, axes=(2, 3))
    else:
        moved = np.stack([group_action(w, "p4", 1) for w in windows])
    expected = np.moveaxis(moved[..., 0], 4, 2)
    expected = expected[[3, 0, 1, 2]]
    np.testing.assert_allclose(turned, expected, rtol=1e-3, atol=1e-5)
    assert np.abs(turned - still).max() > 1e-2


@pytest.mark.once
def test_bad_key_elements():
    model, (image,) = group_network(), images(1, (6, 6, 2))
    with pytest.raises(ValueError, match="'lift' does not weigh"):
        plot_window_attention(model, image, (0, 0), "lift", key_element=0)
    with pytest.raises(ValueError, match=r"from 0 to 3.*4"):
        plot_window_attention(model, image, (0, 0), "far", key_element=4)


def test_strided_attention():
    """The query of a pixel is that of the last place that strides met."""
    inputs = keras.Input((8, 8, 2))
    x = layers.ACmix2D(4, 3, 3, 2, strides=2, name="strided")(inputs)
    model, (image,) = randomize(keras.Model(inputs, x)), images(1, (8, 8, 2))
    weights = attention_maps(model, image[None])["strided"]["window"]
    assert weights.shape == (1, 4, 4, 1, 2, 3, 3)
    for pixel in ((2, 4), (3, 5)):
        found = pixel_attention(model, image, pixel)
        np.testing.assert_allclose(found[:, :, 0], weights[0, 1, 2], rtol=1e-5)
    figure = plot_window_attention(model, image, (3, 5))
    drawn = figure.axes[1].images[-1]
    assert drawn.get_extent() == [2.5, 5.5, 3.5, 0.5]
