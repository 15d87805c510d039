"""Shows griffe the folder applications/ under its installed name."""

from pathlib import Path
from typing import Any

import griffe

FOLDER = Path(__file__).parent.parent / "applications"


class Applications(griffe.Extension):
    """Adds `keras_equiattn.applications` to the package read from disk."""

    def on_package(
        self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any
    ) -> None:
        if pkg.path == "keras_equiattn":
            outer = griffe.GriffeLoader(
                search_paths=[FOLDER.parent],
                docstring_parser=loader.docstring_parser,
                docstring_options=loader.docstring_options,
                lines_collection=loader.lines_collection,
                modules_collection=loader.modules_collection,
            )
            pkg.set_member("applications", outer.load("applications"))
