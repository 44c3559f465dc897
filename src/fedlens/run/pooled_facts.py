"""What a run takes from the data of all clients together, beside the messages of its rounds."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from fedlens.base.errors import RunDirectoryError
from fedlens.engines.traits import traits_of
from fedlens.run.build import Built
from fedlens.run.rundir import RunDir

CHOSEN = "chosen_from_data"  # in environment.json: the settings that the reader chose at the start


def chosen_at_start(directory: RunDir, built: Built) -> Collection[str]:
    """The settings that the reader chose from the data when the run began: a resumed run finds them in config.toml."""
    with suppress(RunDirectoryError):  # a damaged file costs no summary
        kept = (directory.read_environment() or {}).get(CHOSEN)
        if isinstance(kept, list):
            return kept
    return sorted(built.client_data.dataset.chosen)


def pooled_facts(built: Built, chosen: Collection[str]) -> list[str]:
    """Sentences on what the server knows of the clients' data without an ask, for the run's report.

    `chosen` is the result of `chosen_at_start`.
    """
    config, data, federation = built.config, built.client_data.dataset, built.federation
    each = "of each class " if built.partition.census is not None else ""
    held_out = ", and how many it holds out" if federation.held_out is not None else ""
    facts = [f"How many training examples {each}each client holds{held_out}."]
    if data.classes:
        facts.append("The names of the classes, those of all clients together.")
    if federation.parties is not None:
        facts.append(
            "Which test and validation examples all parties have: their ids are compared in the open."
        )
    if (
        config.data.normalize == "standard" and data.moments_of and not data.parties
    ):  # these have moments of their own
        facts.append(
            f"The mean and the standard deviation of each channel, of {data.moments_of:,} training images of all "
            'clients together (data.normalize = "standard"). "unit", "half" and "imagenet" need no image of a client.'
        )
    if "size" in chosen:
        facts.append("The size of the images, chosen from the sizes of all images (data.dataset.size).")
    if traits_of(config.engine).place == "cluster":
        facts.append("The training examples themselves: Ray sends them, or their paths, to every node.")
    return facts
