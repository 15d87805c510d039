"""Pictures of what the pixels of a network attend to."""

import keras
import numpy as np
import pytest
from attention_helpers import images
from attention_helpers import randomize

from keras_equiattn import layers
from keras_equiattn.visualization import attention_maps
from keras_equiattn.visualization import plot_window_attention


def network():
    """Windows on the pixels of the image, and on half as many."""
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
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pixel": (8, 0)}, r"`pixel`.*\(8, 8\).*\(8, 0\)"),
        ({"pixel": (1,)}, r"`pixel`.*\(1,\)"),
        ({"pixel": 3}, r"`pixel`.*3"),
        ({"layer": "other"}, r"layer with a window 'other'.*fine, coarse"),
        ({"elements": [4]}, "4"),
        ({"elements": []}, "`elements`.*none"),
        ({"size": 0}, "`size`.*0"),
        ({"opacity": 2}, "`opacity`.*2"),
        ({"zoom": None}, "`zoom`.*None"),
    ],
)
def test_bad_arguments(arguments, message):
    model, (image,) = network(), images(1, (8, 8, 2))
    with pytest.raises(ValueError, match=message):
        plot_window_attention(model, image, **{"pixel": (0, 0), **arguments})


@pytest.mark.once
def test_a_model_without_windows():
    inputs = keras.Input((8, 8, 2))
    model = keras.Model(inputs, layers.InputAttention("p4")(inputs))
    with pytest.raises(ValueError, match="no layer that attends to windows"):
        plot_window_attention(model, images(1, (8, 8, 2))[0], (0, 0))
