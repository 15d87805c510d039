r"""A small project on tissue, from training to pictures of what was learned.

    python examples/tissue.py --data-dir DIR

Trains three small networks on patches of lymph nodes (PatchCamelyon), to tell
whether there is a tumour in the middle: a plain one, the same with training
patches that are turned and mirrored at random, and an equivariant one with as
many parameters. Each sees more and more training patches, for the same number
of steps. Then the equivariant network is saved, loaded again, and drawn: where
it found evidence of a tumour on patches that it was not trained on.

Writes `tissue-<backend>-<steps>-<date>.json` with all numbers to `--results`,
the pictures to `--pictures` and the network to `--out`. The page
docs/guide/tutorial-tissue.md shows them. A number that was measured on a sample
of PatchCamelyon shows that the pipeline works, and is no benchmark.
"""

import argparse
import io
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
from matplotlib.figure import Figure
from sklearn.metrics import roc_auc_score

from keras_equiattn import layers
from keras_equiattn import visualization
from keras_equiattn.applications import training
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import reporting
from keras_equiattn.testing import equivariance_error

ROOT = Path(__file__).parents[1]
# Group, widths of the four convolutions, and whether patches are turned.
# Divided by the square root of the order, widths keep the parameter count.
NETWORKS = {
    "plain": ("z2", (16, 32, 32, 48), False),
    "plain, augmented": ("z2", (16, 32, 32, 48), True),
    "equivariant": ("p4m", (6, 11, 11, 17), False),
}
DRAWN = "equivariant"
CROP = 48  # pixels in the middle of a patch, which the label is about
BATCH = 32
LEARNING_RATE = 2e-3
TUMOUR = 1


def network(group: str, widths: tuple[int, ...], size: int) -> keras.Model:
    """Four convolutions, with attention before all but the first.

    Pooling over pixels and poses makes the logits invariant, and the weights
    independent of the size: what was trained on crops also takes whole patches.
    """
    inputs = keras.Input((size, size, 3))
    x = keras.layers.Rescaling(2.0, -1.0)(inputs)
    first, *others = widths
    x = layers.LiftingConv2D(first, 3, padding="same", group=group)(x)
    for number, filters in enumerate(others, 1):
        x = keras.layers.BatchNormalization(momentum=0.9)(x)
        x = keras.layers.ReLU()(x)
        x = layers.SpatialPooling2D(2, group=group)(x)
        x = layers.InputAttention(
            group, attention_kernel_size=3, name=f"attention{number}"
        )(x)
        x = layers.GroupConv2D(filters, 3, padding="same", group=group)(x)
    x = keras.layers.BatchNormalization(momentum=0.9)(x)
    x = keras.layers.ReLU()(x)
    x = keras.layers.GlobalAveragePooling3D()(x)
    return keras.Model(inputs, keras.layers.Dense(2)(x), name="tissue")


def patches(
    split: str, count: int, data_dir: Path | None
) -> tuple[np.ndarray, np.ndarray]:
    """The first patches of a split and their labels, or all if there are fewer.

    Training patches come in a shuffled order that is the same each time.
    """
    batches = datasets.load("pcam", split, 100, data_dir=data_dir)
    batches = itertools.islice(batches, math.ceil(count / 100))
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in batches]
    images, labels = map(np.concatenate, zip(*pairs, strict=True))
    return images[:count], labels[:count]


def middle(images: np.ndarray) -> np.ndarray:
    """The pixels in the middle of each patch."""
    start = (images.shape[1] - CROP) // 2
    return images[:, start : start + CROP, start : start + CROP]


def in_pose(images: np.ndarray, element: int) -> np.ndarray:
    """Images after the action of an element of p4m."""
    mirror, turns = divmod(element, 4)
    return np.rot90(images[:, :, ::-1] if mirror else images, turns, (1, 2))


def batches(
    images: np.ndarray, labels: np.ndarray, augmented: bool, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless batches, all images once before any comes again."""
    rng = np.random.default_rng(seed)
    order: list[int] = []
    while True:
        while len(order) < BATCH:
            order += rng.permutation(len(images)).tolist()
        chosen, order = order[:BATCH], order[BATCH:]
        batch = images[chosen]
        if augmented:
            elements = rng.integers(8, size=BATCH)
            batch = np.stack(
                [
                    in_pose(image[None], element)[0]
                    for image, element in zip(batch, elements, strict=True)
                ]
            )
        yield batch, labels[chosen]


def trained(
    name: str, images: np.ndarray, labels: np.ndarray, steps: int, seed: int
) -> keras.Model:
    """A network after some steps on these patches."""
    keras.utils.set_random_seed(seed)
    group, widths, augmented = NETWORKS[name]
    model = network(group, widths, CROP)
    schedule = keras.optimizers.schedules.CosineDecay(LEARNING_RATE, steps)
    model.compile(
        keras.optimizers.Adam(schedule),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(
        batches(images, labels, augmented, seed),
        steps_per_epoch=steps,
        epochs=1,
        shuffle=False,  # the batches are shuffled
        verbose=0,
    )
    return model


def scores(model: keras.Model, images: np.ndarray) -> np.ndarray:
    """The logit of a tumour less that of none, one for each image."""
    logits = model.predict(images, batch_size=100, verbose=0)
    return logits[:, TUMOUR] - logits[:, 1 - TUMOUR]


def measured(
    model: keras.Model, images: np.ndarray, labels: np.ndarray
) -> dict[str, float]:
    """What a table says of a network.

    `changed` is the share of patches with another prediction in at least one
    of the seven other poses.
    """
    found = np.stack([scores(model, in_pose(images, g)) for g in range(8)])
    decided = found > 0
    return {
        "accuracy": float(np.mean(decided[0] == labels)),
        "auc": float(roc_auc_score(labels, found[0])),
        "changed": float(np.mean((decided != decided[0]).any(axis=0))),
    }


def compared(
    options: argparse.Namespace,
) -> tuple[list[dict[str, Any]], dict[str, Any], keras.Model]:
    """Trains everything.

    Returns the numbers of each run, facts about the data, and the network to
    draw: that of the first seed with the most training patches.
    """
    images, labels = patches("train", max(options.sizes), options.data_dir)
    # Nothing is chosen by the validation patches, so they serve as tests too.
    tested = [
        patches(split, options.test_images, options.data_dir)
        for split in ("validation", "test")
    ]
    test_images, test_labels = map(np.concatenate, zip(*tested, strict=True))
    data = {
        "training_patches": len(labels),
        "test_patches": len(test_labels),
        "test_share_of_tumours": float(test_labels.mean()),
    }
    images, test_images = middle(images), middle(test_images)
    runs, drawn = [], None
    for seed, size, name in itertools.product(
        options.seeds, sorted(options.sizes, reverse=True), NETWORKS
    ):
        # The same patches for all networks.
        chosen = np.random.default_rng(seed).permutation(len(images))[:size]
        model = trained(
            name, images[chosen], labels[chosen], options.steps, seed
        )
        runs.append(
            {
                "network": name,
                "training_patches": len(chosen),
                "seed": seed,
                **measured(model, test_images, test_labels),
            }
        )
        print(runs[-1], flush=True)
        if drawn is None and name == DRAWN:
            drawn = model
    return runs, data, drawn


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds, a row for each network and number of patches."""
    rows = []
    sizes = sorted({run["training_patches"] for run in runs})
    for name, size in itertools.product(NETWORKS, sizes):
        found = [
            run
            for run in runs
            if (run["network"], run["training_patches"]) == (name, size)
        ]
        keys = ("accuracy", "auc", "changed")
        means = {key: float(np.mean([r[key] for r in found])) for key in keys}
        rows.append({"network": name, "training_patches": size, **means})
    return rows


def curves(runs: list[dict[str, Any]]) -> Figure:
    """Accuracy and changed predictions against the number of patches."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    labels = (
        ("accuracy", "accuracy on patches as they are, %"),
        ("changed", "another prediction in some pose, %"),
    )
    for panel, (key, label) in zip(panels, labels, strict=True):
        for (name, mark), color in zip(
            zip(NETWORKS, "osD", strict=True), ("C0", "C1", "C2"), strict=True
        ):
            rows = [row for row in summary(runs) if row["network"] == name]
            sizes = [row["training_patches"] for row in rows]
            means = [100 * row[key] for row in rows]
            panel.plot(sizes, means, color, marker=mark, label=name)
            own = [run for run in runs if run["network"] == name]
            panel.scatter(
                [run["training_patches"] for run in own],
                [100 * run[key] for run in own],
                8,
                color,
                alpha=0.5,
            )
        panel.set(xscale="log", xlabel="training patches", ylabel=label)
        panel.set_xticks(sizes, map(str, sizes), minor=False)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].legend()
    return figure


def drawings(
    model: keras.Model, images: np.ndarray, labels: np.ndarray
) -> dict[str, Figure]:
    """What the network sees in whole patches, by name of the picture."""
    whole = network(*NETWORKS[DRAWN][:2], images.shape[1])
    whole.set_weights(model.get_weights())
    found = scores(whole, images)
    # The surest of both classes, right or wrong: an honest choice of examples.
    order = np.argsort(found)
    chosen = np.concatenate([order[-4:][::-1], order[:2]])
    titles = [
        f"{'tumour' if labels[n] == TUMOUR else 'no tumour'}, {found[n]:+.1f}"
        for n in chosen
    ]
    return {
        "tissue-evidence": visualization.plot_overlays(
            whole,
            images[chosen],
            "attention2",
            class_index=TUMOUR,
            titles=titles,
            columns=2,
        ),
        "tissue-attention": visualization.plot_overlays(
            whole, images[chosen[[0, 1, 4, 5]]], "attention1", columns=2
        ),
        "tissue-poses": visualization.plot_overlays(
            whole,
            np.concatenate([in_pose(images[chosen[:1]], g) for g in range(4)]),
            "attention2",
            class_index=TUMOUR,
            columns=2,
        ),
    }


def write(figure: Figure, path: Path) -> None:
    """Writes a PNG of 256 colours, a third of the size for tissue."""
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=90)
    picture = Image.open(buffer).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=5).save(
        path, optimize=True
    )
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data-dir", type=Path, help="folder of the prepared datasets")
    add("--sizes", type=int, nargs="+", default=[100, 300, 848])
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--steps", type=int, default=300)
    add("--test-images", type=int, default=2000, help="of each split, at most")
    add("--out", type=Path, default=Path("runs/tissue"))
    add("--results", type=Path, default=ROOT / "benchmarks" / "results")
    add("--pictures", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    for folder in (options.out, options.results, options.pictures):
        folder.mkdir(parents=True, exist_ok=True)

    runs, data, model = compared(options)
    file = options.out / "tissue.keras"
    model.save(file)
    loaded = keras.saving.load_model(file)
    images, labels = patches("test", options.test_images, options.data_dir)
    crops = middle(images)[:32]
    results = {
        **reporting.measured_by(
            "python examples/tissue.py "
            f"--sizes {' '.join(map(str, options.sizes))} "
            f"--seeds {' '.join(map(str, options.seeds))} "
            f"--steps {options.steps} --test-images {options.test_images}"
        ),
        "data": data,
        "settings": {
            "crop": CROP,
            "batch": BATCH,
            "learning_rate": LEARNING_RATE,
            "parameters": {
                name: reporting.count_parameters(network(group, widths, CROP))
                for name, (group, widths, _) in NETWORKS.items()
            },
        },
        "means": summary(runs),
        "runs": runs,
        "difference_after_reloading": float(
            np.abs(scores(model, crops) - scores(loaded, crops)).max()
        ),
        "equivariance_error": float(
            max(equivariance_error(loaded, "p4m", crops[:8]))
        ),
    }
    backend = keras.backend.backend()
    name = f"tissue-{backend}-{options.steps}-{results['date']}.json"
    training.write_json(options.results / name, results)
    print(options.results / name)
    write(curves(runs), options.pictures / "tissue-accuracy.png")
    for name, figure in drawings(loaded, images, labels).items():
        write(figure, options.pictures / f"{name}.png")


if __name__ == "__main__":
    main()
