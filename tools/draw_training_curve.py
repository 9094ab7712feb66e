#!/usr/bin/env python3
"""Draw the curve that a training run has recorded.

tools/draw_training_curve.py minivllm/assets/storyteller/training_info.json figures/storyteller-curve.png
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from minivllm.course.drawing import BLUE, FILE_DPI, INK, ORANGE


def draw_curve(log: list[dict]) -> Figure:
    """The log of `training_info.json`: losses in nats per token, the training loss averaged since the entry before."""
    steps = [entry["step"] for entry in log]
    fig, ax = plt.subplots(figsize=(6.4, 3.4))
    for key, name, color in (("val", "validation", BLUE), ("train", "training (with dropout)", ORANGE)):
        losses = [entry[key] for entry in log]
        ax.plot(steps, losses, "o-", color=color, ms=4, lw=2)
        ax.text(steps[1], losses[1] + (0.12 if key == "train" else -0.3), name, color=color)
    best = min(log, key=lambda entry: entry["val"])
    ax.annotate(
        f"{best['val']:.3f}", (best["step"], best["val"]), (0, 12), textcoords="offset points", ha="center", color=INK
    )
    ax.set(xlabel="step", ylabel="loss, nats per token", title="Training of the storyteller", ylim=(2.2, None))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    return fig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("info", type=Path, help="training_info.json of a run")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    options = parser.parse_args()
    figure = draw_curve(json.loads(options.info.read_text(encoding="utf-8"))["log"])
    figure.savefig(options.picture, dpi=FILE_DPI, metadata={"Software": None})


if __name__ == "__main__":
    main()
