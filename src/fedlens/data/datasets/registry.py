"""Datasets by name: `factory(root, download, seed, *, <settings>)`. The facts are in `data/catalogue.toml`."""

from __future__ import annotations

from fedlens.base.registry import Entry, Registry

_HERE = "fedlens.data.datasets"
_OWN = "fedlens.data.formats"

DATASETS = Registry(
    "dataset",
    {
        "sites": Entry(
            f"{_HERE}.sites:sites", "images at the sites of a federation; only their form is here"
        ),
        # Classification
        "digits": Entry(
            f"{_HERE}.digits:digits",
            "1,797 handwritten digits, 8x8 grey, 10 classes; comes with scikit-learn",
        ),
        "mnist": Entry(f"{_HERE}.mnist:mnist", "70,000 handwritten digits, 28x28 grey, 10 classes"),
        "fashion-mnist": Entry(f"{_HERE}.mnist:fashion_mnist", "70,000 clothes, 28x28 grey, 10 classes"),
        "emnist": Entry(
            f"{_HERE}.emnist:emnist", "handwritten letters and digits, 28x28 grey, in six splits"
        ),
        "femnist": Entry(
            f"{_HERE}.femnist:femnist", "handwritten characters by writer, 28x28 grey, 62 classes (LEAF)"
        ),
        "omniglot": Entry(f"{_HERE}.omniglot:omniglot", "handwritten characters of many alphabets by drawer"),
        "cifar10": Entry(f"{_HERE}.cifar:cifar10", "60,000 small photographs, 32x32 colour, 10 classes"),
        "cifar100": Entry(f"{_HERE}.cifar:cifar100", "60,000 small photographs, 32x32 colour, 100 classes"),
        "tiny-imagenet": Entry(
            f"{_HERE}.tiny_imagenet:tiny_imagenet", "110,000 photographs, 64x64 colour, 200 classes"
        ),
        "imagenet": Entry(
            f"{_HERE}.imagenet:imagenet", "ILSVRC 2012: 1.3 million photographs, 1,000 classes"
        ),
        "places365": Entry(f"{_HERE}.places365:places365", "1.8 million photographs of 365 kinds of places"),
        "inaturalist-2017": Entry(
            f"{_HERE}.inaturalist:inaturalist_2017", "species, with the place and the user of each photograph"
        ),
        "inaturalist-user-120k": Entry(
            f"{_HERE}.inaturalist:inaturalist_user_120k", "1,203 species by user (Hsu et al. 2020)"
        ),
        **{
            f"inaturalist-geo-{n}": Entry(
                f"{_HERE}.inaturalist:inaturalist_geo_{n}",
                f"1,203 species by S2 cell of at most {n.replace('k', ',000')} photographs (Hsu et al. 2020)",
            )
            for n in ("100", "300", "1k", "3k", "10k", "30k")
        },
        "landmarks-user-160k": Entry(
            f"{_HERE}.landmarks:landmarks_user_160k", "2,028 landmarks by photographer (Hsu et al. 2020)"
        ),
        "gld23k": Entry(f"{_HERE}.landmarks:gld23k", "203 landmarks by photographer (FedCV)"),
        "synthetic": Entry(f"{_HERE}.synthetic:synthetic", "generated images of any shape, for tests"),
        "fractals": Entry(
            f"{_HERE}.fractals:fractals", "images of fractals, drawn while training, to pre-train on"
        ),
        # Segmentation and detection
        "pascal-voc": Entry(
            f"{_HERE}.pascal_voc:pascal_voc", "VOC 2012: masks (optionally with SBD) or boxes, 20 objects"
        ),
        "cityscapes": Entry(f"{_HERE}.cityscapes:cityscapes", "masks of street scenes by city, 19 classes"),
        "camvid": Entry(f"{_HERE}.camvid:camvid", "masks of road scenes by drive, 11 classes"),
        "coco": Entry(f"{_HERE}.coco:coco", "COCO 2017: boxes of 80 kinds of objects"),
        "bccd": Entry(f"{_HERE}.bccd:bccd", "boxes of blood cells, 3 classes"),
        # Language
        "shakespeare": Entry(
            f"{_HERE}.shakespeare:shakespeare", "next character of Shakespeare's plays, by role (LEAF)"
        ),
        "sent140": Entry(f"{_HERE}.sent140:sent140", "sentiment of tweets, by user (LEAF)"),
        "penn-treebank": Entry(f"{_HERE}.penn_treebank:penn_treebank", "next character of news text"),
        # A user's own
        "image-folder": Entry(
            f"{_OWN}.image_folder:image_folder", "your own images, in folders or listed in a table"
        ),
        "parquet": Entry(
            f"{_OWN}.parquet:parquet", "your own images, or those of the Hugging Face hub, in Parquet files"
        ),
        "party-files": Entry(
            "fedlens.data.vertical.party_files:party_files",
            "your own images of several parties, a table each (data.parties.files)",
        ),
        "mask-folder": Entry(f"{_OWN}.mask_folder:mask_folder", "your own images, each with a mask"),
        "coco-json": Entry(f"{_OWN}.coco_json:coco_json", "your own images, with boxes in a COCO file"),
        "voc-xml": Entry(f"{_OWN}.voc_xml:voc_xml", "your own images, with boxes in Pascal VOC files"),
        "yolo-txt": Entry(f"{_OWN}.yolo_txt:yolo_txt", "your own images, with boxes in YOLO files"),
    },
)
"""The datasets by name; `DATASETS.find(name)(root, download, seed)` reads one."""
