"""Publishes the weights of a run, with a card that says what they are.

    python examples/model_card.py runs/p4_seed0 applications/weights/name
            --seeds runs/p4_seed1 runs/p4_seed2

Writes the folder `name`, a preset for `applications.from_preset`. Runs after
`--seeds` differ from the first in nothing but the seed; the card states mean
and deviation over all of them.
"""

import argparse
import json
import statistics
from pathlib import Path

import keras

from keras_equiattn import groups
from keras_equiattn.applications import save_to_preset
from keras_equiattn.applications.training import reporting


def results_of(run: Path) -> dict:
    return json.loads((run / "results.json").read_text())


def measured_elements(name: str) -> str:
    """The elements of a group whose error `results.json` holds."""
    group = groups.get(name)
    if group.acts_on_grid:
        return name
    mirrors = " and mirrors" if len(group.grid_elements) > 4 else ""
    return f"the quarter turns{mirrors} of {name}"


def card(name: str, run: dict, others: list[dict]) -> str:
    """The card of one run, in Markdown."""
    options, recipe = run["options"], run["recipe"]
    for other in others:
        if reporting.settings_key(other) != reporting.settings_key(run):
            raise SystemExit("--seeds: runs that differ in more than the seed")
    for result in (run, *others):
        if result["test"] is None:
            raise SystemExit(
                f"The run in {result['options']['out']} was not tested "
                "(--no-test): a card states the test error."
            )
        if reporting.diverged(result):
            raise SystemExit(
                f"The run in {result['options']['out']} diverged: there is "
                "nothing to publish."
            )
    errors = [r["test"]["error_percent"] for r in (run, *others)]
    test = f"{errors[0]:.3f} %"
    if others:
        seeds = [str(r["options"]["seed"]) for r in (run, *others)]
        test += (
            f"; over seeds {', '.join(seeds)}: {statistics.mean(errors):.3f} "
            f"± {statistics.stdev(errors):.3f} %"
        )
    protocol = (
        f"{recipe['optimizer']}, learning rate {recipe['learning_rate']}, "
        f"coupled weight decay {recipe['weight_decay']}"
    )
    if recipe["milestones"]:
        epochs = ", ".join(map(str, recipe["milestones"]))
        protocol += f", times {recipe['factor']} after epoch {epochs}"
    validation = "none: no examples were held out, and no epoch was selected"
    if run["validation"]:
        validation = f"{run['validation']['error_percent']:.3f} %"
    info, of = run["dataset"], run["hardware"]
    part = "all training images" if options["train_on_all"] else "train"
    rows = {
        "network": f"`{run['model']}`, {run['parameters']:,} parameters",
        "group": run["group"],
        "input": f"images {tuple(info['shape'])} in [0, 1]; the network "
        f"normalises with mean {info['mean']}, deviation {info['std']}",
        "output": f"logits of {info['classes']} classes",
        "exact for": "this input size; largest relative change of the logits "
        f"under {measured_elements(run['equivariance']['group'])} "
        f"{run['equivariance']['error']:.1e} (float32)",
        "trained on": f"{info['name']}, {part}",
        "validation": validation,
        "epochs, batch": f"{run['epochs']}, {recipe['batch_size']}; weights "
        "of the last epoch",
        "recipe": protocol,
        "kernel factors": ", ".join(
            f"`{pattern}` {factor:.3f}"
            for pattern, factor in reporting.kernel_factors(run)
        )
        or "none",
        "seed": options["seed"],
        "test error": test,
        "hardware": f"{of['processor']}, cores: {of['cores']}, memory: "
        f"{of['memory_gib']} GiB, device: {of['device']}",
        "versions": ", ".join(f"{k} {v}" for k, v in run["versions"].items()),
        "licence": "Apache 2.0",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return (
        f"# {name}\n\n| | |\n|---|---|\n{table}\n\nMade by:\n\n"
        f"```\npython {' '.join(run['command'])}\n```\n\n"
        f"Source of the recipe: {recipe['source']}. Options of the command "
        "replace its settings.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("target", type=Path, help="folder of the preset")
    parser.add_argument("--seeds", nargs="*", type=Path, default=[])
    options = parser.parse_args()
    run = results_of(options.run)
    others = [results_of(path) for path in options.seeds]
    text = card(options.target.name, run, others)
    model = keras.saving.load_model(options.run / "last.keras", compile=False)
    save_to_preset(model, options.target, card=text)
    print(text)


if __name__ == "__main__":
    main()
