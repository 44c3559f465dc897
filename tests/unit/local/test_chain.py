"""Rules in a chain: every hook runs, in turn, and what does not go together is refused."""

from dataclasses import fields, replace

import pytest
import torch

from fedlens.base.errors import ConfigError
from fedlens.core.schema import NumberField
from fedlens.local.chain import chain
from fedlens.local.rules import ClientRule, LocalContext, ServerRule, Solved, Traits, plain, proximal

VISIT = LocalContext(["w"], [torch.tensor([1.0])], {}, {}, 0.1, 1)


def rule(name: str, factor: float) -> ClientRule:
    return ClientRule(
        name=name,
        start=lambda context: context.saved.update({name: factor}),
        loss=lambda loss, outputs, targets, context: loss * factor + 1,
        grad=lambda gradients, parameters, context: [g * factor + 1 for g in gradients],
        finish=lambda parameters, context: ({name: factor}, {f"{name}-state": factor}),
        expect=lambda spec: {name: NumberField()},
        fields={name: "sum"},
        server_rules={name: ServerRule()},
        traits=Traits(discloses=(name,)),
    )


def test_hooks_run_in_the_order_given_and_fields_and_states_stand_side_by_side() -> None:
    both = chain(rule("a", 2.0), rule("b", 5.0))
    zero = torch.tensor(0.0)
    VISIT.saved.clear()
    both.start(VISIT)
    assert VISIT.saved == {"a": 2.0, "b": 5.0}
    assert both.loss(torch.tensor(3.0), zero, zero, VISIT).item() == (3 * 2 + 1) * 5 + 1
    assert both.grad([torch.tensor(3.0)], [zero], VISIT)[0].item() == (3 * 2 + 1) * 5 + 1
    assert both.finish([], VISIT) == ({"a": 2.0, "b": 5.0}, {"a-state": 2.0, "b-state": 5.0})
    assert set(both.expect({})) == {"a", "b"} == set(both.fields) == set(both.server_rules)
    assert both.traits.discloses == ("a", "b")
    assert both.name == "a+b"


@pytest.mark.parametrize("trait", [each.name for each in fields(Traits)])
def test_a_chain_keeps_every_trait_of_both_rules(trait: str) -> None:
    other = {"stackable": False, "proximal": 0.5, "discloses": ("labels",)}.get(trait, True)
    for at in (0, 1):
        traits = [Traits(stackable=True), Traits(stackable=True)]
        traits[at] = replace(traits[at], **{trait: other})
        both = chain(
            *(replace(rule(name, 1.0), traits=each) for name, each in zip("ab", traits, strict=True))
        )
        assert getattr(both.traits, trait) == other


def test_one_rule_or_none_stays_what_it_is() -> None:
    one = proximal(mu=1.0)
    assert chain(one) is one
    assert chain(ClientRule(), one, ClientRule()) is one
    assert chain() == ClientRule()
    assert chain(one, rule("a", 1.0)).traits.proximal == 1.0


def test_a_rule_without_a_state_does_not_make_one() -> None:
    stateless = ClientRule(name="c", finish=lambda parameters, context: ({"c": 1.0}, None))
    assert chain(stateless, ClientRule(name="d", finish=lambda p, v: ({}, None))).finish([], VISIT)[1] is None
    assert chain(stateless, rule("a", 1.0)).finish([], VISIT)[1] == {"a-state": 1.0}


def test_what_does_not_go_together_is_refused() -> None:
    solver = ClientRule(name="exact", solve=lambda context: Solved([], 0.0, 0, 0))
    weigh = [ClientRule(name=n, risk=lambda outputs, targets, context: outputs) for n in "xy"]
    with pytest.raises(ConfigError, match="'proximal' is set twice"):
        chain(proximal(mu=1.0), proximal(mu=2.0))
    with pytest.raises(ConfigError, match="'x' and 'y' both weigh"):
        chain(*weigh)
    with pytest.raises(ConfigError, match="'proximal' modifies the steps"):
        chain(proximal(mu=1.0), solver)
    assert chain(weigh[0], solver).solve is solver.solve
    memories = [ClientRule(name=n, grad=lambda g, w, context: g, traits=Traits(corrects=True)) for n in "uv"]
    with pytest.raises(ConfigError, match="'u' and 'v' both correct a client's drift"):
        chain(*memories)


def test_a_chain_in_a_chain_hides_none_of_its_rules() -> None:
    inner = chain(proximal(mu=1.0), rule("a", 2.0))
    with pytest.raises(ConfigError, match="'a' is set twice"):
        chain(rule("a", 1.0), inner)
    assert [link.name for link in chain(inner, rule("b", 1.0)).links] == ["proximal", "a", "b"]
    weigh = [ClientRule(name=n, risk=lambda outputs, targets, context: outputs) for n in "xy"]
    with pytest.raises(ConfigError, match="'x' and 'y' both weigh"):
        chain(weigh[0], chain(inner, weigh[1]))


def test_what_is_altered_in_a_chain_stays_altered_when_it_is_chained_again() -> None:
    altered = replace(
        chain(proximal(mu=1.0), rule("a", 2.0)), loss=lambda loss, outputs, targets, context: 2 * loss
    )
    assert altered.links == ()
    again = chain(altered, rule("b", 1.0))
    assert [link.name for link in again.links] == ["proximal+a", "b"]
    assert again.loss(torch.tensor(1.5), None, None, None) == 2 * 1.5 + 1


def test_plain_alone_is_plain_and_beside_a_rule_it_is_refused() -> None:
    assert chain(plain()).name == "plain"
    assert chain(ClientRule(), plain()).plain
    with pytest.raises(ConfigError, match="'plain' has no effect beside 'proximal'"):
        chain(proximal(mu=1.0), plain())
