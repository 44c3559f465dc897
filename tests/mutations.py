"""Breaks the source in one place at a time and sees the tests fail: each identity, and what results rest on.

    python -m tests.mutations              # all of them, some ten minutes on two cores
    python -m tests.mutations scaffold     # those whose file has this in its name

Ends with 1 where the tests of some place pass although it is broken. `tests/unit/house/test_mutations.py` holds the
list to the source.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]


class Mutation(NamedTuple):
    """One place to break: a file below src/fedlens, text that occurs there once, its replacement, tests that see it."""

    file: str
    text: str
    broken: str
    tests: str  # paths below tests/, with spaces between them


MUTATIONS = [
    # -- the commands of a federation and of a site --
    Mutation(
        "identity/fingerprint.py",
        "len(each) >= 4 and word.startswith(each)",
        "word.startswith(each)",
        "unit/cli/test_federation.py",
    ),
    Mutation(
        "cli/federation.py",
        "if not same_words(given, federation.words(record)):",
        "if not given:",
        "unit/cli/test_federation.py",
    ),
    Mutation("cli/federation.py", "        _hide_output()\n", "", "unit/cli/test_federation.py"),
    Mutation(
        "cli/federation_root.py",
        'if first and values["above"] > 0:',
        "if False:",
        "unit/cli/test_federation.py",
    ),
    Mutation(
        "cli/passphrases.py", "if new and _typed(", "if not new and _typed(", "unit/cli/test_federation.py"
    ),
    Mutation(
        "cli/passphrases.py",
        "return read_private(file)",
        "return file.read_bytes()",
        "unit/cli/test_federation.py",
    ),
    Mutation(
        "cli/site_review.py",
        "len(approve) < 12 or not proposed.contract.digest.startswith(approve.lower())",
        "not proposed.contract.digest.startswith(approve[:11].lower())",
        "unit/cli/test_site_experiments.py",
    ),
    Mutation("site/join.py", ", anonymous=True)", ")", "unit/cli/test_federation.py"),
    Mutation(
        "site/proposed_experiment.py",
        'or message.details.get("contract") != digest',
        "",
        "unit/cli/test_site_experiments.py",
    ),
    Mutation(
        "site/data_check.py",
        'Path(scratch), "check"',
        'path.parents[1], "check"',
        "unit/cli/test_site_experiments.py",
    ),
    Mutation(
        "site/network_check.py",
        "    context.verify_flags |= _NO_CHECK_TIME\n",
        "",
        "unit/site/test_network_check.py",
    ),
    Mutation(
        "site/network_check.py", "            keys.see_server(peer)\n", "", "unit/site/test_network_check.py"
    ),
    Mutation(
        "site/network_check.py",
        "abs(now - ahead) > _MOST_CLOCK",
        "now - ahead > _MOST_CLOCK",
        "unit/site/test_network_check.py",
    ),
    Mutation("site/network_check.py", "or proxy_bypass(host)", "", "unit/site/test_network_check.py"),
    Mutation(
        "observers/last_evaluation.py",
        "examples = built.federation.held.get(_TEST)",
        "examples = built.federation.held[_TEST]",
        "seam/test_sites.py",
    ),
    Mutation("identity/site_heads.py", "count < asked.lines", "False", "unit/server/test_census_link.py"),
    Mutation(
        "identity/site_heads.py",
        "since == record.since else None",
        "True else None",
        "unit/server/test_census_link.py",
    ),
    Mutation(
        "site/agent.py", "self._log.check_seen(ask.", "(lambda _: None)(ask.", "unit/site/test_agent.py"
    ),
    # -- what a site answers --
    Mutation(
        "site/answers_log.py", "if answered != ask.digest:", "if False:", "unit/site/test_answers_log.py"
    ),
    Mutation(
        "site/answers_log.py",
        "if fields.attempt < run.attempt:",
        "if False:",
        "unit/site/test_answers_log.py",
    ),
    Mutation(
        "site/answers_log.py",
        "run.asks.setdefault((",
        "run.asks.__setitem__((",
        "unit/site/test_answers_log.py",
    ),
    Mutation(
        "files/chained_log.py",
        "if head != _chained(last, _text(values)) or line",
        "if line",
        "unit/site/test_answers_log.py",
    ),
    Mutation(
        "files/chained_log.py",
        "if sync:\n                    os.fsync(self._file)",
        "if False:\n                    pass",
        "unit/site/test_answers_log.py",
    ),
    Mutation(
        "site/kept_states.py",
        "if state.live or state.named is not None or handle in keep:",
        "if True:",
        "unit/site/test_kept_states.py",
    ),
    Mutation(
        "site/kept_states.py",
        "if known.based and attempt == known.attempt:",
        "if False:",
        "unit/site/test_kept_states.py",
    ),
    Mutation(
        "site/kept_states.py",
        ".hexdigest() != state.digest:",
        '.hexdigest() == "":',
        "unit/site/test_kept_states.py",
    ),
    Mutation(
        "site/answering.py",
        "if (takes := opened.takes(fields.operation)) is None:",
        "if (takes := opened.takes(fields.operation) or Schema()) is None:",
        "unit/site/test_agent.py",
    ),
    Mutation(
        "site/answering.py", "replace(takes, log=False).fault(asked)", "None", "unit/site/test_agent.py"
    ),
    Mutation(
        "site/answering.py",
        "for sentence in opened.refused(",
        "for sentence in () and opened.refused(",
        "unit/site/test_policy.py",
    ),
    Mutation("site/policy.py", "work.persons < least", "work.persons < 0", "unit/site/test_policy.py"),
    Mutation("site/answering.py", 'asked.get("work")', 'payload.get("work")', "unit/site/test_policy.py"),
    Mutation("site/workplace.py", "        refuse(contract, settings)\n", "", "unit/site/test_policy.py"),
    Mutation(
        "site/policy.py",
        'config.aggregate["name"] != _SECURE',
        'config.aggregate["name"] == "mean"',
        "unit/site/test_policy.py",
    ),
    Mutation(
        "site/answering.py",
        "if sizes[fields.operation == EVALUATE_OWN] < self._min_examples:",
        "if False:",
        "unit/site/test_agent.py",
    ),
    Mutation(
        "site/answering.py", "if 0 < behind < self._min_examples:", "if False:", "unit/site/test_agent.py"
    ),
    Mutation("site/answering.py", "or weight.most != self.largest:", "or True:", "unit/site/test_agent.py"),
    Mutation(
        "site/agent.py",
        "if not self._approved(experiment, proposed):",
        "if False:",
        "unit/site/test_agent.py",
    ),
    Mutation(
        "site/agent.py",
        "held.enter_context(one_writer(self._folder, wait=False))",
        "pass",
        "unit/site/test_agent.py",
    ),
    # -- what a site computes --
    Mutation(
        "base/registry.py",
        "if (approved := _approved.get()) is not None:",
        "if (approved := {}) is None:",
        "unit/site/test_contract.py",
    ),
    Mutation(
        "base/registry.py",
        'return callable(value) and import_name(value).startswith(f"{module.__name__}:")',
        "return callable(value)",
        "unit/site/test_contract.py",
    ),
    Mutation(
        "site/contract.py",
        "if known is not None and name not in known:",
        "if False:",
        "unit/site/test_contract.py",
    ),
    Mutation(
        "site/contract.py", "if weights or _PLACE.search(value):", "if weights:", "unit/site/test_contract.py"
    ),
    Mutation(
        "site/contract.py",
        "weights = key == _WEIGHTS and value not in (IMAGENET, NONE)",
        "weights = False",
        "unit/site/test_contract.py",
    ),
    Mutation(
        "site/contract.py",
        "if name not in registry and not (",
        "if False and not (",
        "unit/site/test_contract.py",
    ),
    Mutation("site/settings.py", "if found != self.files[name]:", "if False:", "unit/site/test_contract.py"),
    Mutation(
        "site/settings.py",
        'if key != "data.cache" and not key.startswith("keep.")',
        'if key.startswith("allow.")',
        "unit/site/test_approvals.py",
    ),
    Mutation(
        "site/approvals.py", ", rules=self.settings.bound()), now)", "), now)", "unit/site/test_approvals.py"
    ),
    Mutation(
        "site/local_data.py",
        "gone = self._gone | _excluded(self",
        "gone = _excluded(self",
        "unit/site/test_local_data.py",
    ),
    Mutation(
        "site/local_data.py",
        "total += block.sum(axis=(0, 2, 3), dtype=np.int64)",
        "total = block.sum(axis=(0, 2, 3), dtype=np.int64)",
        "unit/site/test_local_data.py",
    ),
    Mutation("site/workplace.py", "secrets=secrets_of)", "secrets=None)", "unit/site/test_local_data.py"),
    Mutation(
        "site/workplace.py",
        "if local.contract.sums_moments:",
        "if True:",
        "unit/site/test_local_data.py",
    ),
    Mutation("data/sites.py", "return found[found >= 0]", "return found", "unit/site/test_local_data.py"),
    Mutation("data/sites.py", "if client not in self.here:", "if False:", "unit/site/test_local_data.py"),
    # -- the identities of a federation of sites --
    Mutation("identity/authority.py", "context.num_tickets = 0", "pass", "unit/identity/test_tls.py"),
    Mutation("identity/tls.py", "sslobject_class = _CheckedObject", "pass", "unit/identity/test_tls.py"),
    Mutation("identity/site_keys.py", "if peer.issuer < newest:", "if False:", "unit/identity/test_tls.py"),
    Mutation(
        "identity/federation_folder.py",
        'if invitation["key"] not in (None, key):',
        "if False:",
        "unit/identity/test_enrolment.py",
    ),
    Mutation(
        "identity/federation_folder.py",
        "if peer.certificate not in issued or peer.identity.hex() != record.identity:",
        "if False:",
        "unit/identity/test_tls.py",
    ),
    Mutation("identity/keys.py", "and s <= _ORDER // 2", "and True", "unit/identity/test_signing.py"),
    # -- the server of real sites --
    Mutation(
        "server/census_link.py",
        "if name in counted}",
        "}",
        "unit/server/test_census_link.py",
    ),
    Mutation(
        "server/census_link.py",
        "(fields.run, fields.attempt) != run or fields.ask not in site.told:",
        "False:",
        "unit/server/test_census_link.py",
    ),
    Mutation(
        "server/census_link.py",
        "if self.roster is not None and record.name not in self.roster.sites:",
        "if False:",
        "unit/server/test_census_link.py",
    ),
    Mutation("server/census_link.py", "and record.drop)", ")", "unit/server/test_census_link.py"),
    Mutation(
        "server/census_link.py",
        "if census.contract != self._record.digest:",
        "if False:",
        "unit/server/test_serve.py",
    ),
    Mutation(
        "server/serve_record.py",
        "and not _finished(run):",
        ":",
        "unit/server/test_serve_record.py",
    ),
    Mutation("server/serve_record.py", "sweep(run.path)", "pass", "unit/server/test_serve.py"),
    Mutation(
        "run/run_description.py",
        "return _DATA in (directory.read_environment() or {})",
        "return True",
        "unit/server/test_serve.py",
    ),
    Mutation(
        "server/serve.py",
        "roster.save(self.directory.roster_path)",
        "pass",
        "unit/server/test_serve.py",
    ),
    Mutation("server/watch.py", "free < 2 * sites.largest", "False", "unit/server/test_watch.py"),
    # -- the link of real sites --
    Mutation(
        "core/wire/message.py",
        "check_signature(identity, signed, signature)",
        "pass",
        "unit/core/wire/test_message.py",
    ),
    Mutation(
        "core/wire/message.py",
        "if fields.signer != fingerprint_of(identity):",
        "if False:",
        "unit/core/wire/test_message.py",
    ),
    Mutation(
        "core/wire/message.py",
        "if _sha256(text) != fields.report:",
        "if False:",
        "unit/core/wire/test_message.py",
    ),
    Mutation(
        "engines/links/https.py",
        "if outgoing.accepted:  # it counts once",
        "if False:",
        "faults/network/test_link.py",
    ),
    Mutation("engines/links/https.py", "if length > most:", "if False:", "faults/network/test_link.py"),
    Mutation(
        "engines/links/uploads.py",
        "if (field := message.fault_as_answer_to(ask)) is not None:",
        "if False:",
        "faults/network/test_link.py",
    ),
    Mutation(
        "engines/links/uploads.py",
        "check_body(message, digest.digest(), self.received - start)",
        "pass",
        "faults/network/test_link.py",
    ),
    Mutation(
        "engines/links/connections.py",
        "connection.limit(self.limits.header)",
        "pass",
        "faults/network/test_link.py",
    ),
    # -- a run over sites, repeated --
    Mutation("engines/executor.py", "if item.id in self.failures:", "if False:", "seam/test_replay.py"),
    Mutation("engines/replayed.py", "return next(self._available)", "return None", "seam/test_replay.py"),
    Mutation(
        "engines/replayed.py",
        "return self._quorum.fault(replied, failed)",
        "return None",
        "seam/test_replay.py",
    ),
    Mutation("analyses/replay.py", "if held == model:", "if True:", "seam/test_replay.py"),
    # -- what sites are asked, and who of them decides --
    Mutation(
        "engines/network.py",
        "arrived.message.fault_as_answer_to(one.message) is None",
        "True",
        "unit/engines/test_network.py",
    ),
    Mutation(
        "engines/network.py",
        "self._executor.checked(item, outcome, one.expect), one.expect",
        "self._executor.checked(item, outcome, Schema()), one.expect",
        "unit/engines/test_network.py",
    ),
    Mutation(
        "engines/network.py",
        "out.close(LOST, {one.site for one in out.requests.values()} - here)",
        "pass",
        "unit/engines/test_network.py",
    ),
    Mutation(
        "engines/network.py",
        "while len(here := self._here()) < self.waits.min_sites:",
        "while not (here := self._here()):",
        "unit/engines/test_network.py",
    ),
    Mutation("engines/network.py", "self._quorum.begin()", "pass", "unit/engines/test_network.py"),
    Mutation(
        "data/partition/quorum.py",
        "if failed and len(sites) < self.min_sites:",
        "if False:",
        "unit/engines/test_network.py",
    ),
    Mutation(
        "data/partition/quorum.py",
        "if weight > (self.max_share + 1e-9) * weights.total():",
        "if False:",
        "unit/engines/test_network.py",
    ),
    Mutation(
        "run/runner.py",
        "tally.available = self.built.engine.online()",
        "tally.available = None",
        "seam/test_sites.py",
    ),
    Mutation(
        "run/round_outcome.py",
        "(few := self._too_few(tally.replied, tally.failed))",
        "(few := None)",
        "seam/test_sites.py",
    ),
    Mutation(
        "observers/last_evaluation.py",
        "not built.federation.at_sites",
        "True",
        "seam/test_sites.py",
    ),
    Mutation(
        "algorithms/averaging.py",
        "return self.aggregate.takes(op, training, parts.federation.clients, parts.rounds)",
        "return training",
        "contract/test_takes.py",
    ),
    Mutation("site/answering.py", "sealed=log is not None", "sealed=False", "unit/site/test_client_logs.py"),
    Mutation(
        "site/client_logs.py",
        'self._write(self._folder / _MODELS, _MODELS, client, {"models": models})',
        "pass",
        "unit/site/test_client_logs.py",
    ),
    Mutation(
        "aggregate/secure/secagg_takes.py", "most=rounds or _MOST", "most=2**60", "contract/test_takes.py"
    ),
    Mutation(
        "site/answering.py",
        "replace(takes, log=False).fault(",
        "takes.fault(",
        "unit/site/test_client_logs.py",
    ),
    Mutation(
        "engines/network.py",
        "if ask.logged:",
        "if False:",
        "seam/test_secure_sums_over_tls.py",
    ),
    Mutation(
        "local/training.py",
        "NumberField(above=0, most=settings.lr)",
        "NumberField()",
        "contract/test_takes.py",
    ),
    Mutation(
        "algorithms/client_evaluation.py",
        'return Schema({"model": TreeField.like(model), **more})',
        "return Schema()",
        "contract/test_takes.py",
    ),
    Mutation(
        "engines/links/uploads.py",
        "with suppress(OSError):  # a full disk",
        "with suppress(KeyError):  # a full disk",
        "faults/network/test_transfers.py",
    ),
    Mutation(
        "site/connection.py",
        "if old is not None and not self._requests[old]:",
        "if old is not None:",
        "faults/network/test_renewals.py",
    ),
    Mutation(
        "server/serve_record.py",
        "attempt=self.attempt + 1",
        "attempt=self.attempt",
        "faults/network/test_killed_sites.py",
    ),
    Mutation(
        "site/local_data.py",
        "versions_here(),",
        '{**versions_here(), "names": str(self._ids[:2])},',
        "faults/network/test_canaries.py",
    ),
    Mutation(
        "site/workplace.py",
        "built.algorithm.sends_single_examples and least > 1",
        "False",
        "unit/site/test_workplace.py",
    ),
    Mutation("core/measured.py", "> most:", "> math.inf:", "unit/tasks/test_central_evaluation.py"),
    Mutation(
        "site/workplace.py",
        "built.task.measures_single_examples",
        "False",
        "unit/site/test_workplace.py",
    ),
    # -- models whose shapes change --
    Mutation(
        "core/modules.py",
        "kept.model is not model and kept.model != model",
        "False",
        "seam/test_grown_models.py",
    ),
    Mutation(
        "core/protocol.py",
        "origin=self.origin or self,",
        "origin=self,",
        "seam/test_grown_models.py",
    ),
    # -- peers: their models on the test data, and the graph on the page --
    Mutation(
        "algorithms/peer_evaluation.py",
        'spread(measured, task.errors, "peers"',
        'spread(measured, (), "peers"',
        "unit/algorithms/test_peer_evaluation.py",
    ),
    Mutation(
        "algorithms/peers.py",
        "EVALUATE_PEER: EvaluatePeer(evaluate)",
        "EVALUATE_PEER: evaluate",
        "unit/algorithms/test_peer_evaluation.py",
    ),
    Mutation(
        "algorithms/topology.py",
        "(j, i, float(weights[i, j]))",
        "(j, i, float(weights[j, i]))",
        "unit/algorithms/test_topology.py",
    ),
    Mutation(
        "pages/run_charts.py",
        "_WIDEST * weight / largest",
        "_WIDEST * weight",
        "unit/pages/test_run_charts.py",
    ),
    # -- models: what a replaced normalization keeps --
    Mutation(
        "models/norms.py", "return dict(layer.named_children())", "return {}", "unit/models/test_norms.py"
    ),
    Mutation(
        "models/norms.py",
        "class FrozenBatchNorm(FixedBuffers)",
        "class FrozenBatchNorm(nn.Module)",
        "unit/models/test_norms.py",
    ),
    # -- tasks without labels --
    Mutation(
        "tasks/simsiam.py",
        'outputs["z"].detach() if',
        'outputs["z"] if',
        "identity/test_self_supervised.py",
    ),
    Mutation("tasks/moco.py", "1 - self.momentum)", "self.momentum)", "identity/test_self_supervised.py"),
    Mutation(
        "tasks/moco.py", "second[group::groups]", "first[group::groups]", "identity/test_self_supervised.py"
    ),
    Mutation(
        "tasks/moco.py", "return frozenset(QUEUE)", "return frozenset()", "identity/test_self_supervised.py"
    ),
    # -- analyses --
    Mutation(
        "analyses/dynamics.py",
        "mean = math.fsum(values) / len(values)",
        "mean = math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)",
        "unit/analyses/test_dynamics.py",
    ),
    Mutation(
        "analyses/dynamics.py",
        "math.fsum(losses) / len(losses)",
        "math.fsum(w * v for w, v in zip(weights, losses, strict=True)) / math.fsum(weights)",
        "unit/analyses/test_dynamics.py",
    ),
    Mutation(
        "tasks/optimal_weights.py",
        "weights * (gradient - weights @ gradient)",
        "weights * gradient",
        "identity/test_optimal_weights.py",
    ),
    Mutation(
        "algorithms/averaging.py",
        "before[name] - tau * update",
        "before[name] - update",
        "unit/observers/test_record_models.py",
    ),
    Mutation(
        "observers/record_models.py",
        "reduce=replace(ask.reduce, keep=True)",
        "reduce=ask.reduce",
        "unit/observers/test_record_models.py",
    ),
    Mutation(
        "analyses/model_evaluation.py",
        "zip(totals, parts, strict=True)",
        "zip(totals, reversed(parts), strict=True)",
        "unit/analyses/test_model_evaluation.py",
    ),
    Mutation(
        "core/convex_combination.py",
        ".exponential_(generator=generator)",
        ".uniform_(generator=generator)",
        "identity/test_loss_surface.py",
    ),
    Mutation(
        "analyses/loss_surface.py",
        "- third * along",
        "+ third * along",
        "identity/test_loss_surface.py",
    ),
    Mutation(
        "analyses/line.py",
        "((1 - t) * values[0] + t * values[-1])",
        "(t * values[0] + (1 - t) * values[-1])",
        "identity/test_loss_surface.py",
    ),
    Mutation(
        "analyses/line.py",
        "layer.momentum = None",
        "layer.momentum = momenta[0]",
        "unit/analyses/test_line.py",
    ),
    Mutation(
        "analyses/client_drift.py",
        "shares.square() @ self.norms",
        "shares @ self.norms",
        "identity/test_update_drift.py",
    ),
    Mutation(
        "analyses/representation.py",
        "return values - values.mean(0)",
        "return values",
        "identity/test_representation.py",
    ),
    Mutation(
        "analyses/representation.py",
        "offsets.T @ offsets / count",
        "offsets.T @ offsets / len(x)",
        "identity/test_representation.py",
    ),
    Mutation(
        "analyses/calibration.py",
        "gaps.square().sum()",
        "gaps.abs().sum()",
        "unit/analyses/test_calibration.py",
    ),
    # -- fractals --
    Mutation(
        "data/fractals/code_sampling.py",
        "(5 + counts + stream",
        "(4 + counts + stream",
        "unit/data/fractals/test_codes.py",
    ),
    Mutation(
        "data/fractals/numba_renderer.py",
        "while pick >= bounds[j]",
        "while pick > bounds[j] + 2**20",
        "unit/data/fractals/test_rendering.py",
    ),
    # -- differential privacy --
    Mutation(
        "local/client_privacy.py", "clip = clip - self.rounding", "pass", "identity/test_private_sums.py"
    ),
    Mutation(
        "algorithms/private_averaging.py",
        'ranges={**ranges, "update": clip}',
        "ranges=ranges",
        "identity/test_private_sums.py",
    ),
    Mutation("privacy/accounting.py", "share if replaced else 1.0", "1.0", "unit/privacy/test_accounting.py"),
    Mutation(
        "privacy/accounting.py",
        "PoissonSampledDpEvent(kind.q, release) if kind.q < 1 else release",
        "release",
        "unit/privacy/test_accounting.py",
    ),
    Mutation(
        "observers/privacy_ledger.py",
        "if len(self._events) < self._known:",
        "if False:",
        "unit/observers/test_privacy_ledger.py",
    ),
    Mutation(
        "observers/privacy_ledger.py",
        'resumed = "keep"',
        'resumed = "cut"',
        "unit/observers/test_privacy_ledger.py",
    ),
    *(
        Mutation("local/client_privacy.py", text, broken, "identity/test_client_privacy.py")
        for text, broken in (
            ("(1 - _MARGIN) * clip / norms", "clip / norms"),
            ("share = update.replies / expected", "share = 1.0"),
            (
                "_normals(sizes, self.update_multiplier * clip",
                "_normals(sizes, self.settings.noise_multiplier * clip",
            ),
            ("- update.replies / 2", "- self.expected / 2"),
            ("(2 * self.count_noise) ** -2", "self.count_noise**-2"),
            ("value.double() * share", "value * share"),
            ("key if self.settings.seeded else ctx.entropy(KEY_BYTES)", "key"),
        )
    ),
    *(
        Mutation("privacy/tree.py", text, broken, "identity/test_dp_ftrl.py")
        for text, broken in (
            ('kept["round"] < round <', "round <"),
            ("(1 - weight)", "0"),
            ("node - before", "node"),
            ("2.0 ** -(level + 1)", "2.0 ** -level"),
        )
    ),
    Mutation("local/client_privacy.py", "if ctx.round < ctx.rounds else {}", "", "identity/test_dp_ftrl.py"),
    Mutation("privacy/accounting.py", '["leaf"].bit_length()', '["leaf"]', "unit/privacy/test_accounting.py"),
    *(
        Mutation("local/example_privacy.py", text, broken, "identity/test_example_privacy.py")
        for text, broken in (
            ("if not self.settings.seeded:", "if False:"),
            ("deviation = self.settings.z * self.settings.first_clip", "deviation = self.settings.z"),
            ('release["cohort"], stream)', "max(1, len(batch[0])), stream)"),
            ("leaf[0] += more", "leaf[0] += 0 * more"),
            ("first.argsort().argsort()[units]", "units"),
            ('(stream.uniform(count) < release["q"])[ordered]', 'stream.uniform(n) < release["q"]'),
            ("own += (factors @ leaf)", "own += leaf.sum(0)"),
            ("not finite.all():", "not finite.any():"),
            ("return Solved(weights, None,", "return Solved(weights, 0.0,"),
        )
    ),
    Mutation("site/answering.py", "if release is not None:", "if False:", "unit/site/test_policy.py"),
    Mutation(
        "algorithms/client_sampling.py",
        "replace(ctx, rng=SystemRng(ctx.rng.key, ctx.entropy))",
        "ctx",
        "identity/test_client_privacy.py",
    ),
    Mutation(
        "local/training.py",
        "piece.double().square_()",
        "piece.square()",
        "identity/test_client_privacy.py",
    ),
    Mutation(
        "local/training.py",
        "bounded=self.rule.limit is None",
        "bounded=True",
        "unit/run/test_private_runs.py",
    ),
    Mutation(
        "run/private_rounds.py",
        "return Tally(sums=defaultdict(float, kept))",
        "return tally",
        "unit/run/test_private_runs.py",
    ),
    Mutation(
        "privacy/noise.py",
        ".bitwise_right_shift_(11)",
        ".bitwise_right_shift_(10)",
        "unit/privacy/test_noise.py",
    ),
    # -- identities: the equations of the algorithms --
    Mutation(
        "aggregate/mean.py",
        "torch._foreach_div_(floats, weight)",
        "torch._foreach_div_(floats, weight + 1)",
        "identity/test_fedavg.py",
    ),
    Mutation(
        "aggregate/server_steps.py",
        "self.momentum * old + delta",
        "self.momentum * (old + delta)",
        "identity/test_fedavgm.py",
    ),
    Mutation(
        "aggregate/server_steps.py",
        "add(update, v, scale=self.momentum)",
        "add(update, v, scale=1.0)",
        "identity/test_fedavgm.py",
    ),
    Mutation(
        "local/rules.py",
        "torch._foreach_add(gradients, away, alpha=traits.proximal)",
        "torch._foreach_add(gradients, away, alpha=traits.proximal / 2)",
        "identity/test_fedprox.py",
    ),
    Mutation(
        "aggregate/normalized.py",
        "scale(update.update, steps)",
        "scale(update.update, 1.0)",
        "identity/test_fednova.py",
    ),
    Mutation("local/training.py", "total += abs(moved)", "total += 1.0", "identity/test_fednova.py"),
    Mutation(
        "algorithms/scaffold.py",
        'torch._foreach_add(gradients, context.saved["control"])',
        'torch._foreach_sub(gradients, context.saved["control"])',
        "identity/test_scaffold.py",
    ),
    Mutation(
        "algorithms/scaffold.py",
        'torch._foreach_sub_(new, context.saved["control"])',
        'torch._foreach_add_(new, context.saved["control"])',
        "identity/test_scaffold.py",
    ),
    Mutation(
        "algorithms/scaffold.py",
        "scale=1 / everyone",
        "scale=1 / max(update.replies, 1)",
        "identity/test_scaffold.py",
    ),
    Mutation(
        "algorithms/feddyn.py",
        "update=add(update.update, h, scale=1 / alpha)",
        "update=add(update.update, h, scale=alpha)",
        "identity/test_feddyn.py",
    ),
    Mutation(
        "algorithms/feddyn.py",
        "torch._foreach_mul(update, terms.alpha)",
        "torch._foreach_mul(update, -terms.alpha)",
        "identity/test_feddyn.py",
    ),
    Mutation(
        "aggregate/adaptive_server_steps.py",
        "v - (1 - beta2) * square * torch.sign(v - square)",
        "v + (1 - beta2) * square * torch.sign(v - square)",
        "identity/test_fedopt.py",
    ),
    Mutation(
        "aggregate/adaptive_server_steps.py",
        "return v + delta * delta",
        "return v + delta.abs()",
        "identity/test_fedopt.py",
    ),
    Mutation(
        "aggregate/adaptive_server_steps.py",
        "return _decayed(beta2, v, delta * delta)",
        "return _decayed(1 - beta2, v, delta * delta)",
        "identity/test_fedopt.py",
    ),
    Mutation(
        "algorithms/mime.py",
        "torch._foreach_sub(gradients, context.at_anchor)",
        "torch._foreach_add(gradients, context.at_anchor)",
        "identity/test_mime.py",
    ),
    Mutation(
        "algorithms/mime.py",
        "tracked(base, update.more[FULL], state[STATISTICS])",
        "tracked(base, update.update, state[STATISTICS])",
        "identity/test_mime.py",
    ),
    Mutation(
        "algorithms/mime.py", "return 1 - base.beta, shift", "return 1.0, shift", "identity/test_mime.py"
    ),
    Mutation(
        "algorithms/peers.py",
        "weights = without(self.topology.weights(step), set(range(len(at))) - set(sent))",
        "weights = self.topology.weights(step)",
        "identity/test_dsgd.py",
    ),
    Mutation(
        "algorithms/peers.py",
        "whole = len(mixed) == len(sent)",
        "whole = bool(mixed)",
        "identity/test_dsgd.py",
    ),
    Mutation(
        "algorithms/peers.py",
        "for name in floats], alpha=weight)",
        "for name in floats], alpha=1 - weight)",
        "identity/test_dsgd.py",
    ),
    Mutation(
        "algorithms/peers.py",
        'if before["file"] == edges["file"] and before != edges:',
        "if False:",
        "unit/algorithms/test_dsgd.py",
    ),
    Mutation(
        "algorithms/peers.py",
        "torch._foreach_mul([first[name] for name in floats], weight)",
        "[first[name].mul_(weight) for name in floats]",  # public code of push-sum
        "identity/test_push_sum.py",
    ),
    Mutation(
        "algorithms/peers.py",
        "{name: own[name] - value for",
        "{name: own[name].sub_(value) for",  # one initial model for all peers
        "identity/test_gradient_tracking.py",
    ),
    Mutation(
        "algorithms/peers.py",
        "square + weight * float",
        "square + float",
        "identity/test_push_sum.py",
    ),
    Mutation(
        "algorithms/peers.py", 'payload["mixing"], rng.of_client()', "0, rng", "identity/test_push_sum.py"
    ),
    Mutation(
        "algorithms/push_sum.py", "{name: value / mass if", "{name: value if", "identity/test_push_sum.py"
    ),
    Mutation(
        "algorithms/push_sum.py",
        "x |= {name: x[name] - step",
        "x |= {name: x[name] - mass * step",
        "identity/test_push_sum.py",
    ),
    Mutation(
        "algorithms/push_sum.py", "{name: value * mass if", "{name: value if", "identity/test_push_sum.py"
    ),
    Mutation("algorithms/push_sum.py", "directed=True, ", "", "identity/test_push_sum.py"),
    Mutation(
        "algorithms/gradient_tracking.py",
        "held[_TRACKED][name] + (g - held[_GRADIENT][name])",
        "held[_TRACKED][name] + g",
        "identity/test_gradient_tracking.py",
    ),
    Mutation(
        "algorithms/gradient_tracking.py",
        "{name: lr * value for name, value in y.items()}",
        "{name: lr * value for name, value in gradient.items()}",
        "identity/test_gradient_tracking.py",
    ),
    Mutation(
        "algorithms/gradient_tracking.py",
        "_TRACKED: mixed[_TRACKED], _GRADIENT",
        '_TRACKED: draft["content"][_TRACKED], _GRADIENT',
        "identity/test_gradient_tracking.py",
    ),
    Mutation(
        "algorithms/gradient_tracking.py",
        "statistics=True",
        "statistics=False",
        "identity/test_gradient_tracking.py",
    ),
    Mutation(
        "algorithms/feddane.py",
        "torch._foreach_sub(context.listed(context.payload[NAME]), own)",
        "torch._foreach_add(context.listed(context.payload[NAME]), own)",
        "identity/test_feddane.py",
    ),
    Mutation(
        "algorithms/splitfed.py",
        "order = [senders[k] for k in draw]",
        "order = list(senders)",
        "identity/test_splitfed.py",
    ),
    Mutation(
        "algorithms/splitfed.py",
        "return [client for client in cohort if client not in gone]",
        "return list(cohort)",
        "identity/test_splitfed.py",
    ),
    Mutation(
        "algorithms/split_relay.py",
        "            finished += yield from",
        "            yield from",
        "identity/test_split_relay.py",
    ),
    Mutation("algorithms/split_relay.py", "finished.pop()", "return {}", "identity/test_split_relay.py"),
    Mutation(
        "local/halves.py",
        'kept = _nested(payload["optimizer"])',
        "kept = {}",
        "identity/test_split_relay.py",
    ),
    Mutation(
        "local/halves.py",
        "replace(done, weights=now), own",
        "done, own",
        "identity/test_splitfed.py",
    ),
    Mutation(
        "local/halves.py",
        'seen, passes[sender] = {"tree": {**seen["tree"], **done.rest}}, done',
        "passes[sender] = done",
        "identity/test_splitfed.py",
    ),
    Mutation(
        "local/halves.py",
        "done.outputs.detach().to(self.dtype)}\n        if",
        "done.outputs.detach()}\n        if",
        "identity/test_splitfed.py",
    ),
    Mutation(
        "algorithms/vertical.py",
        "            if there == self.others:",
        "            if there:",
        "identity/test_vertical.py",
    ),
    Mutation(
        "algorithms/vertical.py",
        'missed += (len(self.others) - len(there)) * (sent["back"] is not None)',
        "missed += len(self.others) - len(there)",
        "identity/test_vertical.py",
    ),
    Mutation(
        "algorithms/vertical.py",
        'sent["back"] = at if isinstance(answer, Reply) else None',
        'sent["back"] = at',
        "identity/test_vertical.py",
    ),
    Mutation(
        "data/vertical/vertical_datasets.py",
        "examples.targets if has_labels else torch.zeros(len(examples), 0, dtype=torch.uint8)",
        "examples.targets",
        "unit/data/vertical/test_vertical_datasets.py",
    ),
    Mutation(
        "data/vertical/vertical_datasets.py",
        "window if train.lazy else None",
        "None",
        "unit/data/vertical/test_vertical_datasets.py",
    ),
    Mutation(
        "data/vertical/feature_partition.py",
        "dealt[shared + k :: len(windows)]",
        "dealt[shared + k :: len(windows) + 1]",
        "unit/data/vertical/test_feature_partition.py",
    ),
    Mutation(
        "data/vertical/party_files.py",
        "name in held_out - tested",
        "False",
        "unit/data/vertical/test_party_files.py",
    ),
    Mutation(
        "local/party_steps.py",
        "len(common), epoch, node)",
        "len(client.data), epoch, node) % len(common)",
        "identity/test_vertical.py",
    ),
    Mutation(
        "local/party_steps.py", "client = _with(client, half, own)", "pass", "identity/test_vertical.py"
    ),
    Mutation(
        "local/party_steps.py",
        "{**found, k: mean.expand(rows, -1)}",
        "{**found, k: 0 * mean.expand(rows, -1)}",
        "identity/test_vertical.py",
    ),
    Mutation(
        "local/party_steps.py", "key=data.ids.__getitem__", "key=lambda at: at", "identity/test_vertical.py"
    ),
    Mutation(
        "local/set_intersection.py",
        "rows = sorted(common, key=lambda row: ids[row])",
        "rows = sorted(common)",
        "identity/test_vertical.py",
    ),
    Mutation(
        "local/set_intersection.py",
        '_shuffle(client)[content["places"].cpu()]',
        'content["places"].cpu()',
        "identity/test_vertical.py",
    ),
    Mutation(
        "local/set_intersection.py",
        "while not on_curve(u",
        "while not (u",
        "unit/local/test_set_intersection.py",
    ),
    Mutation(
        "models/party_network.py",
        'last[1].register_parameter("bias", None)',
        "pass",
        "identity/test_vertical.py",
    ),
    Mutation("local/leakage.py", "centred.fill_diagonal_(0.0)", "centred", "unit/local/test_leakage.py"),
    Mutation("local/halves.py", "lr * self.factor", "lr", "identity/test_splitfed.py"),
    Mutation(
        "local/halves.py",
        '{**state["tree"], **done.rest, **weights}',
        '{**state["tree"], **weights}',
        "identity/test_splitfed.py",
    ),
    Mutation(
        "local/halves.py",
        "rng.seed_torch(client.device)  # for dropout",
        "pass  # for dropout",
        "identity/test_splitfed.py",
    ),
    Mutation(
        "algorithms/fedir.py",
        "torch.where(q > 0, target.to(q) / q, 0.0)",
        "torch.where(q > 0, q / target.to(q), 0.0)",
        "identity/test_fedir.py",
    ),
    Mutation(
        "tasks/classification.py",
        "(each * losses).sum() / each.sum()",
        "(each * losses).sum() / each.numel() + 0 * each.sum()",
        "identity/test_fedir.py",
    ),
    Mutation(
        "algorithms/fedvc.py",
        "select=BySize()",
        "select=Uniform()",
        "identity/test_fedvc.py",
    ),
    Mutation(
        "algorithms/client_sampling.py",
        "draw.integers(n) + n * np.arange(m)",
        "0 * draw.integers(n) + n * np.arange(m)",
        "unit/algorithms identity/test_fedvc.py",
    ),
    Mutation(
        "algorithms/moon.py",
        "softplus(nearer / temperature)",
        "softplus(-nearer / temperature)",
        "identity/test_moon.py",
    ),
    Mutation("algorithms/moon.py", "loss + mu * contrast", "loss + contrast", "identity/test_moon.py"),
    Mutation(
        "local/dual.py",
        "z = torch._foreach_add(x, new, alpha=1 / rho)",
        "z = torch._foreach_add(x, new, alpha=rho)",
        "identity/test_admm.py",
    ),
    Mutation(
        "local/dual.py",
        "new = torch._foreach_add(dual, torch._foreach_sub(x, y), alpha=rho)",
        "new = torch._foreach_sub(dual, torch._foreach_sub(x, y), alpha=rho)",
        "identity/test_admm.py",
    ),
    Mutation(
        "algorithms/admm.py",
        "mean + share * (fresh * (y - initial) - delta)",
        "mean + share * (y - initial - delta)",
        "identity/test_admm.py",
    ),
    Mutation("local/solvers.py", "alpha=self.decay)", "alpha=2 * self.decay)", "identity/test_admm.py"),
    Mutation(
        "algorithms/centralized.py",
        "keep_optimizer=True",
        "keep_optimizer=False",
        "identity/test_centralized.py",
    ),
    Mutation(
        "algorithms/fedbn.py",
        "if isinstance(layer, _BatchNorm)",
        "if isinstance(layer, _BatchNorm) and False",
        "identity/test_personal.py",
    ),
    Mutation(
        "algorithms/client_evaluation.py",
        "tree[name] - delta for",
        "tree[name] + delta for",
        "identity/test_personal.py",
    ),
    Mutation(
        "local/knowledge_transfer.py",
        "teacher[uploaded(at, teacher.device)]",
        "teacher[: len(at)]",
        "identity/test_fedgkt.py",
    ),
    Mutation(
        "local/knowledge_transfer.py",
        "temperature**2 * kl_div",
        "temperature * kl_div",
        "identity/test_fedgkt.py",
    ),
    Mutation(
        "local/knowledge_transfer.py",
        "losses.append(loss.detach())",
        "losses.append(objective.detach())",
        "identity/test_fedgkt.py",
    ),
    Mutation(
        "local/knowledge_transfer.py",
        "module = [], learner.module.eval()",
        "module = [], learner.module.train()",
        "identity/test_fedgkt.py",
    ),
    Mutation(
        "local/knowledge_transfer.py",
        "return Outcome({}, {**client.state, LOGITS: content[LOGITS]})",
        "return Outcome({}, {LOGITS: content[LOGITS]})",
        "identity/test_fedgkt.py",
    ),
    Mutation(
        "local/knowledge_transfer.py",
        '            "optimizer": kept,',
        '            "optimizer": {},',
        "identity/test_fedgkt.py",
    ),
    Mutation(
        "algorithms/fedgkt.py",
        "np.mean([metrics[name]",
        "np.max([metrics[name]",
        "identity/test_fedgkt.py",
    ),
    Mutation(
        "algorithms/fedgkt.py",
        "Request(k) for k in sent]",
        "Request(k) for k in cohort]",
        "identity/test_fedgkt.py",
    ),
    # -- sums that the server cannot open --
    Mutation(
        "aggregate/secure/encoding.py",
        '(share if how == "mean" else 1.0)',
        "share",
        "unit/aggregate/secure/test_encoding.py",
    ),
    Mutation(
        "aggregate/secure/encoding.py",
        "32 if most < 2**31 else 64",
        "32 if most <= 2**31 else 64",
        "unit/aggregate/secure/test_encoding.py",
    ),
    Mutation(
        "aggregate/secure/encoding.py",
        "if low < -most or high > most:",
        "if high > most:",
        "unit/aggregate/secure/test_encoding.py",
    ),
    Mutation(
        "aggregate/secure/encoding.py",
        "values.round_()",
        "values.trunc_()",
        "identity/test_quantized.py",
    ),
    Mutation(
        "aggregate/secure/encoding.py",
        "signed.max() > most or signed.min() < -most",
        "signed.max() > most",
        "unit/aggregate/secure/test_encoding.py",
    ),
    Mutation(
        "aggregate/secure/encoded_train.py",
        "for outcome in self.train.together(calls)",
        "for outcome in map(self.train, *zip(*calls))",
        "identity/test_quantized.py",
    ),
    Mutation(
        "aggregate/secure/blind_sum.py",
        "before[name] + max(batches)",
        "before[name] + min(batches)",
        "identity/test_quantized.py",
    ),
    Mutation(
        "aggregate/secure/blind_sum.py",
        "= loss * examples",
        "= loss",
        "unit/aggregate/secure/test_quantized.py",
    ),
    Mutation(
        "local/settings.py",
        "epochs * min(examples, epoch * batch) + rest * batch",
        "steps * batch",
        "unit/aggregate/secure/test_quantized.py",
    ),
    Mutation(
        "algorithms/fit.py",
        "if aggregate.blind and what is not None:",
        "if what is None:",
        "unit/aggregate/secure/test_quantized.py",
    ),
    # -- SecAgg --
    Mutation(
        "aggregate/secure/shamir.py",
        "for x in points:\n        value = 0",
        "for x in range(len(points)):\n        value = 0",
        "unit/aggregate/secure/test_shamir.py",
    ),
    Mutation(
        "aggregate/secure/masks.py",
        "algorithms.AES256(key)",
        "algorithms.AES256(key[:4] * 8)",
        "unit/aggregate/secure/test_secagg.py",
    ),
    Mutation(
        "aggregate/secure/keys.py",
        "ROUND_CEILING))",
        '"ROUND_FLOOR"))',
        "unit/aggregate/secure/test_secagg.py",
    ),
    Mutation(
        "aggregate/secure/keys.py",
        "if len(set(published)) != len(published):",
        "if False:",
        "unit/aggregate/secure/test_secagg_attacks.py",
    ),
    Mutation(
        "aggregate/secure/keys.py",
        "if -1 in order or order != sorted(set(order)):",
        "if False:",
        "unit/aggregate/secure/test_secagg_attacks.py",
    ),
    Mutation(
        "aggregate/secure/keys.py",
        "json.dumps([purpose, *clients]).encode() + self.hash",
        "json.dumps([purpose, *clients]).encode()",
        "unit/aggregate/secure/test_secagg_attacks.py",
    ),
    Mutation(
        "aggregate/secure/secagg_client.py",
        "attempt.round < done or",
        "",
        "unit/aggregate/secure/test_secagg_attacks.py",
    ),
    Mutation(
        "aggregate/secure/secagg_client.py",
        "        client.secrets.forget(keys.of_run(attempt.run))\n        step = ",
        "        step = ",
        "unit/aggregate/secure/test_secagg_attacks.py",
    ),
    Mutation(
        "aggregate/secure/secagg_client.py",
        'client.secrets.forget("secagg/", unused=_HOUR)',
        "pass",
        "unit/aggregate/secure/test_secagg.py",
    ),
    Mutation(
        "aggregate/secure/secagg_client.py",
        'or entry["step"] not in after:',
        "or False:",
        "unit/aggregate/secure/test_secagg_attacks.py",
    ),
    Mutation(
        "aggregate/secure/secagg_client.py",
        "if found != (step.attempt.model, step.attempt.shared):",
        "if False:",
        "unit/aggregate/secure/test_secagg_attacks.py",
    ),
    Mutation(
        "aggregate/secure/secagg_client.py",
        "_seen(step.attempt, log, client)  # another",
        "pass  # another",
        "unit/aggregate/secure/test_secagg_attacks.py",
    ),
    Mutation(
        "aggregate/secure/secagg_client.py",
        "if members.get(own) != step.member():",
        "if own not in members:",
        "unit/aggregate/secure/test_secagg_attacks.py",
    ),
    Mutation(
        "aggregate/secure/secagg_client.py",
        'keys.subset("survivors", survivors, step.entry["senders"], transcript.needed)',
        "pass",
        "unit/aggregate/secure/test_secagg_attacks.py",
    ),
    Mutation(
        "aggregate/secure/secagg_client.py",
        "rng.seed_torch(client.device)  #",
        "pass  #",
        "identity/test_secagg.py",
    ),
    Mutation(
        "aggregate/secure/secagg_client.py",
        "[_plain(results[at]) for at in ready]",
        "[calls.ids[at] for at in ready]",
        "identity/test_secagg.py",
    ),
    Mutation(
        "aggregate/secure/secagg_client.py",
        'if before != payload[ATTEMPT]["clients"]:',
        "if False:",
        "unit/aggregate/secure/test_signed_lists.py",
    ),
    Mutation(
        "aggregate/secure/secagg_client.py",
        "self._check_agreed(payload[ATTEMPT], survivors, transcript, step)",
        "pass",
        "unit/aggregate/secure/test_signed_lists.py",
    ),
    Mutation(
        "aggregate/secure/secagg_client.py",
        'if survivors != step.entry["survivors"]:',
        "if False:",
        "unit/aggregate/secure/test_signed_lists.py",
    ),
    Mutation(
        "aggregate/secure/secagg_client.py",
        "if not step.client.secrets.identity.verify(client, message, signature):",
        "if False:",
        "unit/aggregate/secure/test_signed_lists.py",
    ),
    Mutation(
        "aggregate/secure/secagg_client.py",
        "< identity.min_cohort:",
        "< 0:",
        "unit/aggregate/secure/test_signed_lists.py",
    ),
    Mutation(
        "site/client_identity.py",
        "!= set(own) or",
        "!= set(own) and",
        "unit/site/test_client_identity.py",
    ),
    Mutation(
        "aggregate/secure/secagg_server.py",
        "if not right:",
        "if False:",
        "unit/aggregate/secure/test_secagg_attacks.py",
    ),
    Mutation(
        "aggregate/secure/secagg_server.py",
        "if (fault := layout.fault(total, len(masked.survivors))) is not None:",
        "if (fault := None) is not None:",
        "unit/aggregate/secure/test_secagg_attacks.py",
    ),
    Mutation(
        "aggregate/secure/secagg_server.py",
        "journal.note(round, MASKED_SUM, masked.payload)",
        "pass",
        "unit/aggregate/secure/test_secagg.py",
    ),
    Mutation("aggregate/secure/secagg_server.py", "holds=True, ", "", "identity/test_secagg.py"),
    Mutation(
        "aggregate/secure/secagg_server.py",
        "total = self.total.copy()",
        'total = self.total.astype("u8").astype(self.total.dtype)',
        "unit/aggregate/secure/test_secagg_settings.py",
    ),
    Mutation(
        "algorithms/fit.py",
        "    elif aggregate.once:",
        "    elif False:",
        "unit/aggregate/secure/test_secagg_settings.py",
    ),
    # -- Arithmetic modulo 2^31 - 1 --
    Mutation(
        "aggregate/secure/field.py", "TERMS = 128", "TERMS = 129", "unit/aggregate/secure/test_field.py"
    ),
    Mutation(
        "aggregate/secure/field.py",
        "while len(others := np.flatnonzero(values >= q)):",
        "while len(others := np.flatnonzero(values > q)):",
        "unit/aggregate/secure/test_field.py",
    ),
    # -- LightSecAgg --
    Mutation(
        "aggregate/secure/lightsecagg_steps.py",
        "values = [*parts, *noise]",
        "values = [*parts, *(0 * noise)]",
        "unit/aggregate/secure/test_lightsecagg.py",
    ),
    Mutation(
        "aggregate/secure/lightsecagg.py",
        "if not 1 <= t <= helpers(cohort, u):",
        "if not 1 <= t < u:",
        "unit/aggregate/secure/test_lightsecagg.py",
    ),
    # -- Turbo-Aggregate --
    Mutation(
        "aggregate/secure/turbo_steps.py",
        "plain = add(np.concatenate([noise, last]), words, q)",
        "plain = add(np.concatenate([0 * noise, 0 * last]), words, q)",
        "unit/aggregate/secure/test_turbo_aggregate.py",
    ),
    Mutation(
        "aggregate/secure/turbo_steps.py",
        "sums = [mean(plain, coded, len(former))] * 2",
        "pass",
        "unit/aggregate/secure/test_turbo_aggregate.py",
    ),
    Mutation(
        "aggregate/secure/turbo_aggregate.py",
        "if cohort < _GROUPS * self.group:",
        "if cohort < self.group:",
        "unit/aggregate/secure/test_turbo_aggregate.py",
    ),
    # -- FedNAS --
    Mutation(
        "algorithms/fednas.py",
        "torch._foreach_add_(gradients, validation, alpha=balance)",
        "torch._foreach_mul_(gradients, balance); torch._foreach_add_(gradients, validation)",
        "identity/test_fednas.py",
    ),
    Mutation(
        "algorithms/fednas.py",
        "validation, _ = _gradients(problem, alphas, next(others))",
        "validation, _ = _gradients(problem, alphas, batch)",
        "identity/test_fednas.py",
    ),
    Mutation(
        "algorithms/fednas.py",
        "move([alpha.detach() for alpha in alphas], gradients, adam.lr)",
        "move([alpha.detach() for alpha in alphas], clip(gradients, settings.clip_norm or 1.0), adam.lr)",
        "identity/test_fednas.py",
    ),
    Mutation(
        "algorithms/fednas.py",
        "order[held:].sort().values",
        "order[:held].sort().values",
        "identity/test_fednas.py",
    ),
    Mutation("models/darts.py", "[:, 1:].tolist()", "[:, :7].tolist()", "identity/test_fednas.py"),
    # -- FedMA: matching --
    Mutation(
        "local/matching.py",
        '([layer["bias"][:, None]] if',
        '([0 * layer["bias"][:, None]] if',
        "identity/test_matching.py",
    ),
    Mutation(
        "local/matching.py",
        "squares[:, None] + 2 * cross + others",
        "squares[:, None] + cross + others",
        "identity/test_matching.py",
    ),
    Mutation(
        "local/matching.py",
        "2 * log(prior.gamma / clients)",
        "log(prior.gamma / clients)",
        "identity/test_matching.py",
    ),
    Mutation(
        "local/matching.py",
        "(counts + prior.sigma / prior.sigma0)[:, None]",
        "(counts + prior.sigma0 / prior.sigma)[:, None]",
        "identity/test_matching.py",
    ),
    Mutation(
        "local/matching.py",
        "wide[:, units.to(wide.device)] = blocks",
        "wide[:, : len(units)] = blocks",
        "identity/test_matching.py",
    ),
    Mutation(
        "local/matching.py",
        "blocks = weight.reshape(len(weight), len(units), -1)",
        "blocks = weight.reshape(len(weight), -1, len(units)).transpose(1, 2)",
        "identity/test_matching.py",
    ),
    Mutation(
        "local/matching.py",
        "for _ in range(prior.passes):",
        "for _ in range(0):",
        "identity/test_matching.py",
    ),
    Mutation(
        "local/matching.py",
        "parts[at + 1][j] = widen_inputs(parts[at + 1][j], mine, width)",
        "pass",
        "identity/test_matching.py",
    ),
    Mutation(
        "local/matching.py",
        "shares = torch.where(nobody, 1.0, counts.double())",
        "shares = torch.ones_like(counts).double()",
        "identity/test_matching.py",
    ),
    # -- FedMA: the pass --
    Mutation(
        "local/layer_by_layer.py",
        "{**tree, **named(before, self.layers[at - 1]), **named(behind",
        "{**tree, **named(behind",
        "identity/test_fedma.py",
    ),
    Mutation(
        "local/layer_by_layer.py",
        "of_client(each_round=False)",
        "of_client()",
        "identity/test_fedma.py",
    ),
    Mutation(
        "local/layer_by_layer.py",
        "tree[leaf] - update for leaf",
        "tree[leaf] + update for leaf",
        "identity/test_fedma.py",
    ),
    Mutation(
        "local/layer_by_layer.py",
        'counts, payload["kept"])',
        'torch.ones_like(counts), payload["kept"])',
        "identity/test_fedma.py",
    ),
    Mutation(
        "algorithms/fedma.py",
        'keys |= {"freeze": done} if done and frozen else {}',
        "pass",
        "identity/test_fedma.py",
    ),
    Mutation(
        "algorithms/fedma.py",
        'if client in state["members"]:',
        "if False:",
        "identity/test_fedma.py",
    ),
    Mutation(
        "algorithms/fedma.py",
        "self._units(state, client)[-1], old), mine[-1], new",
        "self._units(state, client)[-1], old), mine[-1].sort().values, new",
        "identity/test_fedma.py",
    ),
    Mutation(
        "algorithms/fedma.py",
        "argsort(descending=True, stable=True)",
        "argsort(stable=True)",
        "identity/test_fedma.py",
    ),
    # -- local training --
    Mutation(
        "local/optimizers.py",
        'torch._foreach_mul_(state["momentum"], momentum)',
        'torch._foreach_mul_(state["momentum"], 1.0)',
        "unit/local identity/test_fedavg.py",
    ),
    Mutation("local/optimizers.py", "(1 - b2**t) ** 0.5", "(1 - b2) ** 0.5", "unit/local"),
    Mutation(
        "local/optimizers.py",
        "(largest / (norm + 1e-6)).clamp(max=1.0)",
        "(largest / (norm + 1e-6))",
        "unit/local",
    ),
    Mutation(
        "local/optimizers.py",
        "parameter.add_(gradient, alpha=-rate)",
        "parameter.add_(gradient, alpha=-2 * rate)",
        "unit/local identity/test_fedavg.py",
    ),
    Mutation(
        "local/vectorized/steps.py",
        "alpha=-of[leaf.data_ptr()]",
        "alpha=-of[leaf.data_ptr()] / 2",
        "identity/test_vectorized.py identity/test_layer_rates.py",
    ),
    Mutation(
        "algorithms/scaffold.py",
        "lr = context.lr * scale",
        "lr = context.lr",
        "identity/test_layer_rates.py",
    ),
    Mutation(
        "local/optimizers.py",
        "self.scales.get(id(parameter), 1.0)",
        "1.0",
        "identity/test_layer_rates.py",
    ),
    Mutation(
        "local/rate_scales.py",
        "max(fitting, key=len)",
        "min(fitting, key=len)",
        "unit/local/test_rate_scales.py",
    ),
    Mutation(
        "base/frozen.py",
        'layer.__dict__["train"] = partial(_train, layer)',
        "pass",
        "unit/models/test_freeze.py",
    ),
    Mutation(
        "core/modules.py",
        "own.data = value",
        "pass",
        "contract/test_partial_training.py",
    ),
    Mutation(
        "data/feature_cache.py",
        "self.store.filled[start:stop] = 1",
        "pass",
        "contract/test_partial_training.py",
    ),
    # -- partitions --
    Mutation(
        "data/partition/dirichlet.py",
        "a = alpha * p[some]",
        "a = alpha * p[some] * len(p)",
        "unit/data property/test_partitions.py",
    ),
    Mutation(
        "data/partition/dirichlet_classwise.py",
        "alpha * clients, stream",
        "alpha, stream",
        "unit/data property/test_partitions.py",
    ),
    Mutation(
        "data/partition/shards.py",
        "np.repeat(np.arange(clients), each)",
        "np.arange(clients * each) % clients",
        "unit/data property/test_partitions.py",
    ),
    # -- rounds, answers, evaluation --
    Mutation(
        "core/random.py", "Rng((*self.key, *parts))", "Rng((*parts,))", "unit/core identity/test_fedavg.py"
    ),
    Mutation(
        "core/reduction.py",
        "torch.maximum(t, value[leaf])",
        "torch.minimum(t, value[leaf])",
        "unit/core seam identity/test_fedavg.py",
    ),
    # -- metrics of clients --
    Mutation(
        "core/schema.py",
        "if bound is None or any(",
        "if bound is not None and any(",
        "unit/core/test_schema.py",
    ),
    Mutation("engines/default.py", "(long or self._workers.started)", "long", "unit/engines/test_default.py"),
    Mutation("engines/default.py", "self._left * work.images", "work.images", "unit/engines/test_default.py"),
    Mutation("engines/executor.py", " or expect.metric_fault(metrics)", "", "unit/engines/test_executor.py"),
    Mutation(
        "engines/executor.py",
        "good = expect.admits(outcomes.metrics) and ",
        "good = ",
        "unit/engines/test_executor.py",
    ),
    Mutation(
        "algorithms/client_evaluation.py",
        "fault = task.metric_fault(of_client) or",
        "fault =",
        "unit/tasks/test_central_evaluation.py",
    ),
    # -- bytes of strangers --
    Mutation("core/tensorfile.py", "if span.start != end:", "if False:", "unit/core/test_tensorfile.py"),
    Mutation(
        "core/tensorfile.py", "if entries > bounds.entries:", "if False:", "property/test_payload_bytes.py"
    ),
    Mutation(
        "core/tensorfile.py",
        "size is None or size != offsets[1] - offsets[0]",
        "size is None",
        "unit/core/test_tensorfile.py",
    ),
    Mutation(
        "core/payload.py",
        "len(raw) != tensorfile.nbytes_of(shape, dtype)",
        "False",
        "unit/core/test_tensorfile.py",
    ),
    Mutation("core/driver.py", "if answer.id not in self._out:", "if False:", "seam unit/core"),
    Mutation(
        "tasks/classification.py",
        "predicted = outputs.argmax(1)",
        "predicted = outputs.argmin(1)",
        "unit/tasks identity/test_fedavg.py",
    ),
    Mutation(
        "local/settings.py",
        "done = (at - warm) / (steps",
        "done = (at - warm + 1) / (steps",
        "identity/test_learning_rates.py",
    ),
    Mutation(
        "tasks/central_evaluation.py",
        "min(start + stretch, examples)",
        "min(start + stretch, examples - 1)",
        "unit/tasks identity/test_fedavg.py",
    ),
    Mutation(
        "tasks/classification.py",
        "each = weights.to(losses)[targets]",
        "each = weights.to(losses)[targets].sqrt()",
        "unit/tasks identity/test_class_weights.py",
    ),
    Mutation(
        "tasks/classification.py",
        "/ each.sum().clamp(",
        "/ each.new_tensor(len(targets)).clamp(",
        "identity/test_class_weights.py",
    ),
    Mutation(
        "tasks/segmentation.py",
        "each.sum().clamp(min=floor) if normalize else",
        "labelled.sum().clamp(min=1) if normalize else",
        "identity/test_segmentation.py",
    ),
    Mutation(
        "tasks/box_average_precision.py",
        "last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))",
        "last = np.arange(len(scores))",
        "unit/tasks/test_detection_metrics.py",
    ),
    Mutation(
        "models/yolov5/loss.py",
        "aspect / (1 - iou + aspect)",
        "aspect / (1 + iou + aspect)",
        "unit/models/yolov5/test_yolov5_loss.py",
    ),
    Mutation(
        "vision/moved_targets.py",
        "sides.prod(1) >= LEAST_SHARE",
        "sides.prod(1) > 2 * LEAST_SHARE",
        "unit/vision/test_moved_targets.py",
    ),
    Mutation(
        "settings/memory_check.py",
        "workers * (_bound(module, model, batch) + beside)",
        "workers * _bound(module, model, batch) // _STEP",
        "unit/settings/test_memory_check.py",
    ),
    Mutation(
        "settings/memory_check.py",
        "// (needed - fixed)",
        "// needed",
        "unit/settings/test_memory_check.py",
    ),
    Mutation(
        "algorithms/client_evaluation.py", "len(values) / 10", "len(values) / 5", "identity/test_personal.py"
    ),
    Mutation(
        "algorithms/client_evaluation.py",
        "answer.client)]), of_client, untuned)",
        "answer.client)]), after[0], untuned)",
        "unit/results/test_client_results.py",
    ),
    Mutation(
        "observers/metrics_and_clients.py",
        'client = self._name(row["client"])',
        'client = str(row["client"])',
        "unit/results/test_client_results.py",
    ),
    Mutation(
        "results/client_results.py",
        "round, [0.0, 0])",
        "0, [0.0, 0])",
        "unit/results/test_client_results.py",
    ),
    Mutation(
        "results/client_results.py",
        'to_local_only=gaps["local-only"]',
        'to_local_only=gaps["centralized"]',
        "unit/results/test_client_results.py",
    ),
    # -- studies: the choice of settings, the comparison of methods --
    Mutation(
        "studies/tuning.py",
        "key=lambda index: (scores[index], index)",
        "key=lambda index: (scores[index][1], index)",
        "unit/studies/test_halving.py",
    ),
    Mutation("studies/tuning.py", "or at <= rung", "or at <= rung + 1", "unit/studies/test_halving.py"),
    Mutation(
        "results/statistics.py",
        "(len(order) - rank) * value",
        "len(order) * value",
        "unit/results/test_statistics.py",
    ),
    Mutation(
        "results/statistics.py",
        "return min(max(1, len(set(seeds)))",
        "return max(max(1, len(set(seeds)))",
        "unit/results/test_statistics.py",
    ),
]


def main(names: list[str]) -> int:
    """Runs the tests of each place against a broken copy of the source, two at a time.

    Returns 1 if no test fails for some place, 2 if no place is in a file of a given name.

    Raises `RuntimeError` where tests fail on the source as it is, or cannot be run at all.
    """
    chosen = [m for m in MUTATIONS if not names or any(name in m.file for name in names)]
    if unknown := [name for name in names if not any(name in m.file for m in MUTATIONS)]:
        files = "\n  ".join(sorted({m.file for m in MUTATIONS}))
        print(f"No place to break is in a file named '{unknown[0]}'. Files with such places:\n  {files}")
        return 2
    with ThreadPoolExecutor(max_workers=2) as pool:
        suites = sorted({m.tests for m in chosen})
        for tests, failed in zip(suites, pool.map(failing, suites), strict=True):
            if failed:
                raise RuntimeError(f"{tests} fails although nothing is broken: {failed}")
        missed = [m for m, caught in zip(chosen, pool.map(is_caught, chosen), strict=True) if not caught]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} broken places were caught")
    return int(bool(missed))


def is_caught(mutation: Mutation) -> bool:
    """Whether a test fails with the source so broken."""
    failed = failing(mutation.tests, mutation)
    print(f"{mutation.file}: {mutation.text!r}: {failed or 'no test failed'}", flush=True)
    return failed is not None


def failing(tests: str, mutation: Mutation | None = None) -> str | None:
    """The line of the first test that fails on a copy of the source, broken by `mutation`; None where all pass.

    Raises `RuntimeError` where they cannot be run.
    """
    run = run_tests([str(Path("tests") / path) for path in tests.split()], mutation)
    if run.returncode not in (0, 1):
        raise RuntimeError(f"{tests} could not be run:\n{run.stdout}{run.stderr}")
    return next((line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), None)


def run_tests(arguments: list[str], mutation: Mutation | None) -> subprocess.CompletedProcess[str]:
    """Runs pytest with further `arguments` on a copy of the source, broken by `mutation`."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            broken = source / "fedlens" / mutation.file
            broken.write_text(broken.read_text("utf-8").replace(mutation.text, mutation.broken), "utf-8")
        return subprocess.run(
            [*PYTEST, "-o", f"pythonpath={source} .", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
        )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
