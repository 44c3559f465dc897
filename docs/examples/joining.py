"""Draws who gains by joining, from the answer of `fedlens cost`: `python joining.py runs/demo joining.svg`.

For each client two dots: the accuracy of a model of its own, and that of the federated model, on the images that the
client holds out. Needs matplotlib: `pip install 'fedlens[plot]'`.
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

GAIN, LOSS, ALONE = "#1f77b4", "#d62728", "#9aa3ad"


def joining(directory: Path) -> Figure:
    """The picture of a comparison in `directory`: the clients by the accuracy of a model of their own."""
    answer = json.loads((directory / "cost.json").read_text())
    clients = [client for client in answer["clients"] if client["vs_local_only"]]
    clients.sort(key=lambda client: (client["local-only"], client["federated"]))
    gains = [client["vs_local_only"]["mean"] for client in clients]
    alone = [client["local-only"] for client in clients]
    joined = [client["federated"] for client in clients]
    colors = [GAIN if gain > 0 else LOSS if gain < 0 else ALONE for gain in gains]
    places = range(len(clients))

    picture = Figure((6.4, 3.0), layout="constrained")
    axes = picture.subplots()
    axes.vlines(places, alone, joined, colors=colors, linewidth=2)
    axes.scatter(places, alone, s=26, color=ALONE, zorder=3, label="a model of its own")
    axes.scatter(places, joined, s=26, color=colors, zorder=4)
    axes.scatter([], [], s=26, color=GAIN, label="the federated model")
    axes.set_xticks(places, [str(client["client"]) for client in clients])
    axes.set_xlabel("client")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e3e6ea", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", frameon=False)
    gaining = sum(gain > 0 for gain in gains)
    title = f"Accuracy on each client's held-out images: {gaining} of {len(clients)} gain by joining"
    axes.set_title(title, loc="left", fontsize=9)
    return picture


if __name__ == "__main__":
    joining(Path(sys.argv[1])).savefig(sys.argv[2], dpi=200)
