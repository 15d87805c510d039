"""The counts of bytes and kernels, on programs whose traffic is known."""

from pathlib import Path

import keras
import numpy as np
import pytest

from keras_equiattn import layers

BACKEND = keras.backend.backend()


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")


def compiled(function, *arguments):
    import jax

    return jax.jit(function).lower(*arguments).compile().as_text()


@pytest.mark.skipif(BACKEND != "jax", reason="The programs are written in JAX.")
class TestXLA:
    x = np.zeros((64, 128), "float32")

    def test_fusion_moves_what_goes_in_and_out(self):
        import xla_traffic

        text = compiled(lambda x, y: (2 * x + y) * y, self.x, self.x)
        assert xla_traffic.count(text)[:2] == (3 * self.x.nbytes, 1)

    def test_slices_count_what_they_read(self):
        import xla_traffic

        text = compiled(lambda x: x[:8] + x[8:16], self.x)
        assert xla_traffic.count(text)[:2] == (3 * 8 * 128 * 4, 1)

    @pytest.mark.parametrize("trips", [3, 7])
    def test_loops_count_for_each_trip(self, trips):
        import jax
        import xla_traffic

        def step(y, _):
            return y @ y, None

        x = np.zeros((64, 64), "float32")
        text = compiled(
            lambda x: jax.lax.scan(step, x, None, length=trips)[0], x
        )
        found = xla_traffic.count(text)
        # Operands and result of a product, at least, and some copies.
        assert 3 * trips <= found.bytes / x.nbytes <= 5 * trips + 8


@pytest.mark.skipif(BACKEND != "torch", reason="Operators of PyTorch.")
def test_operators_count_operands_and_results():
    import torch
    import traffic

    class Twice(torch.nn.Module):
        def forward(self, x):
            return torch.exp(x.T).sum(0)

    x = torch.zeros(16, 32)
    found = traffic._torch(Twice(), x)
    # Large tensors of each operator: 2 of exp, 3 of its product in the backward
    # pass, 1 of the first sum; a tensor of 16 numbers is 1/32 of x.
    large = found["bytes"] / (x.numel() * 4)
    assert 6 <= large < 9
    assert found["kernels"] >= 5


@pytest.mark.skipif(BACKEND != "torch", reason="Operators of PyTorch.")
def test_overlapping_views_count_their_memory_once():
    import torch
    import traffic

    windows = torch.zeros(10).as_strided((8, 3), (1, 1))
    assert traffic._spanned(windows) == 40
    assert traffic._spanned(torch.zeros(1).expand(7)) == 4
    assert traffic._spanned(torch.zeros(0, 3)) == 0


@pytest.mark.parametrize("name", ["conv2d"])
def test_families_are_measured(name):
    import traffic

    found = traffic.measure(name, 1, "float32", False)
    assert found["moved"] > found["bound"] > 3
    assert found["kernels"] > 1


SLOW = [pytest.mark.slow, pytest.mark.every_backend]


@pytest.mark.skipif(BACKEND != "torch", reason="Operators are counted.")
@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        pytest.param("float32", ["sasa", "input_attention_p4"], id="some"),
        pytest.param("float32", None, marks=SLOW, id="all"),
        pytest.param("mixed_bfloat16", None, marks=SLOW, id="half precision"),
    ],
)
def test_no_layer_moves_more_than_the_table_says(dtype, names):
    """Without a compiler the count is the same on every machine."""
    import traffic
    from report_files import Results

    file = Results().latest(f"traffic-torch-{dtype}-8", "traffic.py")
    assert set(traffic.FAMILIES) <= set(file)
    for name in names or traffic.FAMILIES:
        found = traffic.measure(name, 8, dtype, False)
        assert found["moved"] <= 1.01 * file[name]["moved"], name
        assert found["kernels"] <= file[name]["kernels"], name


@pytest.mark.skipif(BACKEND != "torch", reason="XLA widens bfloat16 on CPUs.")
@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.PatchwiseACmix2D(32),
        lambda: layers.WindowACmix2D(32, 4, window_size=4),
        lambda: layers.SpatialReductionACmix2D(32, 4),
        lambda: layers.SqueezeExcite(),
    ],
    ids=["patchwise", "window", "reduction", "squeeze"],
)
def test_half_precision_moves_half_of_the_bytes(monkeypatch, make):
    import traffic

    shape = (16, 16, 32)
    loss = keras.layers.Identity
    families = {"layer": (make, shape), "loss": (loss, shape)}
    monkeypatch.setattr(traffic, "FAMILIES", families)

    def moved(dtype, size):
        """By the layer alone, without the loss."""
        of_both, of_loss = (
            traffic.measure(name, 2, dtype, False)["moved"]
            for name in ("layer", "loss")
        )
        return (of_both - of_loss) * size

    assert moved("mixed_bfloat16", 2) < 0.6 * moved("float32", 4)
