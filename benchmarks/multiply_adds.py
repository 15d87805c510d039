"""Multiply-adds of networks for one image.

    KERAS_BACKEND=jax python benchmarks/multiply_adds.py

The counts are half of the operations that XLA counts in the forward pass,
before it optimises: any two operations are one multiply-add, as a
multiplication and an addition are. Operations that make the kernels of all
poses from the weights count as well, though they are the same for each batch.
Linear maps of vision transformers are computed in blocks. Layers take the form
that is exported, which has no loop: XLA would count a loop as one of its steps.
Nothing runs. Writes `benchmarks/results/multiply_adds-<date>.json`.
"""

import argparse

import jax
import keras
import report_files

from keras_equiattn import applications
from keras_equiattn.applications.training import reporting
from keras_equiattn.ops import backend

NETWORKS = (
    "rotmnist_z2cnn",
    "rotmnist_p4cnn",
    "rotmnist_p4cnn_input",
    "rotmnist_p4cnn_full",
    "rotmnist_p16cnn",
    "rotmnist_p16cnn_5x5",
    "allcnnc_z2",
    "allcnnc_p4",
    "allcnnc_p4_input",
    "resnet44_z2",
    "resnet44_p4m",
    "pcam_densenet_z2",
    "pcam_densenet_p4m",
    "resnet29_z2",
    "resnet29_p4",
    "resnet29_z2_asc",
    "resnet29_p4_asc",
    "gsanet_rotmnist_p4",
    "unet_z2",
    "unet_p4",
    "vit_cifar10_z2",
    "vit_cifar10_p4m",
    "acmix_resnet50",
)
# Number of images: some layers have another form for a single image.
BATCH = 16


def count(name: str) -> dict:
    """Millions of multiply-adds of a network, and its parameters."""
    options = {"basis": "irreps"} if name.startswith("vit") else {}
    model = applications.get_model(name, **options)
    variables = [
        [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in found]
        for found in (model.trainable_variables, model.non_trainable_variables)
    ]

    def forward(trainable, others, x):
        return model.stateless_call(trainable, others, x)[0]

    x = jax.ShapeDtypeStruct((BATCH, *model.input_shape[1:]), "float32")
    with backend.portable():
        lowered = jax.jit(forward).lower(*variables, x)
    if "stablehlo.while" in lowered.as_text():
        raise NotImplementedError(f"XLA would count a loop of {name} once.")
    operations = lowered.cost_analysis()["flops"]
    return {
        "millions": operations / 2 / BATCH / 1e6,
        "parameters": reporting.count_parameters(model),
        "input_shape": model.input_shape[1:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    options = parser.parse_args()
    if keras.backend.backend() != "jax":
        parser.error("this benchmark needs KERAS_BACKEND=jax")
    found = {}
    for name in options.networks:
        found[name] = count(name)
        print(name, found[name], flush=True)
    report_files.write(
        "multiply_adds",
        {
            "benchmark": "multiply_adds.py",
            "settings": {"networks": list(options.networks)},
            "networks": found,
        },
    )


if __name__ == "__main__":
    main()
