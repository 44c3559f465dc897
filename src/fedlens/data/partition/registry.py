"""Partitions by name. A factory is called as `factory(table, seed, *, <settings>)`; see `fedlens.data.table`."""

from __future__ import annotations

from fedlens.base.registry import Entry, Registry

_HERE = "fedlens.data.partition"

PARTITIONS = Registry(
    "partition",
    {
        "iid": Entry(f"{_HERE}.iid:iid", "each client gets a random share of all examples"),
        "quantity": Entry(
            f"{_HERE}.quantity:quantity",
            "clients of different sizes with the same class distribution (Hsu et al. 2020, section 5.3)",
        ),
        "shards": Entry(
            f"{_HERE}.shards:shards",
            "each client gets a few shards, each of one class (McMahan et al. 2017, Ghaemi 2022)",
        ),
        "dirichlet": Entry(
            f"{_HERE}.dirichlet:dirichlet",
            "each client gets a class distribution from Dir(alpha p) (Hsu et al. 2019 and 2020)",
        ),
        "dirichlet-classwise": Entry(
            f"{_HERE}.dirichlet_classwise:dirichlet_classwise",
            "each class is divided among the clients by Dir(alpha); sizes differ (Chen et al. 2022; LDA of FedCV)",
        ),
        "pachinko": Entry(
            f"{_HERE}.pachinko:pachinko",
            "Pachinko allocation: coarse classes, then classes, drawn per client (FedCV)",
        ),
        "lda-multilabel": Entry(
            f"{_HERE}.lda_multilabel:lda_multilabel",
            "for images with several classes: each class divided by Dir(alpha) (FedCV)",
        ),
        "detection-frequency": Entry(
            f"{_HERE}.detection_frequency:detection_frequency",
            "for detection: images assigned by their objects, most frequent class first (FedCV)",
        ),
        "natural": Entry(
            f"{_HERE}.natural:natural", "by user, writer, city or any other column (Hsu et al. 2020)"
        ),
        "s2": Entry(
            f"{_HERE}.s2:s2",
            "by place: S2 cells, split until none holds too many (Hsu et al. 2020, section 4.1)",
        ),
        "feature": Entry(
            f"{_HERE}.feature:feature",
            "the same classes everywhere; brightness, blur, rotation and noise differ",
        ),
        "mix": Entry(f"{_HERE}.mix:mix", "one partition inside another"),
        "federated-csv": Entry(
            "fedlens.data.datasets.federated_csv:federated_csv",
            "a published list of user_id, image_id, class (Hsu et al. 2020)",
        ),
        "file": Entry(f"{_HERE}.from_file:from_file", "a saved partition"),
    },
)
