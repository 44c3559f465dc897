"""Whether the page of a run may show test images, and how to get a page that does."""

from __future__ import annotations

from fedlens.data.catalogue import AUTO, is_published, keeps_images
from fedlens.results.run import Run, subtable

HOW = 'The command under "What this page contains" repeats the run with the images.'
LEAVES_OUT = "record.images = false leaves them out."


def shows_images(run: Run) -> bool:
    """Whether the settings of the run allow test images on its page."""
    return keeps_images(_setting(run), run.part("data", "dataset"))


def why_left_out(run: Run) -> str:
    """Why the page of a run has no test images."""
    return f'your own data, record.images = "{AUTO}"' if _setting(run) == AUTO else "record.images = false"


def may_get_images(run: Run) -> bool:
    """Whether the images are left out only because nobody asked for them."""
    return _setting(run) == AUTO and not is_published(run.part("data", "dataset"))


def _setting(run: Run) -> object:
    return subtable(run.config, "record").get("images", AUTO)
