"""Optimisers of recipes, most with coupled weight decay, and a step schedule.

Keras' own `weight_decay` is decoupled: it shrinks the variables separately from
the update, as AdamW does. The papers reproduced here decay as PyTorch's Adam
and SGD do: `decay * variable` is *added to the gradient* of every trainable
variable, gains and offsets of normalisation layers included, so that it also
passes through momentum and Adam's moments. Transformers are trained with AdamW,
which is `DecoupledAdam`.
"""

import fnmatch
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks

PACKAGE = "keras_equiattn"


class CoupledDecay:
    """Mixin that adds `decay * variable` to each gradient.

    Kernels may also learn as if they were multiplied by a factor where they
    are used: a kernel `w` with the factor `f` takes the steps of `f * v` when
    `v` is learnt. So the gradient is `f` times that of `w`, plus
    `decay * w / f`, and a step of `w` is `f` times the step of the rule.

    It hooks into `update_step`, which sees gradients that are unscaled,
    accumulated and clipped already: loss scaling, gradient accumulation and
    clipping therefore act on the loss' gradient alone, as in PyTorch.

    Args:
        decay: Factor, at least 0. Unlike `weight_decay` it is not multiplied
            by the learning rate before the optimiser's own rule is applied.
        kernel_factors: Factors by patterns, such as `{"conv7/kernel": 1.57}`.
            A pattern is one of `fnmatch`, for the end of a variable's path.
            Where several match, the last one counts; one that matches nothing
            is ignored. Gradients are clipped before they are multiplied.
        **kwargs: Arguments of the optimiser; `weight_decay` is refused.

    Raises:
        ValueError: If `decay` is negative or not finite, if a factor is not a
            finite number above 0, or if `weight_decay` is given.
    """

    def __init__(
        self,
        *args: Any,
        decay: float = 0.0,
        kernel_factors: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("weight_decay") is not None:
            raise ValueError(
                f"{type(self).__name__} takes `decay`, which is coupled; "
                "`weight_decay` is Keras' decoupled decay. Received: "
                f"weight_decay={kwargs['weight_decay']}"
            )
        decay = _checks.number(
            decay,
            "decay",
            "a finite number of at least 0",
            lambda value: value >= 0,
        )
        factors = checked_factors(kernel_factors or {})
        super().__init__(*args, **kwargs)
        self.decay = decay
        self.kernel_factors = factors

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any):  # type: ignore[no-untyped-def]
        """One update of `variable`, with its decay and its factor."""
        factor = self._factor_of(variable) if self.kernel_factors else 1.0
        gradient = ops.cast(gradient, variable.dtype)
        if factor != 1:
            gradient = ops.multiply(gradient, factor)
            learning_rate = ops.multiply(learning_rate, factor)
        if self.decay:
            gradient = ops.add(
                gradient,
                # The decay is a term of the gradient, not of the loss.
                ops.stop_gradient(ops.multiply(variable, self.decay / factor)),
            )
        return super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]

    def path_of(self, variable: Any) -> str:
        """The path of a variable that `update_step` gets."""
        # TensorFlow passes its own variables, which do not know their paths.
        index = self._get_variable_index(variable)  # type: ignore[attr-defined]
        return str(self._trainable_variables[index].path)  # type: ignore[attr-defined]

    def _factor_of(self, variable: Any) -> float:
        path, found = f"/{self.path_of(variable)}", 1.0
        for pattern, factor in self.kernel_factors.items():
            if fnmatch.fnmatchcase(path, f"*/{pattern}"):
                found = factor
        return found

    def get_config(self) -> dict[str, Any]:
        """Configuration, `decay` and `kernel_factors` included."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        return {
            **config,
            "decay": self.decay,
            "kernel_factors": dict(self.kernel_factors),
        }


def checked_factors(value: Any) -> dict[str, float]:
    """Patterns and their factors, from a mapping or from pairs.

    Raises:
        ValueError: If a pattern is not a string, or a factor is not a finite
            number above 0.
    """
    name, kind = "kernel_factors", "finite numbers above 0"
    try:
        factors = dict(value)
        if not all(isinstance(pattern, str) for pattern in factors):
            raise TypeError
        return {
            pattern: _checks.number(factor, name, kind, lambda n: n > 0)
            for pattern, factor in factors.items()
        }
    except (TypeError, ValueError):
        raise ValueError(
            f"`{name}` must be {kind} by patterns of paths. Received: {value!r}"
        ) from None


@keras.saving.register_keras_serializable(package=PACKAGE)
class CoupledAdam(CoupledDecay, keras.optimizers.Adam):
    """Adam with L2 decay in the gradient (`torch.optim.Adam`)."""


@keras.saving.register_keras_serializable(package=PACKAGE)
class CoupledSGD(CoupledDecay, keras.optimizers.SGD):
    """SGD with L2 decay in the gradient (`torch.optim.SGD`).

    Keras scales the gradient by the learning rate before it enters the
    momentum, PyTorch after: for some steps after a change of the rate the
    updates differ.
    """


@keras.saving.register_keras_serializable(package=PACKAGE)
class DecoupledAdam(keras.optimizers.AdamW):
    """AdamW with the weight decay of the code of Swin.

    It decays neither vectors and scalars (biases, gains, offsets, rates of
    paths) nor position biases, embeddings and class tokens.
    """

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the moments, and finds what is not decayed."""
        if not self.built:
            self.exclude_from_weight_decay(
                [v for v in variables if not _is_decayed(v)]
            )
        super().build(variables)


def _is_decayed(variable: Any) -> bool:
    name = variable.name.rpartition("/")[2]
    spared = ("beta", "bias", "embedding", "gamma", "token")
    return len(variable.shape) > 1 and not name.endswith(spared)


@keras.saving.register_keras_serializable(package=PACKAGE)
class StepSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Learning rate times `factor` from each milestone on, after a warm-up.

    Args:
        learning_rate: Rate after the warm-up and before the first milestone.
        milestones: Increasing numbers of steps after which the rate is lower.
        factor: The factor by which the rate is multiplied at each milestone.
        warmup_steps: Steps over which the rate rises linearly; step `s`
            of them takes `(s + 1) / warmup_steps` of the rate.
    """

    def __init__(
        self,
        learning_rate: float,
        milestones: Sequence[int] = (),
        factor: float = 0.1,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__()
        if list(milestones) != sorted(set(milestones)):
            raise ValueError(
                "`milestones` must increase. Received: "
                f"milestones={tuple(milestones)}"
            )
        self.learning_rate = float(learning_rate)
        self.milestones = tuple(int(step) for step in milestones)
        self.factor = float(factor)
        self.warmup_steps = int(warmup_steps)

    def __call__(self, step: Any) -> Any:
        """Learning rate of the update after `step` updates."""
        step = ops.cast(step, "float32")
        rate = ops.convert_to_tensor(self.learning_rate, "float32")
        for milestone in self.milestones:
            rate = ops.where(step >= milestone, rate * self.factor, rate)
        if self.warmup_steps:
            rate = rate * ops.minimum((step + 1.0) / self.warmup_steps, 1.0)
        return rate

    def get_config(self) -> dict[str, Any]:
        """Arguments of the constructor."""
        return {
            "learning_rate": self.learning_rate,
            "milestones": list(self.milestones),
            "factor": self.factor,
            "warmup_steps": self.warmup_steps,
        }
