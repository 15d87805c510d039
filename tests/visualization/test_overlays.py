"""One map for each image: full size, pooled over poses, without the border."""

import keras
import numpy as np
import pytest
from attention_helpers import images
from attention_helpers import randomize
from attention_helpers import small_network

from keras_equiattn import layers
from keras_equiattn.visualization import attention_maps
from keras_equiattn.visualization import attention_overlays
from keras_equiattn.visualization import borders
from keras_equiattn.visualization import overlays
from keras_equiattn.visualization import plot_overlays
from keras_equiattn.visualization import sites


def classifier(group="p4", size=16):
    """Convolutions with padding, pooling and attention before the last one."""
    inputs = keras.Input((size, size, 2))
    x = layers.LiftingConv2D(3, 3, padding="same", group=group)(inputs)
    x = layers.SpatialPooling2D(2, group=group)(keras.layers.ReLU()(x))
    x = layers.InputAttention(group, attention_kernel_size=3, name="attention")(
        x
    )
    x = layers.GroupConv2D(3, 3, padding="same", group=group)(x)
    x = keras.layers.GlobalAveragePooling3D()(keras.layers.ReLU()(x))
    outputs = keras.layers.Dense(3)(x)
    model = randomize(keras.Model(inputs, outputs, name="classifier"))
    kernel = model.get_layer("attention").spatial_kernel
    kernel.assign(20 * kernel.value)  # attention that is not nearly uniform
    return model


def poses(image, order):
    """The image in all poses of p4 or p4m."""
    plain, mirrored = image, image[:, ::-1]
    return [np.rot90(plain, g) for g in range(4)] + [
        np.rot90(mirrored, g) for g in range(order - 4)
    ]


@pytest.mark.parametrize("class_index", [None, 2])
@pytest.mark.parametrize("group", ["p4", "p4m"])
def test_overlays_turn_with_the_image(group, class_index):
    model, (image,) = classifier(group), images(1, (16, 16, 2))
    order = 8 if group == "p4m" else 4
    batch = np.stack(poses(image, order))
    found = attention_overlays(model, batch, class_index=class_index)
    assert found.shape == (order, 16, 16)
    scale = np.nanmax(np.abs(found))
    for values, expected in zip(found, poses(found[0], order), strict=True):
        np.testing.assert_array_equal(np.isnan(values), np.isnan(expected))
        np.testing.assert_allclose(values / scale, expected / scale, atol=1e-5)
    # A constant map would pass, too; this one differs between poses.
    assert np.nanmax(np.abs(found[0] - found[1])) > 1e-4 * scale


def test_attention_is_pooled_over_poses():
    model, x = classifier(), images(2, (16, 16, 2))
    maps = attention_maps(model, x)["attention"]["effective"]
    found = attention_overlays(model, x, border="keep")
    # Every pixel of the map covers 2 x 2 pixels; their mean is its value
    # where the four around it lie on one plane, and always at the corners.
    np.testing.assert_allclose(
        found[:, 0, 0], maps[:, 0, 0].mean((-1, -2)), rtol=1e-5
    )
    rows = [1 / 4, 3 / 4]  # of the pixels between two positions
    expected = np.einsum(
        "i,j,bij->b", rows, rows, maps[:, 3:5, 5:7].mean((-1, -2))
    )
    np.testing.assert_allclose(found[:, 8, 12], expected, rtol=1e-5)


@pytest.mark.every_backend
def test_evidence_is_the_gradient_times_the_features():
    """If the score is linear in the features, it is their share of it."""
    inputs = keras.Input((6, 6, 2))
    x = layers.LiftingConv2D(3, 3, padding="same", group="p4")(inputs)
    x = layers.InputAttention("p4", attention_kernel_size=3, name="a")(x)
    features = x
    x = keras.layers.GlobalAveragePooling3D()(x)
    model = keras.Model(inputs, keras.layers.Dense(4, name="out")(x))
    randomize(model)
    x = images(2, (6, 6, 2))
    kernel = np.asarray(model.get_layer("out").get_weights()[0])
    seen = keras.Model(inputs, features).predict(x, verbose=0)
    relative = kernel[:, 1] - kernel.mean(axis=1)
    expected = (seen @ relative).sum(-1) / (6 * 6 * 4)
    found = attention_overlays(model, x, class_index=1, border="keep")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_evidence_for_the_only_class():
    """A score alone, as before a sigmoid, is not compared with any other."""
    model = classifier()
    only = keras.layers.Dense(1)
    scores = only(model.layers[-2].output)
    single = keras.Model(model.input, scores)
    found = attention_overlays(single, images(1, (16, 16, 2)), class_index=0)
    assert np.nanmax(np.abs(found)) > 0


def test_evidence_in_a_nested_model():
    inner = classifier()
    inputs = keras.Input((16, 16, 2))
    outer = keras.Model(inputs, inner(inputs), name="outer")
    x = images(2, (16, 16, 2))
    for class_index in (None, 0):
        np.testing.assert_allclose(
            attention_overlays(outer, x, class_index=class_index),
            attention_overlays(inner, x, class_index=class_index),
            rtol=1e-4,
            atol=1e-6,
        )


@pytest.mark.once
def test_the_border_is_masked():
    """A pixel is left out when what it shows depends on the padding."""
    model = classifier()
    found = attention_overlays(model, images(1, (16, 16, 2)))[0]
    # The lifting sees one pixel beyond the border, so pooling spoils one
    # position of two pixels, and the window of the attention another one.
    kept = np.flatnonzero(~np.isnan(found).all(1))
    np.testing.assert_array_equal(kept, np.arange(4, 12))
    assert not np.isnan(found[4:12, 4:12]).any()
    assert not np.isnan(
        attention_overlays(model, images(1, (16, 16, 2)), border="keep")
    ).any()


def operations():
    window = layers.AffineSelfConv2D(2, 3, num_heads=1)
    return [
        (keras.layers.Conv2D(2, 3, padding="same"), [0, 15]),
        (keras.layers.Conv2D(2, 3, padding="same", strides=2), [7]),
        (keras.layers.Conv2D(2, 3), []),
        (keras.layers.Conv2D(2, 3, padding="same", dilation_rate=2),
         [0, 1, 14, 15]),
        (keras.layers.DepthwiseConv2D(5, padding="same"), [0, 1, 14, 15]),
        (keras.layers.ZeroPadding2D(2), [0, 1, 18, 19]),
        (keras.layers.Cropping2D(((1, 2), (0, 3))), []),
        (keras.layers.UpSampling2D(2), []),
        (keras.layers.MaxPooling2D(2), []),
        (keras.layers.MaxPooling2D(3, 2, padding="same"), [7]),
        (layers.LiftingConv2D(2, 3, padding="same", group="p4"), [0, 15]),
        (window, [0, 15]),
        (layers.InputAttention("p4", attention_kernel_size=3), [0, 15]),
        (layers.AttentiveLiftingConv2D(
            2, 3, padding="same", attention_kernel_size=3), [0, 1, 14, 15]),
        (layers.CoAttentiveLiftingConv2D(2, 3, padding="same"), [0, 15]),
    ]  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize(
    ("operation", "outside"),
    operations(),
    ids=lambda x: getattr(x, "name", None),
)
def test_what_sees_beyond_the_border(operation, outside):
    """Elsewhere a constant image must give a constant."""
    inputs = keras.Input((16, 16, 2))
    outputs = operation(inputs)
    model = keras.Model(inputs, outputs)
    ones = np.ones(16, bool)
    rows, _ = borders._after(operation, (ones, ones))
    assert len(rows) == outputs.shape[1]
    np.testing.assert_array_equal(np.flatnonzero(~rows), outside)
    # Where no padding is in sight all pixels of a constant image are alike.
    randomize(model)
    values = model.predict(np.ones((1, 16, 16, 2)), verbose=0)[0]
    inner = values[rows][:, borders._after(operation, (ones, ones))[1]]
    assert np.ptp(inner, axis=(0, 1)).max() < 1e-4


@pytest.mark.once
def test_merged_maps_are_inside_where_all_are():
    inputs = keras.Input((8, 8, 2))
    x = keras.layers.Conv2D(2, 3, padding="same")(inputs)
    x = keras.layers.Concatenate()([x, inputs])
    x = layers.InputAttention("p4", attention="channel", name="a")(x)
    model = keras.Model(inputs, x)
    (chain,) = overlays._chains(sites.find(model)).values()
    rows, columns = borders.inside(model, chain, (8, 8), of_output=False)
    np.testing.assert_array_equal(rows, [0, *[1] * 6, 0])
    np.testing.assert_array_equal(columns, rows)


@pytest.mark.once
def test_pictures_show_the_overlays():
    model, x = classifier(), images(3, (16, 16, 2))
    figure = plot_overlays(
        model, x, class_index=1, titles="abc", columns=2, opacity=0.5
    )
    panels = figure.axes[:8]
    assert [p.get_title(loc="left") for p in panels[::2]] == [*"abc", ""]
    found = attention_overlays(model, x, class_index=1)
    high = np.nanmax(np.abs(found))
    for panel, values in zip(panels[1::2], found, strict=False):
        drawn = panel.images[-1]
        shown = ~np.isnan(values)
        np.testing.assert_allclose(drawn.get_array()[shown], values[shown])
        np.testing.assert_allclose(
            drawn.get_alpha()[shown],
            0.5 * np.sqrt(np.abs(values[shown]) / high),
        )
        assert not drawn.get_alpha()[~shown].any()
        np.testing.assert_allclose(drawn.get_clim(), (-high, high))
        (frame,) = panel.lines
        assert set(frame.get_xdata()) == {3.5, 11.5}
    assert figure.get_suptitle() == (
        "classifier, attention, evidence for class 1"
    )
    assert figure.canvas.manager is None  # no window, no pyplot


@pytest.mark.once
def test_one_image_without_a_batch():
    figure = plot_overlays(classifier(), images(1, (16, 16, 2))[0])
    assert len(figure.axes) == 3
    assert "attention" in figure.get_suptitle()


@pytest.mark.once
def test_the_layer_that_varies_most_is_drawn():
    model, x = small_network(), images(1, (8, 8, 2))
    found = {
        name: attention_overlays(model, x, name, border="keep")
        for name in ("lift", "inner", "conv")
    }
    most = max(found, key=lambda name: np.nanstd(found[name]))
    default = attention_overlays(model, x, border="keep")
    np.testing.assert_array_equal(default, found[most])


@pytest.mark.once
def test_bad_arguments():
    model, x = classifier(), images(1, (16, 16, 2))
    with pytest.raises(ValueError, match="`border` must be"):
        attention_overlays(model, x, border="zeros")
    with pytest.raises(ValueError, match="must be from 0 to 2"):
        attention_overlays(model, x, class_index=3)
    with pytest.raises(ValueError, match="one for each of 1 images"):
        plot_overlays(model, x, titles=["a", "b"])
    with pytest.raises(ValueError, match="sees beyond the border"):
        attention_overlays(small_with_a_large_window(), x)
    with pytest.raises(ValueError, match="is not known"):
        attention_overlays(with_a_transposed_convolution(), x)


def small_with_a_large_window():
    inputs = keras.Input((16, 16, 2))
    x = layers.InputAttention("p4", attention_kernel_size=17)(inputs)
    return keras.Model(inputs, x)


def with_a_transposed_convolution():
    inputs = keras.Input((16, 16, 2))
    x = keras.layers.Conv2DTranspose(2, 3, padding="same")(inputs)
    return keras.Model(inputs, layers.InputAttention("p4")(x))
