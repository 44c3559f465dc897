"""An aggregate that reads a field of the replies: a client that moved far from the global model counts less."""

import torch

from fedlens.aggregates import ByWeights
from fedlens.rules import ClientRule, TensorField


def sends_gap() -> ClientRule:
    """The reply has one more field, the squared distance between the client's model and the global one."""
    expect = {"gap": TensorField((), torch.float32)}
    return ClientRule(name="gap", finish=gap, expect=lambda spec: expect, fields={"gap": "mean"})


def gap(parameters, context):
    """The field, and no change of the client's state."""
    pairs = zip(context.anchor, parameters, strict=True)
    return {"gap": sum((before - after).square().sum() for before, after in pairs)}, None


class FieldWeighted(ByWeights):
    """The mean with the weights n_k / (1 + gap_k)."""

    def weights(self, rows):
        """They add up to 1."""
        weights = rows.weight / (1 + torch.stack(rows.trees("gap")).double().cpu())
        return weights / weights.sum()
