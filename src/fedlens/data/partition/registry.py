"""Partitions by name. A factory is called as `factory(table, seed, *, <settings>)`; see `fedlens.data.table`."""

from __future__ import annotations

from fedlens.core.registry import Entry, Registry

_HERE = "fedlens.data.partition"

PARTITIONS = Registry(
    "partition",
    {
        "iid": Entry(f"{_HERE}.iid:iid", "every client a random share of all examples"),
        "quantity": Entry(
            f"{_HERE}.quantity:quantity", "sizes differ, and every client has the same classes (hsu2020 5.3)"
        ),
        "shards": Entry(
            f"{_HERE}.shards:shards", "every client a few shards, each of one class (McMahan; ghaemi2022)"
        ),
        "dirichlet": Entry(
            f"{_HERE}.dirichlet:dirichlet",
            "every client a class distribution of its own from Dir(alpha p) (hsu2019, hsu2020)",
        ),
        "dirichlet-classwise": Entry(
            f"{_HERE}.dirichlet_classwise:dirichlet_classwise",
            "every class is cut over the clients by Dir(alpha); sizes differ (chen2022, fedcv's LDA)",
        ),
        "pachinko": Entry(
            f"{_HERE}.pachinko:pachinko", "groups of classes, then classes, both drawn by client (fedcv)"
        ),
        "lda-multilabel": Entry(
            f"{_HERE}.lda_multilabel:lda_multilabel",
            "images that show several classes, cut class by class by Dir(alpha) (fedcv)",
        ),
        "detection-frequency": Entry(
            f"{_HERE}.detection_frequency:detection_frequency",
            "images dealt out by the most frequent object first (fedcv)",
        ),
        "natural": Entry(f"{_HERE}.natural:natural", "by user, writer, city or any other column (hsu2020)"),
        "s2": Entry(f"{_HERE}.s2:s2", "by place: S2 cells, split until none holds too many (hsu2020 4.1)"),
        "feature": Entry(
            f"{_HERE}.feature:feature",
            "the same classes everywhere; brightness, blur, rotation and noise differ",
        ),
        "mix": Entry(f"{_HERE}.mix:mix", "any of these inside any other"),
        "federated-csv": Entry(
            "fedlens.data.datasets.federated_csv:federated_csv",
            "a published list of user_id, image_id, class (hsu2020)",
        ),
        "file": Entry(f"{_HERE}.from_file:from_file", "a saved partition"),
    },
)
