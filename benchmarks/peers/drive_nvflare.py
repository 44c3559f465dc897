"""Rounds of NVFlare's simulator with its FedAvg: a site for each process, and nothing evaluated.

The simulator runs every site in a process of its own, and where there are more sites than processes it starts a
process anew for every task, which takes seconds. So there are as many sites as processes, and they stay: each trains
its share of the round's cohort, client after client, and hands back their mean, which FedAvg weighs by their number.
NVFlare samples among sites; the cohort is drawn here, alike in every site. A site that finds no task asks again after
half a second, and the server looks five times a second for tasks that are done: neither can be set, and both are a
part of the round. The pauses that can be set are short.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import traceback
from pathlib import Path

import turns

CONFIG = {"format_version": 2, "components": []}


def write_job(job: Path, sites: int) -> None:
    """The folder that the simulator reads: what the server runs, and what every site does."""
    config = job / "app" / "config"
    config.mkdir(parents=True)
    meta = {"name": "rounds", "resource_spec": {}, "min_clients": sites, "deploy_map": {"app": ["@ALL"]}}
    (job / "meta.json").write_text(json.dumps(meta))
    workflow = {"id": "fedavg", "path": "nvflare_round.InTurn", "args": {"sites": sites}}
    server = {"server": {"task_request_interval": 0.01}, "workflows": [workflow]}
    (config / "config_fed_server.json").write_text(json.dumps(CONFIG | server))
    executor = {"tasks": ["train"], "executor": {"path": "nvflare_round.Site", "args": {"sites": sites}}}
    (config / "config_fed_client.json").write_text(json.dumps(CONFIG | {"executors": [executor]}))


def allow_own_classes(workspace: Path) -> None:
    """Lets the simulator build the classes that this peer's own module has."""
    local = workspace / "local"
    local.mkdir(parents=True)
    allowed = {"format_version": 2, "class_allow_list": ["nvflare_round."]}
    (local / "resources.json.default").write_text(json.dumps(allowed))


def main() -> None:
    """Rounds of FedAvg for as long as they are asked for."""
    asked = turns.arguments("NVFlare")
    os.environ.update(
        FEDLENS_WORKLOAD=asked.workload,
        FEDLENS_THREADS=str(asked.threads),
        PYTHONPATH=str(Path(__file__).parent),  # for the sites
    )
    import nvflare_round
    from nvflare.private.fed.app.simulator.simulator_runner import SimulatorRunner
    from nvflare.private.fed.app.utils import kill_child_processes

    nvflare_round.InTurn.line = turns.Turns()
    sites = min(asked.processes, nvflare_round.workload().cohort)
    home = Path(tempfile.mkdtemp(prefix="nvflare-"))
    write_job(home / "rounds", sites)
    allow_own_classes(home / "run")
    status = 1
    try:
        status = SimulatorRunner(
            str(home / "rounds"), str(home / "run"), n_clients=sites, threads=sites, log_config="ERROR"
        ).simulator_run_main()
    except Exception:
        traceback.print_exc()
    kill_child_processes(os.getpid())
    os.chdir(tempfile.gettempdir())
    shutil.rmtree(home, ignore_errors=True)
    os._exit(status)  # its threads would keep the process


if __name__ == "__main__":
    main()
