"""A picture of where a network stops being equivariant."""

from typing import Any

import numpy as np

from keras_equiattn.report import EquivarianceReport
from keras_equiattn.visualization import drawing

# The colours of layers that are equivariant, and of those that are not.
COLORS = ("tab:green", "tab:red")
# Errors of exactly zero, and infinite ones, are drawn at the ends.
ENDS = (1e-9, 10.0)


def plot_equivariance_report(
    report: EquivarianceReport, size: tuple[float, float] | None = None
) -> Any:
    """Draws the error of every layer, the first layer at the top.

    Args:
        report: the result of `equivariance_report`.
        size: the size of the figure, in inches; None leaves room for all names.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: without matplotlib.

    Example:
        >>> import keras
        >>> from keras_equiattn import equivariance_report
        >>> from keras_equiattn.visualization import plot_equivariance_report
        >>> model = keras.Sequential([
        ...     keras.Input((8, 8, 1)),
        ...     keras.layers.Conv2D(4, 3),
        ...     keras.layers.Flatten(),
        ... ])
        >>> report = equivariance_report(model, "p4", (2, 8, 8, 1))
        >>> figure = plot_equivariance_report(report)
        >>> len(figure.axes[0].patches)
        2
    """
    figure_class, _ = drawing.matplotlib_parts()
    size = size or (7.0, 1.0 + 0.25 * len(report.layers))
    figure = figure_class(figsize=size, layout="constrained")
    panel = figure.subplots()
    errors = np.clip([layer.error for layer in report.layers], *ENDS)
    places = np.arange(len(errors))
    colors = [COLORS[int(error > report.tolerance)] for error in errors]
    panel.barh(places, errors, color=colors)
    panel.axvline(report.tolerance, color="black", linestyle=":")
    panel.set_yticks(places, [layer.name for layer in report.layers])
    panel.invert_yaxis()
    panel.set_xscale("log")
    panel.set(xlim=ENDS, xlabel="relative error of the output of the layer")
    if report.culprit is None:
        panel.set_title(f"equivariant under {report.group}")
    else:
        panel.set_title(f"not equivariant under {report.group}")
        for label, layer in zip(
            panel.get_yticklabels(), report.layers, strict=True
        ):
            if layer.name == report.culprit:
                label.set_weight("bold")
    return figure
