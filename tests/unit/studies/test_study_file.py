"""What a study file can say, and the sentence for each mistake in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlens.base.errors import ConfigError
from fedlens.results.words import tuning_words
from fedlens.studies.study_file import read_study
from fedlens.studies.study_plan import StudyPlan

BASE = 'base = "digits"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "study.toml"
    path.write_text(text)
    return path


def refused(folder: Path, text: str, scale: str | None = None) -> str:
    """The error of a study, with its path shortened."""
    path = written(folder, text)
    with pytest.raises(ConfigError) as error:
        StudyPlan.load(path, scale)
    return str(error.value).replace(str(path), "study.toml")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sedes = [1]", "unknown setting 'sedes' (study.toml, line 2: sedes); did you mean 'seeds'."),
        ("seeds = [0, 0]", "the seed 0 twice: the same run would count as two (study.toml, line 2: seeds)."),
        ("seeds = []", "'seeds' is [], but must have at least 1 item, not 0 (study.toml, line 2: seeds)."),
        ('name = "../x"', "(study.toml, line 2: name)."),
        ("same_data = 1", "'same_data' is 1, but must be true or false (study.toml, line 2: same_data)."),
        ("target = [true]", "'target' is [True], but must be a number (study.toml, line 2: target)."),
        ('[methods.""]', "the table [methods] must not have a table without a name (study.toml, line 2: methods)."),
        ('[grid]\n"local.lr" = [{ name = "x" }]', "'lr' is {'name': 'x'}, but must be a number (study.toml, line 3"),
        ("[methods.a]\nbase = { rounds = 1 }", "'data' is missing (study.toml, line 3: [methods.a] base data)"),
        ("threads = true", "'threads' is true, but must be a number (study.toml, line 2: threads)."),
        ("[cases]", "must have at least one named table below it (study.toml, line 2: cases)."),
        ("[grid]", 'such as "local.lr" = [0.1, 0.3] (study.toml, line 2: grid).'),
        ('[grid]\n"local.lr" = []', "must have at least one value (study.toml, line 3: [grid] local.lr)."),
        ("[grid]\nlocal.lr = [1, 1]", "the value 1 twice (study.toml, line 3: [grid] local.lr)."),
        (
            '[grid]\n"local.lr" = 1',
            'is 1, but must be a list (study.toml, line 3: [grid] local.lr); write a list, e.g. "local.lr" = [1].',
        ),
        (
            '[grid]\n"local.lrr" = [1]',
            "unknown setting 'lrr' (study.toml, line 3: [grid] local.lrr); did you mean 'lr'.",
        ),
        (
            '[grid]\nlr = [1]',
            "unknown setting 'lr' (study.toml, line 3: [grid] lr); did you mean 'local.lr'.",
        ),
        (
            '[grid]\n"local.lr" = ["0.1"]',
            "'local.lr' is '0.1', but must be a number (study.toml, line 3: [grid] local.lr); remove the quotes.",
        ),
        ('[grid]\n"local.lr" = [0.1, -1]', "must be greater than 0 (study.toml, line 3: [grid] local.lr)."),
        ('[grid]\n"seed" = [1]', "must not set 'seed': the list 'seeds' has the seeds of the runs"),
        ("[random]\nseed = 3\nrounds = { low = 1, high = 2 }", "must have the number of points"),
        ("[random]\nnumber = 3", "must name a setting and its range"),
        ("[random]\nnumber = 3\nrounds = { low = 3, high = 2 }", "must have a low below high, not 3 and 2"),
        ("[random]\nnumber = 3\nrounds = { lo = 3 }", "line 4: [random] rounds.lo); did you mean 'low'."),
        (
            "[random]\nnumber = 3\nrounds = { choices = [1, 2] }",
            "the ranges have fewer than 3 different points (study.toml, line 3: [random] number)",
        ),
        ("[methods.a]\nst = {}", "'st' (study.toml, line 3: [methods.a] st); did you mean 'set'."),
        (
            '[methods.a]\npoints = [{ "local.lr" = 1 }]\ngrid = { rounds = [1] }',
            "the table [methods.a] must have either points, or grid and random",
        ),
        (
            '[methods.a]\nset = { "algorithm" = { name = "fedprox", muu = 1 } }',
            "has no setting 'muu' (study.toml, line 3: [methods.a.set] algorithm); did you mean 'mu'.",
        ),
        ("[stop]\nhalving = 3", "must have 'first', the rounds of the first rung, with halving"),
        ("[stop]\nhalving = 3\nfirst = 1", "chooses among tuned points (study.toml, line 3: [stop] halving)"),
        ("[scales.smoke]\nsede = 2", "(study.toml, line 3: [scales.smoke] sede); did you mean 'seeds'."),
        ("[[tables]]\nkin = 2", 'entry 1 must have a kind, such as kind = "summary"'),
        ('metric = "accuracy"', "a split and a value (study.toml, line 2: metric); write 'test_accuracy'."),
        (
            'metric = "train_loss"\n[grid]\nrounds = [1, 2]\n[tune]',
            "cannot be tuned on validation data (study.toml, line 2: metric); write 'test_loss'.",
        ),
        ('seeds = "0-4"', "must be a list (study.toml, line 2: seeds); write a list, such as seeds = [0, 1, 2]."),
        ('target = "x"', "must be a list (study.toml, line 2: target); write a list, such as target = [0.5, 0.75]."),
        (
            "seeds = [0, 1, 2]\n[grid]\nrounds = [1, 2]\n[tune]\nseeds = [5, 2, 1]",
            "the seeds 2, 1 are in tune.seeds and in seeds, so the same seed would choose the settings and judge them "
            "(study.toml, line 6: [tune] seeds); set other seeds",
        ),
        ('baseline = "fedavgm"', "is not a method of the study (study.toml, line 2: baseline); did you mean 'fedavg'."),
        ('set = { "engine.workers" = 4 }', "the engine 'inline' has no setting 'workers' (study.toml, line 2: [set]"),
        (
            "[clock]\nup_mbit = 2",
            "the setting 'clock' was removed (study.toml, line 2: clock); remove it, and \"hours\" of tables",
        ),
        ("keep_recordings = true", "remove it: 'fedlens analyze RUN --record ROUNDS' makes"),
        ("[tune]\nwiden = true", "'tune.widen' was removed (study.toml, line 3: [tune] widen); remove it: a star"),
        ("[tune]\nsearch = 'optuna'", "'tune.search' was removed (study.toml, line 3: [tune] search); remove"),
        ("[scales.smoke.clock]\nup_mbit = 2", "was removed (study.toml, line 2: [scales.smoke] clock)"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in refused(tmp_path, BASE + text)


def test_a_base_that_cannot_be_read_is_named_with_its_line(tmp_path: Path) -> None:
    assert refused(tmp_path, 'base = "digit"') == (
        "the base cannot be read: unknown recipe 'digit' (study.toml, line 1: base); did you mean 'digits'."
    )
    (tmp_path / "base.toml").write_text("rounds = ")
    assert "the file is not valid TOML" in refused(tmp_path, 'base = "base.toml"')


def test_a_base_starts_at_the_folder_of_the_study(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(
        'rounds = 3\nmodel = "linear"\nlocal = { lr = 0.1 }\n[data]\ndataset = "digits"\n'
        'partition = { name = "iid", clients = 4 }\n'
    )
    plan = StudyPlan.load(written(tmp_path, 'base = "base.toml"'))
    assert plan.runs[0].settings["rounds"] == 3


def test_paths_of_data_and_weights_start_at_the_folder_of_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "study"
    (folder / "images").mkdir(parents=True)
    (folder / "start.safetensors").touch()
    dataset = '"data.dataset" = { name = "image-folder", path = "images" }'
    inline = '[base]\nrounds = 3\nmodel = { name = "linear", weights = "start.safetensors" }\nlocal = { lr = 0.1 }\n'
    text = f"{inline}[base.data]\ndataset = {{ name = 'digits' }}\n"
    text += f"partition = {{ name = 'iid', clients = 4 }}\n[set]\n{dataset}\n"
    digests = set()
    for place, file in [(tmp_path, Path("study/study.toml")), (folder, Path("study.toml"))]:
        (folder / "study.toml").write_text(text)
        monkeypatch.chdir(place)
        (run,) = StudyPlan.load(file).runs
        assert run.settings["data"]["dataset"]["path"] == str(folder / "images")
        assert run.settings["model"]["weights"] == str(folder / "start.safetensors")
        digests.add(run.digest)
    assert len(digests) == 1


def test_an_error_of_the_base_names_the_base(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("rounds = 3\nlocl = 4\n")
    path = tmp_path / "base.toml"
    assert f"{path}, line 2: locl" in refused(tmp_path, 'base = "base.toml"')


def test_a_scale_takes_the_place_of_settings(tmp_path: Path) -> None:
    text = BASE + (
        'seeds = [0, 1]\nset = { rounds = 20, "local.lr" = 0.2 }\n[grid]\n"data.partition.clients" = [5, 10]\n'
        '[methods.a]\n[methods.b]\nset = { "algorithm.name" = "scaffold" }\n'
        '[scales.smoke]\nseeds = [7]\nset = { rounds = 2 }\ndata = "digits"\n'
        '[scales.smoke.grid]\n"data.partition.clients" = [5]\n'
        "[scales.laptop]\nseeds = [3]\n"
    )
    plan = StudyPlan.load(written(tmp_path, text), "smoke")
    assert [(run.seed, run.settings["rounds"], run.settings["local"]["lr"]) for run in plan.runs] == [
        (7, 2, 0.2)
    ] * 2
    assert plan.info({}).cases == [{"data.partition.clients": 5}]
    assert ["seeds", "2", "1"] in plan.info({}).smaller
    whole = StudyPlan.load(written(tmp_path, text))
    assert (whole.scale, len(whole.runs), whole.info({}).smaller) == ("paper", 8, [])
    assert StudyPlan.load(written(tmp_path, text), "paper").info({}).entries == whole.info({}).entries
    assert "has no scale 'smok' (study.toml); did you mean 'smoke'" in refused(tmp_path, text, "smok")


def test_a_mistake_in_a_scale_is_named_with_its_line(tmp_path: Path) -> None:
    text = BASE + '[grid]\n"local.lr" = [0.1]\n[scales.smoke.grid]\n"local.lr" = [-1]\n'
    assert "(study.toml, line 5: [grid] local.lr)" in refused(tmp_path, text, "smoke")


def test_the_name_is_that_of_the_file(tmp_path: Path) -> None:
    assert read_study(written(tmp_path, BASE)).settings.name == "study"
    assert read_study(written(tmp_path, f'name = "x"\n{BASE}')).settings.name == "x"
    path = tmp_path / "momentum 2.toml"
    path.write_text(BASE)
    assert read_study(path).settings.name == "momentum 2"
    assert read_study({"base": "digits"}).settings.name == "study"


def test_settings_in_python_are_those_of_a_file(tmp_path: Path) -> None:
    text = BASE + 'seeds = [3]\n[methods.b]\ngrid = { "local.lr" = [0.1, 0.3] }\n'
    values = {"base": "digits", "seeds": [3], "methods": {"b": {"grid": {"local.lr": [0.1, 0.3]}}}}
    assert StudyPlan.load(written(tmp_path, text)).runs == StudyPlan.load(values).runs
    with pytest.raises(
        ConfigError, match=r"^unknown setting 'lrr' \(\[grid\] local.lrr\); did you mean 'lr'\.$"
    ):
        StudyPlan.load({"base": "digits", "grid": {"local.lrr": [1]}})


def test_clients_are_measured_on_what_they_hold_out_so_tuning_may_read_it(tmp_path: Path) -> None:
    text = (
        'metric = "clients_accuracy_mean"\n'
        'set = { "data.validation" = 0.2, "data.validation_from" = "client", "evaluation.clients" = "all" }\n'
        '[grid]\n"local.lr" = [0.1, 0.3]\n[tune]\n'
    )
    info = StudyPlan.load(written(tmp_path, BASE + text)).info({})
    assert (info.metric, info.tuning["share"]) == ("clients_accuracy_mean", 0.2)


def test_captions_name_the_share_that_tuning_runs_hold_out(tmp_path: Path) -> None:
    text = '[methods.a]\ngrid = { "local.lr" = [0.1, 0.3] }\n[tune]\nshare = 0.3\n'
    data = '{ dataset = "digits", validation = 0.04, partition = { name = "iid", clients = 2 } }'
    base = f'{{ rounds = 2, data = {data}, model = "linear" }}'
    for first, share in ((BASE, 0.3), (f"base = {base}\n", 0.04)):
        info = StudyPlan.load(written(tmp_path, first + text)).info({})
        assert f"on {100 * share:g} % of the training data" in tuning_words(info)[0]
