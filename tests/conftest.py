"""Set-up of all tests."""

import collections
import datetime
import importlib.metadata
import json
import os
import pathlib
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# Two test processes on two cores: more threads only wait for each other.
for variable in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
    os.environ.setdefault(variable, "1")
# Inductor would compile what several tests call with the same shapes.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
# Small tensors, many functions: the tests wait for the compiler, not the code.
# Without MLIR fusion emitters the compiler takes three quarters of the time,
# but the oldest supported TensorFlow aborts on that flag.
XLA_FLAGS = "--xla_cpu_multi_thread_eigen=false"
XLA_FLAGS += " --xla_backend_optimization_level=0"
if not any(
    found.version.startswith("2.19.")
    for name in ("tensorflow", "tensorflow-cpu")
    for found in importlib.metadata.distributions(name=name)
):
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)
# Processes share what JAX has compiled, in a folder of the first process, which
# starts the others.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import pytest

# Assertions in the contract explain themselves as those in tests do.
pytest.register_assert_rewrite("layer_contract")


def pytest_configure(config):
    """Prepares the libraries, except where workers run the tests."""
    if config.getoption("numprocesses", None):
        return
    # PyTorch before TensorFlow, which Keras may import: the other way round can
    # crash the process.
    import torch  # isort: skip
    import hypothesis

    torch.set_num_threads(1)
    # Time limits mean nothing on a shared machine.
    hypothesis.settings.register_profile("suite", deadline=None)
    hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def fresh_keras():
    """Every test starts from the same seed and leaves no global settings."""
    import keras

    keras.utils.set_random_seed(0)
    image_data_format = keras.config.image_data_format()
    policy = keras.config.dtype_policy()
    yield
    keras.config.set_image_data_format(image_data_format)
    keras.config.set_dtype_policy(policy)


@pytest.fixture(autouse=True)
def checked_shapes(request):
    """Shapes are checked at run time, but not within networks.

    A small network spends a third of its time on that, and the layers have
    tests of their own.
    """
    from jaxtyping import config

    networks = is_below(request.path, "applications/networks")
    config.update("jaxtyping_disable", networks)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def fuzz_counts():
    """Counts the outcomes of random calls, by the kind and name of the callee.

    At the end of the session they go to the folder that FUZZ_RESULTS names.
    """
    counts = collections.defaultdict(
        lambda: collections.defaultdict(collections.Counter)
    )
    yield counts
    folder = os.environ.get("FUZZ_RESULTS")
    if folder:
        import keras

        from keras_equiattn.applications.training import reporting

        each = [count for kind in counts.values() for count in kind.values()]
        total = sum(each, collections.Counter())
        content = {
            "benchmark": "make fuzz",
            "cases": total["worked"] + total["refused"],
            "total": total,
            **counts,
            "hardware": reporting.hardware(),
            "versions": reporting.versions(),
        }
        date = datetime.date.today().isoformat()
        name = f"fuzz-{keras.backend.backend()}-{date}.json"
        text = json.dumps(content, indent=2)
        (pathlib.Path(folder) / name).write_text(f"{text}\n")


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/golden anew from the layers as they are",
    )


# Tests of what Keras builds from layers: PyTorch runs them all, the others in
# their sweeps, except those that are marked `every_backend`.
BUILT_OF_LAYERS = (
    "applications/data",
    "applications/networks",
    "benchmarks",
    "convert",
    "deployment",
    "examples",
    "from_plain",
    "test_canonicalization",
    "test_equivariance_report",
    "test_symmetrization",
    "visualization",
)


def is_below(path, *folders):
    tests = pathlib.Path(__file__).parent
    return path.relative_to(tests).as_posix().startswith(folders)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests that take seconds to compile each shape go to the sweeps."""
    import keras

    for item in items:
        marked = {mark.name for mark in item.iter_markers()}
        slow = "slow" in marked
        late = is_below(item.path, *BUILT_OF_LAYERS) and not slow
        late = late or "torch_first" in marked
        if ("every_backend" in marked and not slow) or "once" in marked:
            late = False
        if late and keras.backend.backend() != "torch":
            item.add_marker("sweep")
        if item.get_closest_marker("sweep"):
            item.add_marker("slow")
            item.add_marker("every_backend")


def pytest_generate_tests(metafunc):
    """Runs the checks of a `LayerContract` on each of its cases."""
    import keras

    if "case" in metafunc.fixturenames and metafunc.cls is not None:
        first, *others = metafunc.cls.cases
        conduct = metafunc.definition.get_closest_marker("conduct")
        if conduct and keras.backend.backend() != "torch":
            others = []
        later = [
            pytest.param(case, marks=pytest.mark.torch_first) for case in others
        ]
        names = [case.name for case in (first, *others)]
        metafunc.parametrize("case", [first, *later], ids=names)
