"""A partition of one's own: a client for each class."""

from fedlens.parts import Partition, Table


def one_kind_each(table: Table, seed: int, *, most: int = 1000) -> Partition:
    """Client k holds the examples of class k, `most` of them at most; nothing is drawn, so `seed` plays no part."""
    clients = [f"only {name}" for name in table.classes]
    owners = table.labels.copy()  # the number of each example's client
    for client in range(len(clients)):
        owners[(owners == client).nonzero()[0][most:]] = -1  # nobody's
    return Partition.of_owners(owners, clients=clients, spec={"name": "one-kind-each", "most": most})
