"""What federation costs: the runs that answer it, in one directory.

>>> import tempfile
>>> from pathlib import Path
>>> from fedlens.api import Experiment
>>> experiment = Experiment(
...     rounds=2, model="linear", local={"lr": 0.1},
...     data={"dataset": "digits", "partition": {"name": "shards", "clients": 4, "classes_per_client": 5}})
>>> result = cost(experiment, seeds=1, out=Path(tempfile.mkdtemp()) / "cost", report=False)
>>> [run["name"] for run in result.answer["runs"]]
['federated-seed0', 'iid-seed0', 'centralized-seed0', 'local-only-seed0']
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from fedlens.algorithms.registry import SLOTS, default_table
from fedlens.api import Experiment
from fedlens.base.errors import ConfigError, FedlensError, RunDirectoryError, told
from fedlens.data.client_datasets import ClientDatasets
from fedlens.data.formats.registry import FORMATS
from fedlens.files.atomic_files import refuse_link, write_atomically
from fedlens.files.full_disk import disk_full, stopped_when_full
from fedlens.files.text_files import read_json
from fedlens.pages.cost.answer import cost_answer
from fedlens.pages.cost.page import write_cost_page
from fedlens.pages.cost.parties import party_answer, write_party_page
from fedlens.pages.run_page import write_report
from fedlens.pages.suspicious_labels import FILE, write_labels
from fedlens.results.rows import Row, failed_row, row_of_run
from fedlens.results.run import Run
from fedlens.results.statistics import LEAST_SEEDS
from fedlens.run.build import build, data_directory, images_of_the_run
from fedlens.run.rundir import plain as as_json
from fedlens.run.session import Session
from fedlens.settings.config import Config, plain, read_config
from fedlens.settings.config_source import Source, read_source
from fedlens.settings.keys import flat
from fedlens.settings.plan import plan, plan_of
from fedlens.studies.carry_out import RunOptions, StudyStopped, reason_of
from fedlens.studies.jobs import Ended, cores_of, default_jobs, runs_on_gpus
from fedlens.studies.planned import DueRun, PlannedRun
from fedlens.studies.progress import StudyProgress
from fedlens.studies.run_cost import RunCosts
from fedlens.studies.store import different_settings
from fedlens.studies.study import started, writable
from fedlens.use.client_tests import too_costly, write_client_tests

ROLES = ("federated", "iid", "centralized", "local-only")
HELD_OUT = 0.2  # share of each client's images that is held out if the settings say nothing
POOLED = "pooled"  # of parties: one model on as many whole images
_BASELINES = ("centralized", "local-only")
_NOT_POOLED = ("epochs", "steps", "examples", "stragglers", "straggler_work")  # of one of many clients


@dataclass(frozen=True)
class CostResult:
    """What `cost` found.

    Args:
        directory: holds the runs, `cost.json` with `answer`, and the page `cost.html`.
        answer: see `fedlens.pages.cost.answer.cost_answer`.
    """

    directory: Path
    answer: Mapping[str, Any]

    @property
    def page(self) -> Path:
        """The page with the answer."""
        return self.directory / "cost.html"


def cost(
    experiment: Experiment | str | Path,
    overrides: Sequence[str] = (),
    *,
    seeds: int = 3,
    out: Path | str | None = None,
    data_dir: Path | str | None = None,
    download: bool = False,
    jobs: int | None = None,
    progress: StudyProgress | None = None,
    report: bool = True,
) -> CostResult:
    """Runs an experiment and its baselines over some seeds, and returns what federation costs.

    For each seed four runs, on the same test images and from the same first weights:

    - `federated`: the experiment itself;
    - `iid`: its IID twin, with the images reassigned to clients of the same sizes at random (`data.reassign`);
    - `centralized`: the same model on all clients' images together (hsu2020 section 6);
    - `local-only`: each client trains a model of its own on its own images.

    Every client is measured on the images it holds out. Data, partition and held-out images are the same for all
    seeds, so that a client can be followed; initial weights, selection and batches differ. All runs have the
    experiment's `[local]` settings and rounds. A centralized round trains on as many images as the clients of a
    federated round do together; in a local-only round the same clients train as in the federated round.

    Of parties that hold parts of the same images (`data.parties`), it says what their features add: the runs are the
    label party alone, each set of parties with it, and the model on as many whole images in one place.

    Args:
        experiment: an experiment, a recipe or a TOML file; `overrides` such as `"local.lr=0.1"` go on top.
        seeds: how many: `seed`, `seed + 1`, ... With fewer than three there are no intervals.
        out: the directory; default `runs/<name>-cost`. Runs in it that are finished are kept, others are resumed.
        jobs: how many runs at once, each in a worker process; by default as many as cores and memory allow. 0 carries
            the runs out in this process, as does the default where a setting is a function or class: workers find
            only what they can import. The results do not depend on it.
        report: write the result pages.

    Raises `FedlensError` if the settings or the data are wrong, if workers cannot import a function of theirs, or if
    `out` has runs with other settings, and `StudyStopped` if the disk is full. A run that fails later is a row with
    its reason. `KeyboardInterrupt` passes; the same call continues.
    """
    if seeds < 1:
        raise ConfigError(f"the number of seeds is {seeds} (must be at least 1)", where="seeds")
    if jobs is not None and jobs < 0:
        raise ConfigError(f"the number of jobs is {jobs} (must be at least 0)", where="jobs")
    source = (
        experiment.with_settings(*overrides)._source
        if isinstance(experiment, Experiment)
        else read_source(str(experiment), overrides)
    )
    listener, session = progress or StudyProgress(), Session()
    root = data_directory(None if data_dir is None else Path(data_dir))
    config = read_config(source.values, source.locate)
    refuse_baseline(config, source)
    runs, work, notes = _planned(source, config, seeds, root, download, session)
    directory = Path(out).expanduser() if out is not None else Path("runs") / f"{config.name}-cost"
    refuse_other_settings(directory, runs)
    own = [value for value in flat(runs[0].settings, numbered=True).values() if callable(value)]
    jobs = 0 if own and jobs is None else jobs  # workers may not find them
    if own and jobs:
        runs = [replace(run, settings=writable(run.settings)) for run in runs]
    rows = {run.key: {"name": run.key, "role": run.method, "seed": run.seed, "error": None} for run in runs}
    about: dict[str, Any] = {
        "name": config.name,
        "seeds": sorted({run.seed for run in runs}),
        **(work if "roles" in work else {"work": work}),
        "notes": notes,
        "command": {
            "recipe": None if isinstance(experiment, Experiment) else str(experiment),
            "changes": list(overrides),
            "out": None if out is None else str(out),
            "data_dir": None if data_dir is None else str(data_dir),
        },
        "runs": list(rows.values()),
    }
    for sentence in (*notes, *few_seeds(seeds, len(runs))):
        listener.note(sentence)

    def ended(run: PlannedRun, line: Row) -> None:
        rows[run.key] |= {"error": line.reason} if line.status == "failed" else {"untested": line.reason}
        listener.run_ended(run, line)
        _write_begun(directory, about)

    after = partial(why_untested, root=root, work=work)
    options = RunOptions(directory, root, download, report, after=after, folder=directory)
    with stopped_when_full(StudyStopped, "the comparison", directory):
        _write_begun(directory, about)
        listener.runs_due(len(runs), 0, len(runs))
        _carry_out(runs, options, jobs, listener, ended, session)
        return _answered(directory, about, report)


def _planned(
    source: Source, config: Config, seeds: int, root: Path, download: bool, session: Session
) -> tuple[list[PlannedRun], dict[str, Any], list[str]]:
    """The runs, how much they train, and a sentence for each setting that was changed."""
    if config.data.parties is not None:
        work = party_work(source, root, download, session)
        return planned_runs(source, seeds, work), work, []
    measured, notes = measured_at_clients(source, config)
    work = federated_work(measured, root, download, session)
    return planned_runs(measured, seeds, work), work, notes


def _carry_out(
    runs: Sequence[PlannedRun],
    options: RunOptions,
    jobs: int | None,
    listener: StudyProgress,
    ended: Ended,
    session: Session,
) -> None:
    """Calls `ended` with the finished runs, and then with the others as they end."""
    assert options.after is not None
    due = []
    for run in runs:
        if not _finished(path := options.runs / run.key):
            due.append(DueRun(run))
            continue
        try:
            line = replace(row_of_run(Run.open(path)), reason=options.after(run, path, session))
        except Exception as error:  # a damaged file: the other runs are independent of it
            if disk_full(error):
                raise
            line = failed_row(run.digest, run.key, reason_of(error))
        ended(run, line)
    if not due:
        return
    if jobs is None:
        jobs = _jobs([one.run for one in due], session, options.data_dir, options.download)
    with closing(started(options, jobs, None, listener, due, session)) as workers:
        workers.carry_out(due, ended)


def _jobs(runs: Sequence[PlannedRun], session: Session, root: Path | None, download: bool) -> int:
    """How many runs cores and memory allow at once; 0, for this process, if it is one."""
    found = RunCosts(session, root, download, timed=False).of(runs[0].settings)
    on_gpus = runs_on_gpus([(run, found.gpu) for run in runs])
    number = default_jobs(max(map(cores_of, runs)), found.memory, len(runs), on_gpus)
    return number if number > 1 else 0


def _answered(directory: Path, about: dict[str, Any], report: bool) -> CostResult:
    if "roles" in about:
        _write(directory, found := party_answer(directory, about))
        if report:
            write_party_page(directory, found)
        return CostResult(directory, found)
    answer = cost_answer(directory, about)
    _write(directory, answer)
    write_labels(directory / FILE, answer["suspicious"] or [])
    if report:
        for run in about["runs"]:
            # Again: the bound of a run is drawn in its page, and was not there when the page was written.
            if run["role"] in ("federated", "iid") and (directory / run["name"] / "config.toml").exists():
                write_report(directory / run["name"])
        write_cost_page(directory, answer)
    return CostResult(directory, answer)


def few_seeds(seeds: int, runs: int) -> list[str]:
    """What so few seeds cannot answer, said before the runs; empty for enough of them.

    >>> few_seeds(3, 12), few_seeds(2, 8)[0][:49]
    ([], '2 seeds give differences without an interval: the')
    """
    if seeds >= LEAST_SEEDS:
        return []
    begin = "1 seed gives" if seeds == 1 else f"{seeds} seeds give"
    return [
        f"{begin} differences without an interval: they cannot say whether a difference is chance. "
        f"Take --seeds {LEAST_SEEDS} or more for that ({runs // seeds * LEAST_SEEDS} runs instead of {runs}; "
        "finished runs are kept)."
    ]


def refuse_baseline(config: Config, source: Source) -> None:
    """Raises `ConfigError` if the algorithm is one of the baselines."""
    name = config.algorithm["name"]
    if name in _BASELINES:
        raise ConfigError(
            f"'{name}' is a baseline of the federated run",
            where=source.locate("algorithm.name"),
            hint="give the file of the federated run: its baselines are run besides it",
        )


def measured_at_clients(source: Source, config: Config) -> tuple[Source, list[str]]:
    """The settings with all clients measured on images of their own, and a sentence for each setting changed."""
    data, notes = config.data, []
    changes: dict[str, dict[str, Any]] = {"data": {}, "evaluation": {}}
    if data.validation_from != "client" or not data.validation:
        share = data.validation or HELD_OUT
        changes["data"] = {"validation": share, "validation_from": "client"}
        notes.append(
            f"Each client holds out {100 * share:g} % of its images and is measured on them "
            f"(data.validation = {share:g}, data.validation_from = 'client')."
        )
    if config.evaluation.clients != "all":
        changes["evaluation"]["clients"] = "all"
    if config.evaluation.overlap:
        changes["evaluation"]["overlap"] = False
        notes.append("evaluation.overlap is off: the clients are measured too.")
    values = dict(source.values)
    for table, settings in changes.items():
        values[table] = {**values.get(table, {}), **settings}
    return replace(source, values=values), notes


def federated_work(
    source: Source, root: Path, download: bool, session: Session | None = None
) -> dict[str, Any]:
    """How much the federated run trains, and what the centralized run has to train in a round to match it.

    Keys: rounds; clients and cohort (of a round); images (of all clients, held-out images aside), images_per_round,
    passes (over all images, in the whole run), batch and steps (of a centralized round); test_images; largest_class,
    the share of each client's held-out images in its most frequent training class; and of the settings algorithm, lr,
    norm (None for a model without the setting) and validation; test_drawn, whether the test images are drawn from
    the clients' own images; keeps_images, whether the pages have test images.
    """
    values = {**source.values, "engine": {"name": "inline"}}  # no run, so no choice of an engine
    built = build(plan_of(replace(source, values=values)), root, download, session=session)
    with closing(built.engine):
        config, federation = built.config, built.federation
        pool = int(federation.sizes.sum())
        images = images_of_the_run(config, federation, built.clients_per_round)
        batch = config.local.batch(pool)
        return {
            "rounds": config.rounds,
            "clients": federation.clients,
            "cohort": built.clients_per_round or federation.clients,
            "images": pool,
            "images_per_round": round(images / config.rounds),
            "passes": images / pool,
            "batch": batch,
            "steps": max(1, round(images / config.rounds / batch)),
            "test_images": federation.held["@test"],
            "largest_class": largest_classes(built.client_data, built.partition.ids),
            "algorithm": config.algorithm["name"],
            "lr": config.local.lr,
            "norm": config.model.get("norm"),
            "validation": config.data.validation,
            # Other seeded datasets are synthetic: their test images are not those of a client.
            "test_drawn": built.client_data.dataset.seeded and config.data.dataset["name"] in FORMATS,
            "keeps_images": config.keeps_images,
        }


def largest_classes(client_data: ClientDatasets, names: Sequence[str]) -> dict[str, float]:
    """The share of each client's held-out images in its most frequent training class; empty without classes."""
    shares = {}
    for client, name in enumerate(names):
        counts, held_out = client_data.class_counts(client), client_data.data_of(client).validation
        if counts is None or held_out is None or not len(held_out.read_targets()) or not counts.sum():
            continue
        shares[name] = float((held_out.read_targets() == counts.argmax()).double().mean())
    return shares


def planned_runs(source: Source, seeds: int, work: Mapping[str, Any]) -> list[PlannedRun]:
    """All runs, seed by seed."""
    config = read_config(source.values, source.locate)
    roles = [role for role in ROLES if not (role == "iid" and config.data.reassign)]
    fixed = {"data": config.seeds.data, "partition": config.seeds.partition}
    runs = []
    for extra in range(seeds):
        seed = config.seed + extra
        own = config.seeds.model_dump() if extra == 0 else fixed
        settings = {**resolved_settings(source, config), "seed": seed, "seeds": own}
        each = (
            party_settings(settings, config, work)
            if "sets" in work
            else ((role, of_role(settings, config, role, work)) for role in roles)
        )
        for role, made in each:
            name = f"{role}-seed{seed}"
            runs.append(PlannedRun(role, {}, {}, "final", seed, made, name, folder=name))
    return runs


def resolved_settings(source: Source, config: Config) -> dict[str, Any]:
    """The settings after `--set algorithm.name=...` and its like: without what belonged to the name before."""
    if not source.renamed:
        return dict(source.values)
    given = plain(plan(config, source).config)
    return {key: value for key, value in given.items() if key != "seeds"}


def of_role(
    settings: Mapping[str, Any], config: Config, role: str, work: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of the run with this role."""
    made = {**settings, "name": f"{config.name}-{role}"}
    if role == "iid":
        made["data"] = {**made["data"], "reassign": True}
    if role not in _BASELINES:
        return made
    select = config.select or default_table("select", config.algorithm)
    made = {key: value for key, value in made.items() if key not in SLOTS}
    made["algorithm"] = {"name": role}
    if role == "local-only":
        evaluation = {key: value for key, value in made["evaluation"].items() if key != "train"}
        return {**made, "select": select, "evaluation": evaluation}
    local = {k: v for k, v in made["local"].items() if k not in _NOT_POOLED}
    made["local"] = {**local, "steps": work["steps"]}
    return made


def refuse_other_settings(directory: Path, runs: Sequence[PlannedRun]) -> None:
    """Raises `RunDirectoryError` if `directory` has a run of one of the names with other settings."""
    for run in runs:
        path = directory / run.key
        refuse_link(path)
        if not (path / "config.toml").is_file():
            continue
        different = different_settings(run.settings, path)
        if different:
            key, there, now = different[0]
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise RunDirectoryError(
                f"this run has other settings: {key} is {there!r} there and {now!r} now{more}",
                where=str(path),
                hint="name another directory with --out, or delete this one",
            )


def _finished(path: Path) -> bool:
    with suppress(FedlensError):  # a damaged one is a failed run when it is resumed
        return (path / "config.toml").is_file() and Run.open(path).status == "finished"
    return False


def why_untested(
    run: PlannedRun, directory: Path, session: Session, *, root: Path, work: Mapping[str, Any]
) -> str | None:
    """Tests the clients' own models of a finished run on the test images; why not, or None if it is done.

    A run with one model for all has tested it, and is left alone. Raises an error of a full disk.
    """
    made = Run.open(directory)
    if made.status != "finished" or made.split() != "validation":
        return None
    tests = made.read_client_tests()
    if tests is not None and tests.get("round") == made.rounds_done:
        return None
    if why := too_costly(work["clients"], work["test_images"], work["passes"] * work["images"]):
        return why
    try:
        write_client_tests(made, Source(dict(run.settings)), root, session)
    except Exception as error:  # the run is whole without this measure
        if disk_full(error):
            raise
        return error.what if isinstance(error, FedlensError) else told(error)
    return None


def _write_begun(directory: Path, about: Mapping[str, Any]) -> None:
    """Writes the runs so far into cost.json, but not over an earlier answer: that stays until the next one is there."""
    with suppress(RunDirectoryError):  # a damaged file is written anew
        if "sentences" in (read_json(directory / "cost.json") or {}):
            return
    _write(directory, about)


def _write(directory: Path, content: Mapping[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(as_json(content), indent=2, allow_nan=False, ensure_ascii=False)
    write_atomically(directory / "cost.json", f"{text}\n".encode())


def party_work(source: Source, root: Path, download: bool, session: Session) -> dict[str, Any]:
    """Which parties train together, by role: the label party alone, each set with it, and all on pooled pixels.

    Keys: `roles`, each in words; `alone` and `all`, two of them; `sets`, the parties of each; `pooled`, the number of
    examples that all parties hold, where their inputs are windows of one image. Of more than four parties, the sets
    are one more, all but one, and all.
    """
    built = build(plan_of(source), root, download, session=session)
    built.engine.close()
    facts, partition = built.federation.parties, built.partition
    assert facts is not None
    own, taking = facts.labels_at, list(built.algorithm.candidates(built.federation))
    others = [party for party in taking if party != own]
    sizes = range(len(others) + 1) if len(others) <= 3 else (0, 1, len(others) - 1, len(others))
    sets = [sorted([own, *chosen]) for size in sizes for chosen in combinations(others, size)]
    roles = {
        _role(parties): ("party " if len(parties) == 1 else "parties ")
        + ", ".join(facts.names[party] for party in parties)
        for parties in sets
    }
    roles[_role(sets[0])] += ", which has the labels"
    found = {"roles": roles, "alone": _role(sets[0]), "all": _role(taking), "sets": sets, "pooled": None}
    if facts.windows is None or len(taking) < len(facts.names):
        return found
    pooled = int(partition.trained_sizes(taking)[0])
    return {**found, "roles": {**roles, POOLED: "all, as whole images in one place"}, "pooled": pooled}


def _role(parties: Sequence[int]) -> str:
    return "parties-" + "-".join(map(str, parties))


def party_settings(
    settings: Mapping[str, Any], config: Config, work: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The role and the settings of each run: with `algorithm.parties`, and centralized on as many whole images."""
    for parties in work["sets"]:
        role, algorithm = _role(parties), {**config.algorithm, "parties": parties}
        yield role, {**settings, "name": f"{config.name}-{role}", "algorithm": algorithm}
    if work["pooled"] is not None:
        iid = {"name": "iid", "clients": 1, "sizes": [work["pooled"]]}
        data = {**{k: v for k, v in settings["data"].items() if k != "parties"}, "partition": iid}
        more = {"name": f"{config.name}-{POOLED}", "data": data, "algorithm": {"name": "centralized"}}
        yield POOLED, {**settings, **more}
