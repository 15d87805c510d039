"""The page of results, and what is written to it."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def step_time(ratio):
    return {
        "sasa": {"seconds": 1.5, "ratio": ratio},
        "hardware": {
            "processor": "A CPU",
            "cores": 1,
            "memory_gib": 7.9,
            "device": "CPU",
        },
        "versions": {"backend": "jax", "keras": "3.0", "jax": "1.0"},
    }


def write(folder, name, content):
    (folder / name).write_text(json.dumps(content))


def test_pages_show_the_files():
    import report
    from report_files import Results

    assert report.stale_tables(Results()) == []


def test_the_readme_has_the_ranges_of_the_files():
    """Times in units of a convolution, over the three backends."""
    from report_files import Results

    files = Results().by_backend("step_time-{}-128", "step_time.py").values()
    text = (ROOT / "README.md").read_text()
    for layer, families in {
        "AttentiveGroupConv2D": ("full_attention_p4",),
        "AffineSelfConv2D": ("asc", "asc_p4"),
        "StandAloneSelfAttention2D": ("sasa",),
        "ACmix2D": ("acmix", "acmix_p4"),
        "GroupSelfAttention2D": ("gsa_p4",),
    }.items():
        ranges = [[file[name]["ratio"] for file in files] for name in families]
        cell = ", on `p4` ".join(
            f"{min(r):.0f} to {max(r):.0f}" for r in ranges
        )
        assert f"| {cell} | `{layer}` |" in text


def test_every_table_is_shown():
    import report
    import report_figures

    text = "".join((report.DOCS / name).read_text() for name in report.PAGES)
    shown = {(m["kind"], m["name"]) for m in report.BLOCK.finditer(text)}
    known = {("table", name) for name in report.TABLES}
    known |= {("figure", name) for name in report_figures.FIGURES}
    assert shown == known


def test_the_latest_file_counts(tmp_path):
    import report
    from report_files import Results

    results = Results(tmp_path)
    page = "<!-- table: step_time -->\nold\n<!-- end -->\nprose"
    empty = report.filled(page, results)
    assert "step_time.py` makes the first file" in empty
    write(tmp_path, "step_time-jax-128-2026-10-09.json", step_time(7.7))
    write(tmp_path, "step_time-jax-128-2026-11-01.json", step_time(3.25))
    write(tmp_path, "step_time-jax-2-2026-12-01.json", step_time(9.9))
    full = report.filled(page, results)
    assert "| SASA 5 x 5 | 3.2 (1.50 s) |" in full
    assert "on 2026-11-01 on 1 core of an A CPU with 8 GiB" in full
    assert "JAX 1.0 and Keras 3.0." in full
    assert "7.7" not in full
    assert "ASC" not in full
    assert full.endswith("<!-- end -->\nprose")
    assert report.filled(full, results) == full


def test_a_run_that_was_repeated_counts_once(tmp_path):
    from report_accuracy import protocols
    from report_files import Results

    def run(seed, epochs, error):
        return {
            "settings": {
                "network": "a network",
                "seed": seed,
                "epochs": epochs,
                "tested": 1,
                "milestones": [],
                "dropout_after_attention": False,
            },
            "errors": [error],
            "hardware": step_time(1)["hardware"],
            "versions": step_time(1)["versions"],
        }

    write(tmp_path, "protocol-a-100-seed0-2026-10-09.json", run(0, 100, 7.0))
    write(tmp_path, "protocol-a-100-seed0-2026-11-01.json", run(0, 100, 2.0))
    write(tmp_path, "protocol-a-100-seed1-2026-11-01.json", run(1, 100, 4.0))
    write(tmp_path, "protocol-a-2-seed0-2026-11-01.json", run(0, 2, 9.0))
    table = protocols(Results(tmp_path))
    assert "| 100 | last 1 | 0, 1 | 3.000 ± 1.414 |" in table
    assert "| 2 | last 1 | 0 | 9.000 |" in table
    assert "7.0" not in table


def test_a_missing_file_names_its_command(tmp_path):
    from report_costs import windows_memory
    from report_files import MissingResultError
    from report_files import Results

    with pytest.raises(MissingResultError, match=r"windows\.py memory"):
        windows_memory(Results(tmp_path))


def test_what_is_out_of_date_is_named(tmp_path):
    import report
    from report_files import Results

    for name in report.PAGES:
        page = (report.DOCS / name).read_text()
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(page.replace("operator by operator", "x"))
    assert report.stale_tables(Results(), tmp_path) == [
        "results.md: table traffic",
        "guide/engine.md: table traffic",
    ]


def test_a_figure_tells_what_it_shows(tmp_path):
    import report_figures

    shown = {
        "rows": ["one", "two"],
        "series": {"here": [1.0, 20.0], "there": [3.0, None]},
        "axis": "time (s)",
        "log": True,
        "alt": "Time",
    }
    lines = {
        "x": [0, 45, 90],
        "lines": {
            name: {"new": [0.0, 0.1, 0.0], "old": [0.0, 0.4, 0.0]}
            for name in "abcd"
        },
        "solid": "new",
        "x axis": "angle",
        "axis": "error",
        "alt": "Error",
    }
    for each in (shown, lines):
        report_figures.draw(each, tmp_path / "figure.png")
        assert report_figures.stored(tmp_path / "figure.png") == each
    assert report_figures.stored(tmp_path / "none.png") is None


def test_means_with_deviations():
    from report_files import with_deviation

    assert with_deviation([0.25], ".1f") == "0.2"
    assert with_deviation([1.0, 2.0, 3.0], ".2f") == "2.00 ± 1.00"


def test_a_benchmark_goes_on_under_the_same_settings(tmp_path, monkeypatch):
    import report_files

    monkeypatch.setattr(report_files, "RESULTS", tmp_path)
    assert report_files.earlier("speed", {"size": 3}, "rows") == []
    written = {"settings": {"size": 3}, "rows": [{"seed": 0}]}
    path = report_files.write("speed", written)
    assert report_files.earlier("speed", {"size": 3}, "rows") == [{"seed": 0}]
    with pytest.raises(SystemExit, match=r"other settings.*3.*Received.*4"):
        report_files.earlier("speed", {"size": 4}, "rows")
    content = json.loads(path.read_text())
    content["versions"]["keras"] = "2.0"
    path.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=r"other versions.*2\.0.*Received"):
        report_files.earlier("speed", {"size": 3}, "rows")
