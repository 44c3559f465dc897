"""The drawings of docs/beyond-averaging.md: `python -m tools.protocol_figures` draws them anew.

The page includes them as they are, so that their colours follow its scheme. Opened alone, they are dark on light.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
WIDTH, HEAD, ROW, LINE, EDGE = 760, 56, 46, 17, 116  # pixels

STYLE = """
.protocol { max-width: 100%; min-width: 600px; height: auto; }
.protocol text { fill: var(--md-default-fg-color, #1b2733); font: 13px system-ui, sans-serif; text-anchor: middle; }
.protocol .who { font-weight: 600; }
.protocol .small { fill: var(--md-default-fg-color--light, #5d6975); font-size: 12px; }
.protocol .lane, .protocol .again { fill: none; stroke: var(--md-default-fg-color--lighter, #c3c9cf); }
.protocol .lane { stroke-dasharray: 2 4; }
.protocol .again { stroke-dasharray: 6 4; rx: 8px; }
.protocol .work, .protocol .head { fill: var(--md-code-bg-color, #f3f5f7); rx: 6px; }
.protocol .head, .protocol .learns { stroke: var(--md-default-fg-color--lighter, #c3c9cf); rx: 6px; }
.protocol .learns { fill: none; }
.protocol .model { stroke: #009485; fill: #009485; }
.protocol .data { stroke: #d97706; fill: #d97706; }
.protocol .when { stroke: var(--md-default-bg-color, #ffffff); stroke-width: 6px; paint-order: stroke;
  text-anchor: end; }
"""


@dataclass(frozen=True)
class Work:
    """What one participant computes."""

    lane: int
    text: str


@dataclass(frozen=True)
class Send:
    """A message. `data` marks one from which images or labels can be read, or that has labels."""

    source: int
    target: int
    text: str
    data: bool = False


@dataclass(frozen=True)
class Again:
    """A frame around rows, from the first to the last, that are repeated."""

    first: int
    last: int
    text: str


@dataclass(frozen=True)
class Protocol:
    """Who sends what to whom, from top to bottom; what stands in one row happens side by side.

    Attributes:
        name: of the file.
        about: a description for readers who cannot see the drawing.
        lanes: the participants.
        rows: what they do.
        again: what is repeated.
        learns: for each participant what it learns beside its own, line by line.
    """

    name: str
    about: str
    lanes: tuple[str, ...]
    rows: tuple[tuple[Work | Send, ...], ...]
    again: tuple[Again, ...]
    learns: tuple[tuple[str, ...], ...]


def _both(text: str, back: bool = False, data: bool = False) -> tuple[Send, ...]:
    """A message between the two clients at the sides and the server in the middle, at the same time."""
    return tuple(Send(1, side, text, data) if back else Send(side, 1, text, data) for side in (0, 2))


def _each(text: str, *lanes: int) -> tuple[Work, ...]:
    return tuple(Work(lane, text) for lane in lanes)


PROTOCOLS = (
    Protocol(
        "protocol-peers",
        "Three peers in a row train, send their models to their neighbours, and take weighted sums.",
        ("peer A", "peer B, a neighbour of both", "peer C"),
        (
            _each("trains its own model", 0, 1, 2),
            (Send(0, 1, "1. model of A"), Send(2, 1, "1. model of C")),
            (Send(1, 0, "1. model of B"), Send(1, 2, "1. model of B")),
            (
                Work(0, "2/3 of A, 1/3 of B"),
                Work(1, "1/3 of A, of B and of C"),
                Work(2, "1/3 of B, 2/3 of C"),
            ),
        ),
        (Again(0, 3, "each round"),),
        (
            ("the model of B",),
            ("the models of A and of C",),
            ("the model of B",),
        ),
    ),
    Protocol(
        "protocol-split-relay",
        "Client A trains with the server, batch by batch, and hands the first layers on to client B.",
        ("client A", "server", "client B"),
        (
            (Work(0, "first layers, forward"),),
            (Send(0, 1, "1. activations, labels", True),),
            (Work(1, "other layers: a step"),),
            (Send(1, 0, "2. gradient of the activations"),),
            (Work(0, "first layers: a step"),),
            (Send(0, 2, "3. first layers with their optimizer, from client to client"),),
            (Work(2, "the same with its own batches"),),
            (Send(2, 1, "4. the last client: first layers"),),
            (Work(1, "tests the whole model"),),
            (Send(1, 0, "5. next round: first layers"),),
        ),
        (Again(0, 4, "each batch of A"),),
        (
            ("the first layers as the", "client before it left them"),
            ("labels; images as far as", "activations show them; the", "whole model once a round"),
            ("the first layers as A has", "just trained them"),
        ),
    ),
    Protocol(
        "protocol-splitfed",
        "Two clients train first layers side by side, each with the server; both halves are averaged.",
        ("client A", "server", "client B"),
        (
            _both("1. first layers", back=True),
            _each("first layers, forward", 0, 2),
            _both("2. activations, labels", data=True),
            (Work(1, "v1: a step of each client's half"),),
            (Work(1, "v2: a step a client of one half"),),
            _both("3. gradient of the activations", back=True),
            _each("first layers: a step", 0, 2),
            _both("4. first layers"),
            (Work(1, "averages them; v1: its halves, too"),),
        ),
        (Again(1, 6, "each batch"),),
        (
            ("the averaged first layers",),
            ("labels; images as far as", "activations show them; first", "layers of each client"),
            ("the averaged first layers",),
        ),
    ),
    Protocol(
        "protocol-two-cuts",
        "The client has the first and the last layers, the server those between; labels stay at the client.",
        ("client", "server"),
        (
            (Work(0, "first layers, forward"),),
            (Send(0, 1, "1. activations", True),),
            (Work(1, "middle layers, forward"),),
            (Send(1, 0, "2. features"),),
            (Work(0, "last layers, loss with its labels: a step"),),
            (Send(0, 1, "3. gradient of the features", True),),
            (Work(1, "middle layers: a step"),),
            (Send(1, 0, "4. gradient of the activations"),),
            (Work(0, "first layers: a step"),),
        ),
        (Again(0, 8, "each batch"),),
        (
            ("features of its own images",),
            ("images as far as activations show them;", "of labels what the gradients tell"),
        ),
    ),
    Protocol(
        "protocol-fedgkt",
        "Clients send features, logits and labels of all images; the server sends its own logits back.",
        ("client A", "server", "client B"),
        (
            _each("trains a small network", 0, 2),
            _both("1. features, logits, labels", data=True),
            (Work(1, "trains a large network on all"),),
            _both("2. its logits of these images", back=True),
            _each("teacher of the next round", 0, 2),
        ),
        (Again(0, 4, "each round"),),
        (
            ("what the server says of", "A's images"),
            ("labels; images as far as", "features show them"),
            ("what the server says of", "B's images"),
        ),
    ),
    Protocol(
        "protocol-fedma",
        "Clients send one layer at a time; the server matches its units, averages them, and sends the layer back.",
        ("client A", "server", "client B"),
        (
            _both("1. its units of the network", back=True),
            _each("trains its unfrozen layers", 0, 2),
            _both("2. the first of them"),
            (Work(1, "matches units, averages, grows"),),
            _both("3. the layer, and their places", back=True),
            _each("freezes it, fits the next one", 0, 2),
            _each("trains the last layer", 0, 2),
            _both("4. last layer, class counts", data=True),
            (Work(1, "averages class by class"),),
        ),
        (Again(1, 5, "each hidden layer"),),
        (
            ("the layers of the common", "network, as they are made"),
            ("each layer of each client;", "how many examples of each", "class it has"),
            ("the layers of the common", "network, as they are made"),
        ),
    ),
    Protocol(
        "protocol-vertical",
        "Two parties without labels send embeddings of a batch to the label party and get gradients back.",
        ("party A", "party with the labels", "party C"),
        (
            _both("1. own ids, masked by A and by C", data=True),
            _both("2. its ids, masked", back=True, data=True),
            _both("3. its ids, masked twice", data=True),
            _both("4. which ids all have", back=True, data=True),
            _each("own bottom, forward", 0, 1, 2),
            _both("5. embeddings", data=True),
            (Work(1, "top and its bottom: a step"),),
            _both("6. gradient of the embeddings", back=True),
            _each("own bottom: a step", 0, 2),
        ),
        (Again(0, 3, "once"), Again(4, 8, "each batch")),
        (
            ("which of its ids all have;", "of labels what gradients", "tell"),
            ("which of its ids each party", "has; features as far as", "embeddings show them"),
            ("which of its ids all have;", "of labels what gradients", "tell"),
        ),
    ),
)


def drawing(protocol: Protocol) -> str:
    """The drawing as SVG."""
    lanes = len(protocol.lanes)
    edge = EDGE if lanes > 2 else 170
    places = [round(edge + k * (WIDTH - 2 * edge) / (lanes - 1)) for k in range(lanes)]
    bottom = HEAD + ROW * len(protocol.rows) + 8
    height = bottom + 30 + LINE * max(map(len, protocol.learns)) + 12
    parts = [f'<line class="lane" x1="{x}" y1="36" x2="{x}" y2="{bottom}"/>' for x in places]
    for again in protocol.again:
        top, tall = HEAD + ROW * again.first - 4, ROW * (again.last - again.first + 1)
        parts.append(f'<rect class="again" x="2" y="{top}" width="{WIDTH - 4}" height="{tall}"/>')
        parts.append(
            f'<text class="small when" x="{WIDTH - 20}" y="{top + tall + 4}">{escape(again.text)}</text>'
        )
    for x, name in zip(places, protocol.lanes, strict=True):
        parts += _box("head", x, 20, [name], "who")
    for number, row in enumerate(protocol.rows):
        y = HEAD + ROW * number + ROW // 2 - 4
        for item in row:
            if isinstance(item, Work):
                parts += _box("work", places[item.lane], y, [item.text])
            else:
                parts += _arrow(item, places, y)
    for x, lines in zip(places, protocol.learns, strict=True):
        parts += _box("learns", x, bottom + 8 + (30 + LINE * (len(lines) - 1)) / 2, ["learns", *lines])
    inside = "\n".join(parts)
    return (
        f'<svg class="protocol" xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{escape(protocol.about)}">\n<style>{STYLE}</style>\n{inside}\n</svg>\n'
    )


def _box(kind: str, x: float, y: float, lines: Sequence[str], text: str = "") -> list[str]:
    """A box around lines of text, with its middle at x and y."""
    wide = max(110, round(max(map(len, lines)) * 6.9) + 22)
    tall = LINE * len(lines) + 11
    top = y - tall / 2
    words = [
        f'<text class="{"small" if kind == "learns" and not k else text}" x="{x}" y="{top + 17 + LINE * k:g}">'
        f"{escape(line)}</text>"
        for k, line in enumerate(lines)
    ]
    return [
        f'<rect class="{kind}" x="{x - wide / 2:g}" y="{top:g}" width="{wide}" height="{tall}"/>',
        *words,
    ]


def _arrow(send: Send, places: Sequence[int], y: float) -> list[str]:
    start, end = places[send.source], places[send.target]
    on = 1 if end > start else -1
    kind, y = "data" if send.data else "model", y + 10
    return [
        f'<line class="{kind}" x1="{start}" y1="{y:g}" x2="{end - 8 * on}" y2="{y:g}" stroke-width="1.75"/>',
        f'<path class="{kind}" d="M{end} {y:g} l{-9 * on} -4.5 v9z"/>',
        f'<circle class="{kind}" cx="{start}" cy="{y:g}" r="2.5"/>',
        f'<text x="{(start + end) / 2:g}" y="{y - 7:g}">{escape(send.text)}</text>',
    ]


def main() -> None:
    """Writes the drawings."""
    for protocol in PROTOCOLS:
        (FOLDER / f"{protocol.name}.svg").write_text(drawing(protocol), encoding="utf-8")


if __name__ == "__main__":
    main()
