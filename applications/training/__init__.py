"""Training: the parts of `examples/train.py`.

A `recipe.Recipe` states a protocol, and `recipes` has one for each registered
network. `options` combines a recipe with what a user asks for, and `run` does
the steps of a training run, on the devices of `distribution`. `optimizers`,
`losses` and `callbacks` have what Keras lacks, and `reporting` reports the
results. Networks and datasets are used here only by name: no layer, model or
file format is defined here.
"""

from keras_equiattn._files import write_json
from keras_equiattn.applications.training.distribution import Distribution
from keras_equiattn.applications.training.distribution import ProcessLostError
from keras_equiattn.applications.training.distribution import start
from keras_equiattn.applications.training.options import check_out
from keras_equiattn.applications.training.options import claimed_out
from keras_equiattn.applications.training.options import completed_epochs
from keras_equiattn.applications.training.options import evaluation_steps
from keras_equiattn.applications.training.options import folder_of_process
from keras_equiattn.applications.training.options import is_complete
from keras_equiattn.applications.training.options import open_out
from keras_equiattn.applications.training.options import OptionsError
from keras_equiattn.applications.training.options import resolve
from keras_equiattn.applications.training.options import TrainOptions
from keras_equiattn.applications.training.run import accuracy_of_poses
from keras_equiattn.applications.training.run import build_model
from keras_equiattn.applications.training.run import compile_model
from keras_equiattn.applications.training.run import Data
from keras_equiattn.applications.training.run import equivariance
from keras_equiattn.applications.training.run import evaluate_test
from keras_equiattn.applications.training.run import load_data
from keras_equiattn.applications.training.run import Summary
from keras_equiattn.applications.training.run import validation_metrics

__all__ = [
    "Data",
    "Distribution",
    "OptionsError",
    "ProcessLostError",
    "Summary",
    "TrainOptions",
    "accuracy_of_poses",
    "build_model",
    "check_out",
    "claimed_out",
    "compile_model",
    "completed_epochs",
    "equivariance",
    "evaluate_test",
    "evaluation_steps",
    "folder_of_process",
    "is_complete",
    "load_data",
    "open_out",
    "resolve",
    "start",
    "validation_metrics",
    "write_json",
]
