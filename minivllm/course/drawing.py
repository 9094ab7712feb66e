"""How every figure of the course looks, and how it reaches the page with a text for those who cannot see it."""

import io
import os
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import Image
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette: eight colours that stay apart for colour-blind readers (https://jfly.uni-koeln.de/color/).
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PINK = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, PALE, INK = "#9A9A9A", "#EFEFEF", "#222222"
PALETTE = [BLUE, ORANGE, GREEN, RED, SKY, PINK, YELLOW, GREY]

SCREEN_DPI = 96  # one inch of a figure is 96 px on the page …
FILE_DPI = 160  # … and 160 px in the file, so that it stays sharp on a dense screen

plt.rcParams.update(
    {
        "font.size": 11,
        "axes.titlesize": 12,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": plt.cycler(color=PALETTE),
        "figure.facecolor": "white",
        "figure.constrained_layout.use": True,
        "legend.frameon": False,
        "svg.hashsalt": "minivllm",
    }
)


def show(figure: Figure, name: str, *, alt: str) -> Image:
    """Put a figure on the page, with its text for screen readers.

    The last line of a cell: `show(fig, "03-reservations", alt="Three bars …")`. `name` is the file name that the
    figure gets under `figures/` when the notebooks are executed by `make notebooks`; `alt` says what is seen.
    Raises ValueError for an alt text too short to say anything.
    """
    if len(alt) < 20:
        raise ValueError(f"the alt text of figure {name!r} says too little: {alt!r}; describe what is seen")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=FILE_DPI, metadata={"Software": None})
    plt.close(figure)  # else the inline backend draws it a second time, with no alt text
    if folder := os.environ.get("MINIVLLM_FIGURES"):
        (Path(folder) / f"{name}.png").write_bytes(png.getvalue())
    return Image(data=png.getvalue(), width=int(figure.get_figwidth() * SCREEN_DPI), alt=alt)


def blank_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of width × height inches with one unit per inch, y downwards and no frame: a sheet to draw boxes on."""
    fig, ax = plt.subplots(figsize=(width, height), layout="none")
    ax.set_position((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.axis("off")
    return fig, ax


def box(
    ax: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str = "",
    *,
    face: str = PALE,
    edge: str = INK,
    color: str = INK,
    size: float = 10,
    bold: bool = False,
    line: float = 1.0,
    style: str = "-",
) -> None:
    """A box with its upper left corner at (x, y) and a text in the middle."""
    ax.add_patch(plt.Rectangle((x, y), width, height, facecolor=face, edgecolor=edge, linewidth=line, linestyle=style))
    weight = "bold" if bold else "normal"
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=color, fontsize=size, weight=weight)


def arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], *, color: str = INK, style: str = "-|>"
) -> None:
    """A straight arrow from start to end, in the axes' units."""
    ax.annotate(
        "",
        xy=end,
        xytext=start,
        arrowprops={"arrowstyle": style, "color": color, "lw": 1.2, "shrinkA": 0, "shrinkB": 0},
    )
