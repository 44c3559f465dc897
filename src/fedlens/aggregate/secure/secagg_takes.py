"""What a client may be asked by the operations of SecAgg, with a bound on every field."""

from __future__ import annotations

import torch

from fedlens.aggregate.secure.keys import KEY_BYTES, SURVIVORS, Member
from fedlens.aggregate.secure.secagg_client import ATTEMPT, OWN, SEALED_BYTES
from fedlens.aggregate.secure.secagg_server import AGREE, KEYS, MASKED, SHARES, SIGNATURE_BYTES, UNMASK
from fedlens.core.schema import AskedField, NumberField, Schema, TensorField
from fedlens.core.wire.asked_fields import GroupField, ListField, SizedField

_MOST = 2**31  # rounds, and attempts at one
_RUN = 128  # characters of the identity of a run


def secagg_takes(
    op: str, training: Schema, cohort: int, clients: int, rounds: int | None, signed: bool
) -> Schema | None:
    """The schema of an ask, without the log that the client's site adds; None for another operation.

    Args:
        op: its name.
        training: what plain local training takes.
        cohort, clients: the clients of a round, and all of them.
        rounds: of the run; None if that is not known.
        signed: whether clients sign the list of survivors before they open a sum.
    """
    some = ListField(NumberField(above=-1, most=clients - 1, whole=True), most=cohort, least=SURVIVORS)
    hashed = SizedField(bytes, KEY_BYTES, KEY_BYTES)
    fields: dict[str, AskedField] = {
        "run": SizedField(str, _RUN, 1),
        "round": NumberField(above=0, most=rounds or _MOST, whole=True),
        "number": NumberField(above=0, most=_MOST, whole=True),
        "nonce": SizedField(bytes, 16, 16),
        "cohort": some,
        **dict.fromkeys(("model", "shared"), hashed),
    }
    asked: dict[str, AskedField] = {"attempt": GroupField(fields)}
    signatures = ListField(SizedField(bytes, SIGNATURE_BYTES), most=cohort, least=SURVIVORS)
    if op == SHARES:
        size = SizedField(bytes, cohort * Member.BYTES, SURVIVORS * Member.BYTES)
        asked |= {"members": some, "keys": size, "signatures": signatures}
    if op == UNMASK and signed:
        asked |= {"signers": some, "signatures": signatures}
    if op in (MASKED, AGREE, UNMASK):
        asked["clients"] = some
    sealed = TensorField((-1,), torch.uint8, most=cohort * SEALED_BYTES)
    more = {**(training.fields or {}), OWN: sealed} if op == MASKED else {}
    schema = Schema({**more, ATTEMPT: GroupField(asked)}, optional=training.optional, log=True)
    return schema if op in (KEYS, SHARES, MASKED, UNMASK, *([AGREE] if signed else [])) else None
