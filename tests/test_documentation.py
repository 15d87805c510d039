"""The code in README and documentation runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


def run(page, monkeypatch, folder):
    """Executes the Python blocks of a page one after the other."""
    monkeypatch.chdir(folder)
    fit = keras.Model.fit

    def short(self, *args, **kwargs):
        return fit(self, *args, **{**kwargs, "epochs": 1, "verbose": 0})

    monkeypatch.setattr(keras.Model, "fit", short)
    names = {"__name__": "__main__"}
    for code in BLOCK.findall(page.read_text()):
        exec(compile(code, page.name, "exec"), names)
    return names


@pytest.mark.once
def test_readme(monkeypatch, tmp_path):
    names = run(PAGES[0], monkeypatch, tmp_path)
    assert names["model"].count_params() > 29_462  # with moving statistics


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.parametrize(
    "page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES]
)
def test_page(page, monkeypatch, tmp_path):
    if "runs/digits/" in page.read_text():  # a command of the page makes it
        script = ROOT / "examples" / "train.py"
        command = "--model rotmnist_p4cnn --dataset digits --out runs/digits"
        subprocess.run(
            [sys.executable, script, *command.split(), "--epochs=1"],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
    run(page, monkeypatch, tmp_path)  # fails where a block raises


@pytest.mark.once
def test_readme_names_what_exists():
    text = PAGES[0].read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)", text, re.M):
        assert f"\n{target}:" in makefile
    for path in re.findall(r"(?:examples|benchmarks)/\w+\.py", text):
        assert (ROOT / path).exists()


@pytest.mark.once
def test_every_picture_is_shown_and_small():
    text = "\n".join(page.read_text() for page in PAGES)
    for picture in (ROOT / "docs" / "images").iterdir():
        assert f"images/{picture.name}" in text, picture.name
        assert picture.stat().st_size < 150_000, picture.name
