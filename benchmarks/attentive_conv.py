"""Memory and time of attention on responses, in three forms.

    KERAS_BACKEND=jax python benchmarks/attentive_conv.py memory
    KERAS_BACKEND=torch python benchmarks/attentive_conv.py rss
    KERAS_BACKEND=torch python benchmarks/attentive_conv.py time
    KERAS_BACKEND=torch python benchmarks/attentive_conv.py profile

There are three forms: "chunked" is the default of the layers, "held" is
`chunk_size=None`, and "naive" follows the equations of the paper term by term.

`memory` (JAX) compiles a whole training step (outputs, loss, gradients) at
batch 128 and gets the size of its temporaries from the compiler: nothing runs,
so 300 GB can be measured on a laptop. `rss` runs a step of one layer of the
All-CNN at batch 8 in a process of its own and reads its peak resident memory.
`time` alternates training steps of the attentive rot-MNIST networks with those
of the plain one, `profile` those of the full network with those of the same
network without one of its parts. Writes
`benchmarks/results/attentive_conv-<what>-...json`.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import keras
import numpy as np
import report_files
from keras import ops

from keras_equiattn import applications
from keras_equiattn import layers
from keras_equiattn.ops.group.kernels import kernel_orbit

FORMS = ("chunked", "held", "naive")
ATTENTIVE = (layers.AttentiveLiftingConv2D, layers.AttentiveGroupConv2D)
NETWORKS = ("rotmnist_p4cnn", "allcnnc_p4")
VARIANTS = (None, "input", "channel", "spatial", "full")


class NaiveAttentiveGroupConv2D(layers.AttentiveGroupConv2D):
    """Eqs. 13 to 19 with every response in one tensor `(b, x, y, j, c, n)`."""

    def convolve(self, x, kernel, **options):
        assert self.strides == self.dilation_rate == (1, 1), "not covered"
        order, channels = ops.shape(x)[-2:]
        n = self.group.order * self.filters
        on_group = self.takes == "group"

        def orbit(weight):
            """`(h, rows, columns, j, ..., o)` to `(..., n)`."""
            if not on_group:
                weight = ops.expand_dims(weight, 2)
            moved = kernel_orbit(weight, self.group, group_axis=on_group)
            axes = list(range(1, len(moved.shape) - 1))
            moved = ops.transpose(moved, (*axes, 0, len(moved.shape) - 1))
            return ops.reshape(moved, (*moved.shape[:-2], n))

        responses = ops.depthwise_conv(
            ops.reshape(x, (*ops.shape(x)[:3], order * channels)),
            ops.reshape(
                orbit(kernel), (*self.kernel_size, order * channels, n)
            ),
            padding=options["padding"],
            data_format="channels_last",
        )
        size = ops.shape(responses)[:3]
        f = ops.reshape(responses, (*size, order, channels, n))
        g = f
        if self.channel_kernel_1 is not None:
            first, second = (
                orbit(ops.convert_to_tensor(w)[None, None])[0, 0]
                for w in (self.channel_kernel_1, self.channel_kernel_2)
            )
            scores = 0.0
            for statistic in (ops.mean(f, (1, 2)), ops.max(f, (1, 2))):
                hidden = ops.einsum("bjcn,jckn->bjkn", statistic, first)
                hidden = ops.relu(hidden)
                scores += ops.einsum("bjkn,jkcn->bjcn", hidden, second)
            g = ops.sigmoid(scores)[:, None, None] * f
        alpha = g
        if self.spatial_kernel is not None:
            seen = ops.stack([ops.mean(g, 4), ops.max(g, 4)], axis=4)
            psi = orbit(ops.convert_to_tensor(self.spatial_kernel))
            scores = ops.depthwise_conv(
                ops.reshape(seen, (*size, order * 2 * n)),
                ops.reshape(psi, (*psi.shape[:2], order * 2 * n, 1)),
                padding="same",
                data_format="channels_last",
                dilation_rate=self.attention_dilation_rate,
            )
            scores = ops.sum(ops.reshape(scores, (*size, order, 2, n)), 4)
            alpha = ops.sigmoid(scores)[:, :, :, :, None] * g
        y = ops.sum(f - alpha, axis=(3, 4))
        return ops.reshape(y, (*size, self.group.order, self.filters))


class NaiveAttentiveLiftingConv2D(layers.AttentiveLiftingConv2D):
    """The same with one input group element."""

    def convolve(self, x, kernel, **options):
        return NaiveAttentiveGroupConv2D.convolve(
            self, ops.expand_dims(x, 3), kernel, **options
        )


def in_form(layer: keras.layers.Layer, form: str) -> keras.layers.Layer:
    """A copy of the layer that computes its responses in this form."""
    config = layer.get_config()
    if not isinstance(layer, ATTENTIVE) or form == "chunked":
        return type(layer).from_config(config)
    if form == "held":
        return type(layer).from_config({**config, "chunk_size": None})
    naive = {
        layers.AttentiveLiftingConv2D: NaiveAttentiveLiftingConv2D,
        layers.AttentiveGroupConv2D: NaiveAttentiveGroupConv2D,
    }[type(layer)]
    return naive.from_config(config)


def network(family: str, attention: str | None, form: str) -> keras.Model:
    model = applications.get_model(
        f"{family}_{attention}" if attention else family
    )
    return keras.models.clone_model(
        model, clone_function=lambda layer: in_form(layer, form)
    )


def memory(options: argparse.Namespace) -> dict:
    """Temporaries of compiled training steps, in GiB."""
    import jax

    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found: dict[str, dict[str, float]] = {}
    for family in NETWORKS:
        for attention in VARIANTS:
            on_responses = attention in ("full", "channel", "spatial")
            for form in FORMS if on_responses else ("chunked",):
                model = network(family, attention, form)

                def step(trainable, fixed, x, y, model=model):
                    def loss(trainable):
                        outputs, updated = model.stateless_call(
                            trainable, fixed, x, training=True
                        )
                        return loss_function(y, outputs), updated

                    return jax.value_and_grad(loss, has_aux=True)(trainable)

                shapes = [
                    [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in group]
                    for group in (
                        model.trainable_variables,
                        model.non_trainable_variables,
                    )
                ]
                x = (options.batch, *model.input_shape[1:])
                compiled = (
                    jax.jit(step)
                    .lower(
                        *shapes,
                        jax.ShapeDtypeStruct(x, "float32"),
                        jax.ShapeDtypeStruct((options.batch,), "int32"),
                    )
                    .compile()
                )
                size = compiled.memory_analysis().temp_size_in_bytes / 2**30
                row = found.setdefault(f"{family} {attention}", {})
                row[form] = round(size, 3)
                print(family, attention, form, f"{size:.2f} GiB", flush=True)
    return {
        "benchmark": "temporaries of a training step by XLA, GiB",
        "gib": found,
    }


def one_layer_step(options: argparse.Namespace) -> float:
    """Peak resident memory in MiB that a training step adds."""
    inputs = keras.Input((32, 32, 4, 48))
    layer = layers.AttentiveGroupConv2D(
        48, 3, padding="same", group="p4", reduction_ratio=16
    )
    outputs = keras.layers.GlobalAveragePooling3D()(
        in_form(layer, options.form)(inputs)
    )
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(options.batch, 32, 32, 4, 48)).astype("float32")
    y = np.zeros((options.batch, 48), "float32")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model.train_on_batch(x, y)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) / 1024


def rss(options: argparse.Namespace) -> dict:
    """Each form in a process of its own."""
    found = {}
    for form in FORMS:
        command = [sys.executable, __file__, "rss", "--form", form]
        done = subprocess.run(
            [*command, "--batch", str(options.batch)],
            capture_output=True,
            text=True,
            check=False,
        )
        ok = done.returncode == 0
        found[form] = float(done.stdout.split()[-1]) if ok else None
        print(form, found[form], "MiB" if ok else done.stderr[-300:])
    return {
        "benchmark": "peak resident memory that a training step of one full "
        "attentive layer adds (48 to 48 channels, p4, 32 x 32), compilation "
        "included, MiB; null where it failed or ran out of memory",
        "mib": found,
    }


def timing(options: argparse.Namespace) -> dict:
    """Training steps of attentive networks over those of the plain one."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(options.batch, 28, 28, 1)).astype("float32")
    y = rng.integers(0, 10, options.batch)
    models = {
        str(name): network("rotmnist_p4cnn", name, "chunked")
        for name in (None, "input", "co", "channel", "spatial", "full")
    }
    models["full held"] = network("rotmnist_p4cnn", "full", "held")
    models["full naive"] = network("rotmnist_p4cnn", "full", "naive")
    for model in models.values():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(options.repeats + 1):
        for name, model in models.items():
            if name in ("full held", "full naive") and turn > 2:
                continue  # minutes each under JAX
            start = time.perf_counter()
            model.train_on_batch(x, y)
            if turn:  # the first compiles
                seconds[name].append(time.perf_counter() - start)
            print(turn, name, round(time.perf_counter() - start, 3))
    ratios = {
        name: statistics.median(
            mine / plain
            for mine, plain in zip(values, seconds["None"], strict=False)
        )
        for name, values in seconds.items()
    }
    return {
        "benchmark": "training step of attentive rot-MNIST p4 networks over "
        "that of the plain one, in turns in one process, median of ratios; two "
        "turns for the held and the naive form",
        "ratio": {name: round(r, 2) for name, r in ratios.items()},
        "seconds_median": {
            name: round(statistics.median(v), 4) for name, v in seconds.items()
        },
    }


def profile(options: argparse.Namespace) -> dict:
    """Seconds of a full training step, and of steps with a part left out."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(options.batch, 28, 28, 1)).astype("float32")
    y = rng.integers(0, 10, options.batch)
    full = network("rotmnist_p4cnn", "full", "chunked")

    def small_window(layer: keras.layers.Layer) -> keras.layers.Layer:
        config = layer.get_config()
        if isinstance(layer, ATTENTIVE):
            config["attention_kernel_size"] = 1
        return type(layer).from_config(config)

    models = {
        "plain": network("rotmnist_p4cnn", None, "chunked"),
        "full": full,
        "full, 1 x 1 in place of 7 x 7": keras.models.clone_model(
            full, clone_function=small_window
        ),
        "without spatial attention": network(
            "rotmnist_p4cnn", "channel", "chunked"
        ),
        "without channel attention": network(
            "rotmnist_p4cnn", "spatial", "chunked"
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
    for turn in range(options.repeats + 1):
        for name, model in models.items():
            start = time.perf_counter()
            model.train_on_batch(x, y)
            if turn:  # the first compiles
                seconds[name].append(time.perf_counter() - start)
    found: dict = {
        "benchmark": "a training step of the full rot-MNIST p4 network with "
        "parts left out, in turns in one process, median",
        "seconds_median": {
            name: round(statistics.median(v), 4) for name, v in seconds.items()
        },
    }
    if keras.backend.backend() == "torch":
        import torch.profiler

        with torch.profiler.profile() as recorded:
            full.train_on_batch(x, y)
        rows = recorded.key_averages()
        total = sum(row.self_cpu_time_total for row in rows)
        top = sorted(rows, key=lambda row: -row.self_cpu_time_total)[:12]
        found["share_of_operators"] = {
            row.key: round(row.self_cpu_time_total / total, 3) for row in top
        }
    return found


MEASURES = {"memory": memory, "rss": rss, "time": timing, "profile": profile}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=tuple(MEASURES))
    parser.add_argument("--batch", type=int)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--form", choices=FORMS, help="one form, for rss")
    options = parser.parse_args()
    if options.batch is None:
        options.batch = 8 if options.what == "rss" else 128
    backend = keras.backend.backend()
    if options.what == "memory" and backend != "jax":
        parser.error("memory needs KERAS_BACKEND=jax")
    if options.form and options.what != "rss":
        parser.error("--form needs rss")
    if options.form:
        print(f"{one_layer_step(options):.1f}")
        return
    results = {
        **MEASURES[options.what](options),
        "settings": vars(options),
    }
    print(json.dumps(results, indent=2))
    report_files.write(f"attentive_conv-{options.what}-{backend}", results)


if __name__ == "__main__":
    main()
