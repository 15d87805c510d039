r"""Trains a network of `keras_equiattn.applications` by its recipe.

    python examples/train.py --model rotmnist_p4cnn --dataset rot_mnist \
        --epochs 100 --seed 0 --out runs/p4cnn

`--resume` goes on with a run that was killed, and with more `--epochs` also
with one that was complete. `--train-on-all` trains on
the validation examples too, and the last epoch is what is tested. The backend
is that of the environment variable `KERAS_BACKEND`.

The folder of a run holds `log.csv`, `last.keras`, `best.keras` (best
validation accuracy), `last.weights.h5`, `results.json` and `curves.png`, with
`--log-steps` also `steps.csv`.

`--distribute` trains on all devices of a machine, and in several processes
where the backend is told of them:

    torchrun --nproc-per-node 2 examples/train.py --distribute ...
"""

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import keras

from keras_equiattn.applications import presets
from keras_equiattn.applications import training
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import callbacks
from keras_equiattn.applications.training import recipes
from keras_equiattn.applications.training import reporting


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's documentation."""
    try:
        import tyro
    except ImportError:
        raise SystemExit(
            'train.py: tyro is missing: pip install "keras-equiattn[examples]"'
        ) from None
    options = tyro.cli(training.TrainOptions, args=arguments)
    distribution = training.Distribution()
    try:
        recipe = training.resolve(options)
        distribution = training.start(options)
        # Not before: some backends take the signal for themselves.
        signal.signal(signal.SIGTERM, _terminate)
        train(options, recipe, distribution)
    except training.OptionsError as error:
        message, code = f"train.py: error: {error}", 1
    except (OSError, training.ProcessLostError) as error:
        # A full disk, for example, or one that is no longer there.
        message, code = f"train.py: error: {error}. {stopped(options)}", 1
    except KeyboardInterrupt:
        message, code = f"\nInterrupted. {stopped(options)}", 130
    else:
        return
    if distribution.is_alone and code == 1:
        raise SystemExit(message)
    print(message, file=sys.stderr, flush=True)
    if distribution.is_alone:
        raise SystemExit(code)
    # At exit, backends could wait for the other processes for minutes.
    sys.stdout.flush()
    os._exit(code)


def _terminate(*_: object) -> None:
    """Stops as by Ctrl-C where a scheduler ends the process."""
    raise KeyboardInterrupt


def stopped(options: training.TrainOptions) -> str:
    """Says what a stopped run has completed, and how to continue it."""
    completed = callbacks.EpochBackup(options.out / "backup").completed
    if not completed:
        return f"No epoch was completed in {options.out}."
    return (
        f"The run in {options.out} has completed {completed} epochs: "
        "--resume goes on with it."
    )


# What the first process may send instead of a number of completed epochs.
COMPLETE, REFUSED = -1, -2


def train(
    options: training.TrainOptions,
    recipe: recipes.Recipe,
    distribution: training.Distribution,
) -> None:
    """Trains, tests and reports."""
    state, refusal = 0, training.OptionsError("The first process has refused.")
    with distribution.watched(), contextlib.ExitStack() as claim:
        if distribution.index == 0:
            try:
                claim.enter_context(training.claimed_out(options))
                state = look(options, recipe)
            except training.OptionsError as error:
                state, refusal = REFUSED, error
        state = distribution.agree(state)
        if state < 0:
            distribution.leave()
            if state == REFUSED:
                raise refusal
            return
        with training.folder_of_process(
            options, distribution.index, state
        ) as own:
            train_from(state, own, recipe, distribution)


def look(options: training.TrainOptions, recipe: recipes.Recipe) -> int:
    """How many epochs of the run are completed, or `COMPLETE`."""
    training.check_out(options, recipe)
    if training.is_complete(options, recipe):
        print(f"The run in {options.out} is complete.")
        return COMPLETE
    backup = callbacks.EpochBackup(options.out / "backup")
    return training.completed_epochs(options, backup)


def train_from(
    completed: int,
    options: training.TrainOptions,
    recipe: recipes.Recipe,
    distribution: training.Distribution,
) -> None:
    """Goes on after some epochs, and reports in the first process."""
    first = distribution.index == 0
    if options.resume and first:
        print(
            f"Resuming after epoch {completed} of {recipe.epochs}."
            if completed
            else f"Nothing to resume in {options.out}: starting at epoch 1."
        )
    best = options.out / "best.keras"
    backup = callbacks.EpochBackup(options.out / "backup", files=(best,))
    log = callbacks.EpochLog(options.out / "log.csv", completed)
    steps_log = None
    if options.log_steps is not None:
        steps_log = callbacks.StepLog(
            options.out / "steps.csv", options.log_steps, completed
        )
    with distribution.scope():
        model = training.build_model(options, recipe)
        if first:
            print(reporting.model_line(model), flush=True)
        data = training.load_data(
            options, recipe, completed, distribution.shard
        )
        training.compile_model(model, recipe, len(data.train))
        distribution.prepare(model, options.batch_statistics)
        training.open_out(options, recipe)
    if steps_log is not None:
        steps_log.steps = len(data.train)

    actions = [
        *distribution.callbacks(options.seed),
        log,
        backup,
        callbacks.Checkpoints(options.out, log),
    ]
    if recipe.plateau_patience is not None:
        plateau = callbacks.Plateau(
            log,
            recipe.learning_rate,
            recipe.plateau_patience,
            recipe.plateau_factor,
        )
        actions.insert(-2, plateau)  # the backup keeps the lowered rate
    if steps_log is not None:
        actions.append(steps_log)
    with data.own_errors(), distribution.scope():
        if completed < recipe.epochs:
            model.fit(
                distribution.data(data.train),
                validation_data=distribution.data(data.validation),
                validation_steps=training.evaluation_steps(
                    options, recipe.batch_size, data.validation
                ),
                epochs=recipe.epochs,
                initial_epoch=completed,
                callbacks=[datasets.EpochCounter(data.train), *actions],
                verbose=options.verbose,
                shuffle=False,  # the dataset does
            )
        else:  # killed between the last epoch and the report
            for action in actions:
                action.set_model(model)
                action.on_train_begin()
    distribution.leave()
    if not first:
        return
    if options.distribute:
        model = keras.saving.load_model(options.out / "last.keras")
    presets.save_weights(model, options.out / "last.weights.h5")
    steps = [] if steps_log is None else steps_log.rows
    with data.own_errors():
        report(options, recipe, data, model, log, steps)
    # More epochs can go on from here.
    backup.keep_last()


def report(
    options: training.TrainOptions,
    recipe: recipes.Recipe,
    data: training.Data,
    model: keras.Model,
    log: callbacks.EpochLog,
    steps: Sequence[callbacks.Row] = (),
) -> None:
    """Writes `curves.png` and `results.json`, the latter last."""
    results: dict[str, Any] = {
        "model": options.model,
        "group": reporting.group_of(model),
        "parameters": reporting.count_parameters(model),
        "options": options.as_dict(),
        "recipe": dataclasses.asdict(recipe),
        "dataset": dataclasses.asdict(data.info),
        "pipeline": data.pipeline,
        "command": ["examples/train.py", *sys.argv[1:]],
        "versions": reporting.versions(),
        "hardware": reporting.hardware(),
        "epochs": len(log.rows),
        "best": None,
    }
    results["validation"] = training.validation_metrics(log.rows[-1])
    evaluated = (data, options)
    results["test"] = training.evaluate_test(model, *evaluated)
    if log.best is not None:
        best = keras.saving.load_model(options.out / "best.keras")
        results["best"] = {
            "epoch": log.best["epoch"],
            "validation": training.validation_metrics(log.best),
            "test": training.evaluate_test(best, *evaluated),
        }
    results["equivariance"] = training.equivariance(model, data)
    results["poses"] = training.accuracy_of_poses(model, data)
    results["seconds_per_epoch"] = log.seconds_per_epoch
    results["wall_time_seconds"] = log.wall_time
    reporting.plot_curves(
        log.rows, options.out / "curves.png", options.model, steps
    )
    training.write_json(options.out / "results.json", results)
    if reporting.diverged(results):
        print("The run diverged: its loss or its outputs are not finite.")
    print(reporting.result_line(results))


if __name__ == "__main__":
    main()
