"""Writes the measured tables and figures of the documentation.

    python benchmarks/report.py            # fills in tables, draws figures
    python benchmarks/report.py --check    # fails where any is out of date

The pages are prose that people edit. What stands between
`<!-- table: step_time -->` and `<!-- end -->` is written by the function of
that name in `report_accuracy.py`, `report_angles.py`, `report_costs.py` or
`report_deployment.py`, from the newest files in `benchmarks/results`, and
`<!-- figure: traffic -->` is filled with the picture of that name that
`report_figures.py` draws. No number in them is typed by hand except those that
a paper prints, which stand in `report_accuracy.PRINTED`.
"""

import argparse
import re
from pathlib import Path

import report_accuracy
import report_angles
import report_costs
import report_deployment
import report_figures
from report_files import MissingResultError
from report_files import Results

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (
    "results.md",
    "guide/deployment.md",
    "guide/distributed.md",
    "guide/engine.md",
    "guide/testing.md",
)
BLOCK = re.compile(
    r"(?P<begin><!-- (?P<kind>table|figure): (?P<name>\w+) -->\n)"
    r".*?(?P<end><!-- end -->)",
    re.S,
)
TABLES = {
    function.__name__: function
    for tables in (
        report_accuracy,
        report_angles,
        report_costs,
        report_deployment,
    )
    for function in tables.TABLES
}


def filled(page: str, results: Results) -> str:
    """The text of a page with what belongs between its markers."""

    def content(match: re.Match) -> str:
        kind, name = match["kind"], match["name"]
        known = TABLES if kind == "table" else report_figures.FIGURES
        if name not in known:
            raise SystemExit(
                f"<!-- {kind}: {name} --> is unknown. Known: "
                f"{', '.join(sorted(known))}."
            )
        if kind == "table":
            text = TABLES[name](results)
        else:
            text = report_figures.link(name, results)
        text = f"\n{text}\n\n" if text else ""
        return f"{match['begin']}{text}{match['end']}"

    return BLOCK.sub(content, page)


def stale_tables(results: Results, docs: Path = DOCS) -> list[str]:
    """Every table, or link to a figure, that differs from the files."""
    stale = []
    for name in PAGES:
        text = (docs / name).read_text()
        now = BLOCK.finditer(filled(text, results))
        for before, after in zip(BLOCK.finditer(text), now, strict=True):
            if before.group() != after.group():
                stale.append(f"{name}: {before['kind']} {before['name']}")
    return stale


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    results = Results()
    images = DOCS / "images"
    try:
        stale = stale_tables(results)
        stale += [
            f"figure {name}" for name in report_figures.stale(results, images)
        ]
    except MissingResultError as error:
        raise SystemExit(str(error)) from None
    if options.check:
        if stale:
            raise SystemExit("\n".join(["Out of date:", *stale]))
        return
    for name in PAGES:
        page = DOCS / name
        page.write_text(filled(page.read_text(), results))
    report_figures.draw_all(results, images)
    print("\n".join(["Written:", *stale] if stale else ["Nothing to write"]))


if __name__ == "__main__":
    main()
