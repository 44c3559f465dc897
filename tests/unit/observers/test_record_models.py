"""Recordings of local models: the average of them is the next model, and recording changes no bit of a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.api import Experiment, resume
from fedlens.base.errors import ConfigError, RunDirectoryError
from fedlens.observers.read_recordings import RecordedRound, intact_round, recorded_rounds
from fedlens.run.rundir import RunDir

pytestmark = pytest.mark.usefixtures("quick_workers")


def experiment(*changes: str, **tables: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": 3,
        "data": {"dataset": "digits", "partition": {"name": "dirichlet", "clients": 8, "alpha": 0.5}},
        "model": {"name": "small-cnn", "norm": "batch"},
        "select": {"name": "uniform", "clients_per_round": 3},
        "local": {"lr": 0.1, "steps": 2, "batch_size": 16},
        "engine": {"name": "inline"},
    }
    return Experiment(**{**settings, **tables}).with_settings(*changes)


EVERY = "record.local_models={every=1}"


def rounds_of(path: Path) -> list[RecordedRound]:
    return recorded_rounds(RunDir.open(path))


@pytest.mark.parametrize("algorithm", ["fedavg", "fednova", "scaffold", "fedprox", "moon"])
def test_the_weighted_mean_of_the_local_models_is_the_next_model(algorithm: str, tmp_path: Path) -> None:
    extra = (
        {"model": {"name": "projection", "base": {"name": "mlp", "hidden": 8}}} if algorithm == "moon" else {}
    )
    run = experiment(EVERY, f"algorithm={algorithm}", "rounds=2", **extra).run(tmp_path / "run", report=False)
    for recorded in rounds_of(run.directory):
        before, after = recorded.before(), recorded.after()
        models = [recorded.local_model(reply, before) for reply in recorded.replies]
        weights = torch.tensor([reply.weight for reply in recorded.replies], dtype=torch.float64)
        assert len(models) == 3
        assert len({client.client for client in recorded.replies}) == 3
        for name, value in after.items():
            if not value.is_floating_point():
                continue
            mean = sum(w * m[name].double() for w, m in zip(weights, models, strict=True)) / weights.sum()
            if algorithm != "fednova" or "running" in name:
                torch.testing.assert_close(value.double(), mean, rtol=1e-5, atol=1e-6)
            assert not torch.equal(value, before[name])


def test_a_local_model_is_what_the_client_trained(tmp_path: Path) -> None:
    """One client, whose model is the next global model; of FedNova's scaled update, too."""
    for algorithm in ("fedavg", "fednova"):
        run = experiment(EVERY, f"algorithm={algorithm}", "select.clients_per_round=1", "rounds=1").run(
            tmp_path / algorithm, report=False
        )
        (recorded,) = rounds_of(run.directory)
        model = recorded.local_model(recorded.replies[0])
        for name, value in recorded.after().items():
            torch.testing.assert_close(model[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("engine", "clients"),
    [
        ("inline", 3),
        ("processes", 70),
        pytest.param("inline", 70, marks=pytest.mark.nightly),
        pytest.param("vectorized", 70, marks=pytest.mark.nightly),
    ],
)
def test_recording_changes_no_bit(engine: str, clients: int, tmp_path: Path) -> None:
    """From 64 clients on, workers sum the replies of neighbouring clients."""
    tables = {
        "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 80}},
        "model": {"name": "mlp", "hidden": 8},
        "select": {"name": "uniform", "clients_per_round": clients},
        "engine": {"name": engine, **({"workers": 2} if engine == "processes" else {})},
        "rounds": 2,
    }
    plain = experiment(**tables).run(tmp_path / "plain", report=False)
    recorded = experiment(EVERY, "record.updates.every=2", **tables).run(tmp_path / "recorded", report=False)
    files = [run.directory / "model.safetensors" for run in (plain, recorded)]
    assert files[0].read_bytes() == files[1].read_bytes()
    rounds = rounds_of(recorded.directory)
    assert [found.round for found in rounds] == [1, 2]
    assert all(len(found.replies) == clients for found in rounds)
    first, second = rounds[1].replies[0], rounds[1].replies[-1]
    for reply in (first, second):
        model, update, before = rounds[1].local_model(reply), rounds[1].sent(reply), rounds[1].before()
        for name, value in update.items():
            torch.testing.assert_close(before[name] - model[name], value, rtol=1e-4, atol=1e-6)
    with pytest.raises(RunDirectoryError, match=r"record\.updates"):
        rounds[0].sent(rounds[0].replies[0])


def test_updates_hold_all_that_clients_send(tmp_path: Path) -> None:
    run = experiment("record.updates={rounds=[2]}", "algorithm=scaffold").run(tmp_path / "run", report=False)
    (recorded,) = rounds_of(run.directory)
    assert recorded.round == 2
    assert recorded.sent(recorded.replies[0], "variate")
    with pytest.raises(RunDirectoryError, match=r"record\.local_models"):
        recorded.local_model(recorded.replies[0])


def test_a_resumed_run_records_the_same_files(tmp_path: Path) -> None:
    whole = experiment(EVERY).run(tmp_path / "whole", report=False)
    experiment(EVERY).run(tmp_path / "half", report=False, until=1)
    broken = tmp_path / "half" / "recordings" / "round-000002"
    broken.mkdir()
    (broken / "before.safetensors").write_bytes(b"half of a file")
    assert [found.round for found in rounds_of(tmp_path / "half")] == [1]
    resume(tmp_path / "half", report=False)
    names = [
        path.relative_to(whole.directory) for path in sorted((whole.directory / "recordings").rglob("*.*"))
    ]
    assert len(names) == 3 * (3 + 3)
    for name in names:
        files = [path / name for path in (whole.directory, tmp_path / "half")]
        if name.suffix == ".json":
            contents = [json.loads(file.read_text()) | {"run": None} for file in files]
            assert contents[0] == contents[1]
        else:
            assert files[0].read_bytes() == files[1].read_bytes()


def test_what_is_recorded_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    experiment().run(tmp_path / "run", report=False, until=1)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text() + "\n[record.local_models]\nrounds = [3]\n")
    text = config.read_text()
    if text.count("[record]"):
        config.write_text(text)
    resume(tmp_path / "run", report=False)
    assert [found.round for found in rounds_of(tmp_path / "run")] == [3]


def test_a_corrupt_recording_is_named(tmp_path: Path) -> None:
    run = experiment(EVERY, "rounds=1").run(tmp_path / "run", report=False)
    (recorded,) = rounds_of(run.directory)
    path = recorded.folder / recorded.replies[0].file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(RunDirectoryError, match=r"slot-00000.safetensors .* corrupt: SHA-256 mismatch"):
        recorded.local_model(recorded.replies[0])
    manifest = recorded.folder / "recording.json"
    content = json.loads(manifest.read_text())
    del content["clients"]
    manifest.write_text(json.dumps(content))
    with pytest.raises(RunDirectoryError, match=r"recording.json of the recording is corrupt"):
        rounds_of(run.directory)


def test_a_manifest_that_is_not_what_was_written_is_named_and_recorded_again(tmp_path: Path) -> None:
    run = experiment(EVERY, "rounds=1").run(tmp_path / "run", report=False)
    (recorded,) = rounds_of(run.directory)
    manifest = recorded.folder / "recording.json"
    content = json.loads(manifest.read_text())
    for wrong, what in (
        ([], "it does not contain a JSON object"),
        ({**content, "round": 2}, "it is of round 2"),
    ):
        manifest.write_text(json.dumps(wrong))
        with pytest.raises(
            RunDirectoryError, match=f"^recording.json (of the recording )?is corrupt: {what}"
        ):
            rounds_of(run.directory)
        assert intact_round(RunDir.open(run.directory), 1) is None
    first, *others = content["clients"]
    for file, what in (
        ("../../../x", "names the file '../../../x'"),
        ([], r"names the file '\[\]'"),
        ("exchange-7-slot-00000.safetensors", "has no SHA-256 of exchange-7"),
    ):
        manifest.write_text(json.dumps({**content, "clients": [{**first, "file": file}, *others]}))
        with pytest.raises(RunDirectoryError, match=f"recording.json .* corrupt: it {what}"):
            rounds_of(run.directory)
        assert intact_round(RunDir.open(run.directory), 1) is None


def test_a_recording_of_another_run_is_named(tmp_path: Path) -> None:
    run = experiment(EVERY, "rounds=1").run(tmp_path / "run", report=False).directory
    environment = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps({**environment, "started": "2020-01-01T00:00:00+00:00"}))
    with pytest.raises(RunDirectoryError, match="the recording is of another run, which was started at"):
        rounds_of(run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["record.local_models={rounds=[5]}"], "round 5 is to be recorded, but the run has 3 rounds"),
        (["record.local_models={}"], r"\[record.local_models\] names no round"),
        (["record.updates={evry=1}"], "did you mean 'every'"),
        ([EVERY, "algorithm=centralized"], "'centralized' trains on the pooled data and has no clients"),
        (["record.updates={every=1}", "algorithm=centralized"], "'centralized' .* has no clients to record"),
        (
            [EVERY, "algorithm=fedbn", "data.validation=0.2", "data.validation_from=client"],
            "'fedbn' hold no local models: each client keeps a part",
        ),
        ([EVERY, "algorithm=iceadmm"], "'iceadmm' hold no local models: clients send something else"),
    ],
)
def test_what_cannot_be_recorded_is_refused(changes: list[str], message: str, tmp_path: Path) -> None:
    tables: dict[str, Any] = {"select": None} if "algorithm=centralized" in changes else {}
    if "algorithm=iceadmm" in changes:
        tables["local"] = {"lr": 0.1, "epochs": 1, "batch_size": 16}
    with pytest.raises(ConfigError, match=message):
        experiment(*changes, **tables).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_table_that_fits_no_round_of_the_run_is_said(tmp_path: Path) -> None:
    run = experiment("record.local_models={every=5}").run(tmp_path / "run", report=False)
    assert (
        "record.local_models records nothing: it asks for every 5 rounds, and the run has 3"
        in (run.summary["notes"])
    )


def test_the_price_leaves_out_what_stays_at_the_clients(tmp_path: Path) -> None:
    """MoCo's queue is in the model, and in no reply."""
    data = {"dataset": {"name": "digits"}, "partition": {"name": "iid", "clients": 4}, "augment": ["flip"]}
    run = Experiment(
        rounds=1,
        model="mlp",
        data=data,
        task={"name": "moco-v2", "queue": 4096},
        local={"lr": 0.001, "steps": 1, "batch_size": 16},
        record={"updates": {"every": 1}},
        engine="inline",
    ).run(tmp_path / "run", report=False)
    (note,) = [note for note in run.summary["notes"] if "recording" in note]
    size = sum(path.stat().st_size for path in (run.directory / "recordings").rglob("*.safetensors"))
    assert abs(float(note.split()[-6].replace(",", "")) * 1e6 - size) < 0.2 * size


def test_the_price_is_said_before_the_run(tmp_path: Path) -> None:
    run = experiment("record.local_models={rounds=[1, 2]}").run(tmp_path / "run", report=False)
    (note,) = [note for note in run.summary["notes"] if "recording" in note]
    assert note.startswith("recording 2 of 3 rounds takes about ")
    size = sum(path.stat().st_size for path in (run.directory / "recordings").rglob("*.safetensors"))
    assert abs(float(note.split()[-6].replace(",", "")) * 1e3 - size) < 0.2 * size
