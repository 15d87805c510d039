"""The command line of the datasets: lists, prepares and exports them."""

import argparse
import sys
from collections.abc import Sequence

from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.data.sources import access
from keras_equiattn.applications.data.sources.catalogue import COMMAND
from keras_equiattn.applications.data.sources.catalogue import INFOS
from keras_equiattn.applications.data.sources.catalogue import resolve_data_dir


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments, by default those of the process.

    Returns:
        The exit status: 0, or 1 after an error that it printed.
    """
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description="Lists, prepares and exports the datasets.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "list": "Lists the datasets, and says whether they are on disk.",
        "prepare": "Downloads a dataset and builds its cache.",
        "export": "Writes a dataset into one .npz file.",
    }
    for command, text in helps.items():
        sub = commands.add_parser(command, help=text, description=text)
        if command != "list":
            sub.add_argument("name", help="The name of the dataset.")
        if command == "export":
            sub.add_argument("path", help="The .npz file to write.")
            sub.add_argument(
                "--force",
                action="store_true",
                help="Overwrite the file if it exists.",
            )
        sub.add_argument(
            "--data-dir",
            help="The folder of the prepared datasets. The default is the "
            "environment variable TFDS_DATA_DIR, else ~/tensorflow_datasets.",
        )
    options = parser.parse_args(argv)
    try:
        if options.command == "list":
            folder = resolve_data_dir(options.data_dir)
            for name, facts in INFOS.items():
                shape = "x".join(map(str, facts.shape))
                state = access.state(name, folder)
                print(f"{name:17}{shape:10}{facts.classes:4} classes  {state}")
        elif options.command == "prepare":
            print(datasets.prepare(options.name, options.data_dir))
        else:
            path = datasets.export(
                options.name,
                options.path,
                options.data_dir,
                force=options.force,
            )
            print(f"Wrote {path} ({path.stat().st_size / 1e6:.1f} MB).")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
