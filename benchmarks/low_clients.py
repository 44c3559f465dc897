"""How often `fedlens cost` names a client without wrong labels, and finds one with them, by simulation.

python -m benchmarks.low_clients                      # a few minutes
python -m benchmarks.low_clients --federations 100    # seconds

A model is right on each held-out image of a client with the client's probability, independently, or on groups of
images together, as of frames of a video. All four models are right on the same images, which is the worst case: models
that fail on different images have to agree by chance.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedlens.pages.low_clients import Answers, below_with_every_model

MODELS = ("federated", "iid", "centralized", "local-only")
CLASSES = 10
SHARES = (0.95, 0.7)  # of the images that a model has right
FEDERATIONS = {
    "3 clients of 60 images": (60,) * 3,
    "6 clients of 18 to 108 images": (18, 20, 38, 46, 58, 108),
    "20 clients of 10 images": (10,) * 20,
    "10 clients of 300 images": (300,) * 10,
    "100 clients of 100 images": (100,) * 100,
}
GROUP = 5  # images that are right or wrong together


def named_clients(
    federations: int,
    sizes: Sequence[int],
    share: float,
    spread: float = 0.0,
    wrong: float = 0.0,
    together: int = 1,
    seed: int = 0,
) -> list[set[int]]:
    """The clients that are named in each of so many federations.

    Args:
        sizes: the held-out images of each client.
        share: of the images that a model has right.
        spread: the standard deviation of this share over clients, whose images are of different difficulty.
        wrong: the share of wrong labels at the client in the middle; a model is right on none of these images.
        together: how many images of a client have the same class, and are right or wrong together.
    """
    rng = np.random.default_rng([seed, len(sizes), round(1000 * share), round(1000 * spread)])
    owner = np.repeat(np.arange(len(sizes)), sizes)
    # The first image of the group of each image.
    first = np.concatenate([np.arange(size) // together * together for size in sizes])
    first += np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)
    named = []
    for _ in range(federations):
        shares = np.clip(rng.normal(share, spread, len(sizes)), 0.0, 1.0)
        shares[len(sizes) // 2] *= 1 - wrong
        right = (rng.random(len(owner)) < shares[owner])[first].astype(np.float64)
        one = Answers.of(owner, rng.integers(0, CLASSES, len(owner))[first], right)
        answers = {model: replace(one, shared=model != "local-only") for model in MODELS}
        named.append(set(below_with_every_model(answers)))
    return named


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Simulate how often a client is named for its labels.")
    parser.add_argument(
        "--federations", type=int, default=1_000, help="simulated federations for each number"
    )
    federations: int = parser.parse_args().federations
    print(f"{federations:,} federations each\n")
    print("No wrong labels: federations in which a client is named")
    print("(at most 5 % where clients are equal and images independent)")
    for title, sizes in FEDERATIONS.items():
        for share in SHARES:
            for spread, together in ((0.0, 1), (0.05, 1), (0.1, 1), (0.0, GROUP)):
                found = named_clients(federations, sizes, share, spread, together=together)
                rate = sum(map(bool, found)) / federations
                how = (
                    f"deviation {100 * spread:g} points" if together == 1 else f"groups of {together} images"
                )
                print(f"  {title}, {share:.0%} right, {how}: {rate:.1%}")
    print("40 % wrong labels at one client: federations in which it is named, and in which another one is")
    for title, sizes in FEDERATIONS.items():
        for share in SHARES:
            found, middle = named_clients(federations, sizes, share, wrong=0.4), len(sizes) // 2
            hit, other = sum(middle in each for each in found), sum(bool(each - {middle}) for each in found)
            print(f"  {title}, {share:.0%} right: {hit / federations:.1%}, {other / federations:.1%}")


if __name__ == "__main__":
    main()
