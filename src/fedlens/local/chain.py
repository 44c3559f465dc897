"""Combines several client rules into one; each keeps its own fields and state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.core.protocol import Payload
from fedlens.core.schema import Field as SchemaField
from fedlens.core.tree import Tree, TreeSpec
from fedlens.local.rules import ClientRule, FinishHook, GradHook, LocalContext, LossHook, Tensors, Traits


def chain(*rules: ClientRule) -> ClientRule:
    """The rules as one. Hooks run in the order given; each rule keeps its own fields and its own state.

    Raises `ConfigError` if two of them are the same rule, or both weigh the examples, bring a solver, or correct the
    client's drift. Also if a solver is combined with hooks that it would skip, or `plain` with a rule that does
    something.

    >>> import torch
    >>> from fedlens.local.rules import proximal
    >>> both = chain(proximal(mu=1.0), ClientRule(grad=lambda g, w, context: [-g[0]]))
    >>> context = LocalContext(["w"], [torch.tensor([1.0])], {}, {}, 0.1, 1)
    >>> both.grad([torch.tensor([0.0])], [torch.tensor([1.5])], context)
    [tensor([-0.5000])]
    """
    if len(rules) == 1:
        return rules[0]
    # Nested chains are flattened, because every rule has to agree with every other.
    kept = [link for rule in rules if not rule.plain for link in (rule.links or (rule,))]
    if kept and any(rule.name == "plain" for rule in rules):
        raise ConfigError(
            f"the client rule 'plain' has no effect beside '{kept[0].name}'",
            where="client",
            hint="remove one of them",
        )
    if len(kept) < 2:
        return kept[0] if kept else rules[0] if rules else ClientRule()
    _agree(kept)
    both = reduce(_both, kept)
    object.__setattr__(both, "links", tuple(kept))
    return both


def _both(a: ClientRule, b: ClientRule) -> ClientRule:
    # The rule that weighs the examples comes first: the other may ask for gradients of weighted examples.
    server_rules = {**b.server_rules, **a.server_rules} if b.risk else {**a.server_rules, **b.server_rules}
    return ClientRule(
        name=f"{a.name}+{b.name}",
        start=_in_turn(a.start, b.start),
        risk=a.risk or b.risk,
        loss=partial(_loss, a.loss, b.loss) if a.loss and b.loss else a.loss or b.loss,
        references=partial(_references, a.references, b.references)
        if a.references and b.references
        else a.references or b.references,
        grad=partial(_grad, a.grad, b.grad) if a.grad and b.grad else a.grad or b.grad,
        solve=a.solve or b.solve,
        limit=a.limit or b.limit,
        finish=partial(_finish, a.finish, b.finish) if a.finish and b.finish else a.finish or b.finish,
        expect=partial(_expect, a.expect, b.expect) if a.expect and b.expect else a.expect or b.expect,
        fields={**a.fields, **b.fields},
        metrics={**a.metrics, **b.metrics},
        server_rules=server_rules,
        ops={**a.ops, **b.ops},
        traits=_traits(a.traits, b.traits),
        check=_in_turn(a.check, b.check),
        fits=_in_turn(a.fits, b.fits),
    )


def _traits(a: Traits, b: Traits) -> Traits:
    return Traits(
        stackable=a.stackable and b.stackable,
        anchored=a.anchored or b.anchored,
        proximal=a.proximal + b.proximal,
        replaces_update=a.replaces_update or b.replaces_update,
        corrects=a.corrects or b.corrects,
        all_weights=a.all_weights or b.all_weights,
        invariant=a.invariant or b.invariant,
        full_gradients=a.full_gradients or b.full_gradients,
        features=a.features or b.features,
        reweighs=a.reweighs or b.reweighs,
        releases=a.releases or b.releases,
        hides_loss=a.hides_loss or b.hides_loss,
        discloses=(*a.discloses, *b.discloses),
    )


def _in_turn(a: Any, b: Any) -> Any:
    return partial(_call, (a, b)) if a and b else a or b


def _call(hooks: tuple[Callable[..., None], ...], *given: Any) -> None:
    for hook in hooks:
        hook(*given)


def _loss(
    a: LossHook, b: LossHook, loss: Tensor, outputs: Tensor, targets: Tensor, context: LocalContext
) -> Tensor:
    return b(a(loss, outputs, targets, context), outputs, targets, context)


def _references(a: Any, b: Any, context: LocalContext) -> Mapping[str, Tree]:
    return {**a(context), **b(context)}


def _grad(
    a: GradHook, b: GradHook, gradients: Tensors, parameters: Tensors, context: LocalContext
) -> Tensors:
    return b(a(gradients, parameters, context), parameters, context)


def _finish(
    a: FinishHook, b: FinishHook, parameters: Tensors, context: LocalContext
) -> tuple[Mapping[str, Any], Payload | None]:
    (more, state), (others, rest) = a(parameters, context), b(parameters, context)
    states = [s for s in (state, rest) if s is not None]
    return {**more, **others}, {k: v for s in states for k, v in s.items()} if states else None


def _expect(a: Any, b: Any, spec: TreeSpec) -> Mapping[str, SchemaField]:
    return {**a(spec), **b(spec)}


def _agree(rules: Sequence[ClientRule]) -> None:
    names = [rule.name for rule in rules if rule.name]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ConfigError(
            f"the client rule '{twice}' is set twice; the algorithm may already include it",
            where="client",
            hint="remove it from [client], and set it in [algorithm]",
        )
    weighing, solving = [r.name for r in rules if r.risk], [r.name for r in rules if r.solve]
    limiting = [r.name for r in rules if r.limit]
    for both, does in (
        (weighing, "weigh the examples"),
        (solving, "bring a local solver of their own"),
        (limiting, "limit the norm of an update"),
    ):
        if len(both) > 1:
            raise ConfigError(
                f"'{both[0]}' and '{both[1]}' both {does}", where="client", hint="take one of the two"
            )
    correcting = [rule.name for rule in rules if rule.traits.corrects]
    if len(correcting) > 1:
        raise ConfigError(
            f"'{correcting[0]}' and '{correcting[1]}' both correct a client's drift from its state, "
            "and each would take the other's correction for drift",
            where="client",
            hint="take one of the two",
        )
    solver = next((rule for rule in rules if rule.solve), None)
    if solver is not None:
        stepping = next((r for r in rules if r is not solver and (r.loss or r.grad)), None)
        if stepping is not None:
            raise ConfigError(
                f"'{stepping.name}' modifies the steps of local training, but '{solver.name}' takes none: "
                "it solves its subproblem directly",
                where="client",
                hint="remove one of them, or choose a solver with local steps",
            )
