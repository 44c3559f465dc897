"""The test accuracy of two tables of counts on Shakespeare, beside which the LSTM of `shakespeare/roles` stands.

`python character_baselines.py FOLDER` reads `FOLDER/shakespeare`. Both tables are counted on the last characters of the
training windows and their targets: the most frequent next character, and the most frequent one after each character.
"""

import sys
from pathlib import Path

import numpy as np

from fedlens.parts import DATASETS


def baselines(root: Path) -> dict[str, float]:
    """The test accuracy of each table."""
    data = DATASETS.find("shakespeare")(root, False, 0)
    counts = np.zeros((len(data.classes), len(data.classes)), np.int64)
    np.add.at(counts, (data.train.inputs[:, -1], data.train.targets), 1)
    last, following = data.test.inputs[:, -1], data.test.targets
    return {
        "most frequent character": float((following == counts.sum(0).argmax()).mean()),
        "bigram table": float((following == counts.argmax(1)[last]).mean()),
    }


if __name__ == "__main__":
    for name, accuracy in baselines(Path(sys.argv[1])).items():
        print(f"{name}: {accuracy:.4f}")
