"""Copies the scans of one hospital of make_scans.py to a folder of its own, as a site of a federation has them.

python make_scans.py scans
python make_site.py scans Bonn ward-a/scans
"""

import csv
import shutil
import sys
from pathlib import Path


def main(scans: Path, hospital: str, folder: Path) -> None:
    """Copies images, and their lines of the table without the hospital."""
    (folder / "images").mkdir(parents=True)
    with (
        (scans / "scans.csv").open(newline="", encoding="utf-8") as source,
        (folder / "scans.csv").open("w", newline="", encoding="utf-8") as target,
    ):
        table = csv.writer(target)
        table.writerow(["path", "label"])
        for row in csv.DictReader(source):
            if row["hospital"] == hospital:
                shutil.copy(scans / row["path"], folder / row["path"])
                table.writerow([row["path"], row["label"]])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
