"""What is installed: both packages, the type marker, the shipped weights."""

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.once

# Runs outside the checkout: what it imports is what was installed.
PROBE = """
import keras_equiattn.applications as applications
import keras_equiattn, sys
assert keras_equiattn.__file__.startswith(sys.argv[1]), keras_equiattn.__file__
assert applications.__file__.startswith(sys.argv[1]), applications.__file__
assert keras_equiattn.__version__
model = applications.get_model("rotmnist_p4cnn", weights="rot_mnist")
print(model.count_params())
"""


def pip(python, *arguments):
    subprocess.run(
        [python, "-m", "pip", "-q", *map(str, arguments)],
        check=True,
        capture_output=True,
        cwd=ROOT,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--no-deps", "-w", folder, ".")
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_both_packages(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in (
        ("keras_equiattn", "keras_equiattn"),
        ("applications", "keras_equiattn/applications"),
    ):
        for path in (ROOT / folder).rglob("*.py"):
            assert f"{package}/{path.relative_to(ROOT / folder)}" in names
    assert "keras_equiattn/py.typed" in names
    applications = ROOT / "applications"
    shipped = {
        f"keras_equiattn/applications/{path.relative_to(applications)}"
        for path in (applications / "weights").rglob("*")
        if path.is_file()
    }
    assert shipped
    assert shipped <= names
    assert not [name for name in names if name.startswith(("tests", "exam"))]


def test_core_dependencies_name_no_backend(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
        metadata = archive.read(name).decode()
    required = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.M)
    assert sorted(required) == ["jaxtyping", "keras", "numpy"]
    extras = set(re.findall(r"^Provides-Extra: (\w+)$", metadata, re.M))
    assert extras >= {
        "tensorflow",
        "jax",
        "torch",
        "viz",
        "examples",
        "docs",
        "dev",
    }


def environment(folder):
    """A clean environment that sees this one's dependencies, not its links."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    site = subprocess.run(
        [
            python,
            "-c",
            "import sysconfig; print(sysconfig.get_path('purelib'))",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    # A plain path entry: .pth files inside it, such as ours, are not read.
    (Path(site) / "dependencies.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )
    return python, site


def probe(python, where, folder):
    output = subprocess.run(
        [python, "-c", PROBE, str(where)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert output.returncode == 0, output.stderr
    assert output.stdout.split()[-1].isdigit()


@pytest.mark.slow
def test_wheel_installs_in_a_clean_environment(wheel, tmp_path):
    python, site = environment(tmp_path / "env")
    pip(python, "install", "--no-deps", wheel)
    probe(python, site, tmp_path)


@pytest.mark.slow
def test_sdist_installs_in_a_clean_environment(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "-s", "-o", tmp_path, "."],
        check=True,
        capture_output=True,
        cwd=ROOT,
    )
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert any(name.endswith("/applications/datasets.py") for name in names)
    python, site = environment(tmp_path / "env")
    pip(python, "install", "--no-deps", sdist)
    probe(python, site, tmp_path)


@pytest.mark.slow
def test_editable_install_in_a_clean_environment(tmp_path):
    python, _ = environment(tmp_path / "env")
    pip(python, "install", "--no-deps", "-e", ROOT)
    probe(python, ROOT, tmp_path)


def test_import_needs_no_backend_of_another_kind():
    """The library imports Keras and NumPy, never a backend by itself."""
    for package in ("keras_equiattn", "applications"):
        for path in (ROOT / package).rglob("*.py"):
            found = re.findall(
                r"^(?:import|from) (tensorflow|torch|jax|scipy|sklearn)\b",
                path.read_text(),
                re.M,
            )
            assert not found, f"{path.name} imports {found} at import time"


def test_one_module_imports_the_types_of_the_annotations():
    """Its name begins like that of a backend, which it does not import."""
    paths = [
        path
        for package in ("keras_equiattn", "applications")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"^(?:import|from) jaxtyping\b", path.read_text(), re.M)
    ]
    assert paths == [ROOT / "keras_equiattn" / "ops" / "_types.py"]
