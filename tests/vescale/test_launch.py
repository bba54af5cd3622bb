"""The shell scripts: what they install, once, and the commands they start. Stand-ins install nothing for real."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from waiting import wait_for

from vescale.train import points

ROOT = Path(__file__).parents[2]
# Stands for python3: notes how it was called; `-m venv` copies it, as a virtual environment's interpreter would be.
PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
*"import ensurepip"*) exit "${NO_VENV:-0}" ;;
*"sys.version_info"*) exit "${TOO_OLD:-0}" ;;
"-m venv"*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
"-m pip"*) exit "${NO_PIP:-0}" ;;
"-m vescale.torchrun"*) exit "${NO_TORCHRUN:-0}" ;;
"-m pytest --lane ranks"*) exit "${RANKS:-0}" ;;
"-m pytest --lane single"*) exit "${SINGLE:-0}" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the scripts alone, and a folder of stand-ins for the machine's programs."""
    folder = tmp_path / "a checkout"
    shutil.copytree(ROOT / "launch", folder / "launch")
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        _program(tmp_path / "bin" / name, PYTHON)
    return folder


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def _bash(checkout: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of the checkout from another folder."""
    path = f"{checkout.parent / 'bin'}:/usr/bin:/bin"
    env = {"PATH": path, "CALLS": str(checkout.parent / "calls"), "HOME": os.environ.get("HOME", "/"), **environment}
    script = [str(checkout / words[0]), *words[1:]]
    return subprocess.run(["bash", *script], capture_output=True, text=True, env=env, cwd=checkout.parent)


def _calls(checkout: Path) -> list[str]:
    """The calls of the stand-in since this was last asked."""
    file = checkout.parent / "calls"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return [line for line in lines if line.startswith("-m")]


SCRIPTS = sorted(p for folder in ("launch", ".ci") for p in (ROOT / folder).iterdir() if p.suffix != ".yaml")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_sound_shell_and_names_no_registry(script: Path) -> None:
    checks = [["bash", "-n", str(script)]]
    if shutil.which("shellcheck"):
        checks.append(["shellcheck", "--shell=bash", "--source-path=SCRIPTDIR/..", "--external-sources", str(script)])
    for check in checks:
        done = subprocess.run(check, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"https?://|index-url [^$\"]|pypi|\.org|\.com|\.io\b", script.read_text())


def test_the_first_call_installs_and_the_second_does_not(checkout: Path) -> None:
    first = _bash(checkout, "launch/quickstart.sh", "trainer.steps=5", "name=a b", TORCH_INDEX_URL="file:///index")
    assert first.returncode == 0, first.stderr
    venv, install, compiled, check, command = _calls(checkout)
    assert check == "-m vescale.train --check recipe=llama_debug_muon trainer.steps=5 name=a b"
    assert venv == "-m venv --clear .venv"
    assert compiled.startswith("-m compileall") and compiled.endswith(" .venv/lib")
    assert install.startswith("-m pip install --quiet") and install.endswith("--extra-index-url file:///index -e .")
    assert command == (
        "-m vescale.torchrun --standalone --nproc-per-node 2 -m vescale.train recipe=llama_debug_muon "
        "trainer.steps=5 name=a b"
    )
    second = _bash(checkout, "launch/quickstart.sh")
    assert second.returncode == 0 and second.stderr == ""
    assert len(_calls(checkout)) == 2
    title, *commands = second.stdout.splitlines()
    assert title == "next:" and len(commands) == 3
    assert [len(points(command.split(" vescale.train ")[1].split())) for command in commands] == [1, 1, 2]
    repeated = _bash(checkout, "launch/quickstart.sh", "optimizer=adamw")
    assert "optimizer=adamw" not in repeated.stdout  # it was just run
    _calls(checkout)
    failed = _bash(checkout, "launch/quickstart.sh", NO_TORCHRUN="3")
    assert (failed.returncode, failed.stdout) == (3, "")


def test_a_changed_project_or_a_broken_installation_is_installed_again(checkout: Path) -> None:
    assert _bash(checkout, "launch/quickstart.sh", NO_PIP="1").returncode == 1
    assert len(_calls(checkout)) == 2  # it stopped at the failure
    assert _bash(checkout, "launch/quickstart.sh").returncode == 0
    assert [call.split()[1] for call in _calls(checkout)] == ["pip", "compileall", "vescale.train", "vescale.torchrun"]
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert _bash(checkout, "launch/quickstart.sh").returncode == 0
    assert [call.split()[1] for call in _calls(checkout)] == ["pip", "compileall", "vescale.train", "vescale.torchrun"]


def test_the_suite_runs_in_the_same_environment(checkout: Path) -> None:
    assert _bash(checkout, "launch/quickstart.sh").returncode == 0
    for tool in ("ruff", "mypy"):
        _program(checkout / ".venv" / "bin" / tool, f'#!/usr/bin/env bash\necho "-m {tool} $*" >>"$CALLS"\n')
    _calls(checkout)
    assert _bash(checkout, ".ci/run").returncode == 0
    install, _, *checks = map(str.strip, _calls(checkout))
    assert install.endswith("-e .[test]")
    assert checks[:2] == ["-m ruff check .", "-m ruff format --check --quiet ."]
    lanes = ["-m mypy", "-m pytest --lane ranks", "-m pytest --lane single"]  # the first two begin together
    assert sorted(checks[2:]) == lanes and checks.index(lanes[0]) < checks.index(lanes[2])
    # 5: no test was selected, which in one lane alone is no failure; 2: interrupted.
    for ranks, single, code in ((0, 5, 0), (5, 0, 0), (5, 5, 5), (1, 0, 1), (0, 1, 1), (1, 5, 1), (2, 0, 2)):
        done = _bash(checkout, "launch/test.sh", "-k", "some name", RANKS=str(ranks), SINGLE=str(single))
        assert done.returncode == code, (ranks, single)
        assert code == 2 or "-m pytest --lane single -k some name" in _calls(checkout)
    _calls(checkout)
    assert _bash(checkout, "launch/quickstart.sh").returncode == 0  # an installation with tests has the project
    assert len(_calls(checkout)) == 2


def test_what_is_missing_is_said_with_the_command_that_brings_it(checkout: Path) -> None:
    without = _bash(checkout, "launch/quickstart.sh", NO_VENV="1")
    assert without.returncode == 1
    assert without.stderr == "python3-venv is missing: sudo apt-get install -y python3-venv\n"
    old = _bash(checkout, "launch/test.sh", TOO_OLD="1")
    assert old.returncode == 1
    assert old.stderr.startswith("Python 3.11 or newer is needed: sudo apt-get install -y python3 python3-venv")
    assert not (checkout / ".venv").exists()


def test_torchrun_meets_at_node_0(checkout: Path) -> None:
    one = _bash(checkout, "launch/torchrun.sh", "recipe=llama8b_muon", DRY_RUN="1", PYTHON="py")
    command = "py -m vescale.torchrun --standalone --nproc-per-node gpu -m vescale.train recipe=llama8b_muon"
    assert one.stdout.strip() == command
    nodes = {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "node0", "NPROC": "8", "DRY_RUN": "1"}
    many = _bash(checkout, "launch/torchrun.sh", "recipe=llama8b_muon", **nodes)
    assert "--nnodes 4 --node-rank 3 --master-addr node0 --master-port 29500 --nproc-per-node 8" in many.stdout
    lost = _bash(checkout, "launch/torchrun.sh", NNODES="4", DRY_RUN="1")
    assert lost.returncode != 0 and "set MASTER_ADDR" in lost.stderr
    for wrong, said in (({"NNODES": "2:4"}, "a number of nodes, got 2:4"), ({"NODE_RANK": "4"}, "in [0, 4), got 4")):
        refused = _bash(checkout, "launch/torchrun.sh", **nodes | wrong)
        assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1) and said in refused.stderr


def test_slurm_starts_one_torchrun_per_node(checkout: Path) -> None:
    _program(checkout.parent / "bin" / "scontrol", '#!/usr/bin/env bash\nprintf "gpu%02d\\n" {7..20000}\n')
    job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "4711"}
    job |= {"SLURM_GPUS_ON_NODE": "8", "SLURM_SUBMIT_DIR": str(checkout), "DRY_RUN": "1", "PYTHON": "py"}
    done = _bash(checkout, "launch/slurm.sbatch", "recipe=llama70b_muon", **job)
    assert done.returncode == 0, done.stderr
    for part in (
        "srun --nodes 2 --ntasks 2 --ntasks-per-node 1",
        "py -m vescale.torchrun --nnodes 2 --nproc-per-node 8",
        "--rdzv-id 4711 --rdzv-backend c10d --rdzv-endpoint gpu07:29500",
        "-m vescale.train recipe=llama70b_muon",
    ):
        assert part in done.stdout
    outside = _bash(checkout, "launch/slurm.sbatch")
    assert outside.returncode != 0 and "not in a Slurm job" in outside.stderr


def test_slurm_puts_a_job_that_was_told_to_stop_back_into_the_queue(checkout: Path) -> None:
    _program(
        checkout.parent / "bin" / "scontrol", '#!/usr/bin/env bash\necho "-m scontrol $*" >>"$CALLS"; echo gpu07\n'
    )
    _program(checkout.parent / "bin" / "srun", '#!/usr/bin/env bash\nexit "$CODE"\n')
    job = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "gpu07", "SLURM_JOB_ID": "4711", "PYTHON": "py"}
    job |= {"SLURM_GPUS_ON_NODE": "8", "SLURM_SUBMIT_DIR": str(checkout)}
    for code in (0, 2, 75):
        done = _bash(checkout, "launch/slurm.sbatch", CODE=str(code), **job)
        assert done.returncode == code
        again = ["-m scontrol requeue 4711"] * (code == 75)
        assert [call for call in _calls(checkout) if "requeue" in call] == again


RANKS = """#!/usr/bin/env bash
trap 'exit 75' USR1  # as a run does when it has saved
echo $$ >"$0.pid"
while :; do sleep 0.02; done
"""


def test_slurm_tells_the_ranks_that_the_time_is_up(checkout: Path) -> None:
    programs = checkout.parent / "bin"
    _program(programs / "scontrol", '#!/usr/bin/env bash\necho "-m scontrol $*" >>"$CALLS"; echo gpu07\n')
    _program(programs / "srun", RANKS)
    told = f'#!/usr/bin/env bash\necho "-m scancel $*" >>"$CALLS"; kill -USR1 "$(<{programs}/srun.pid)"\n'
    _program(programs / "scancel", told)
    job = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "gpu07", "SLURM_JOB_ID": "4711", "PYTHON": "py"}
    env = {"PATH": f"{programs}:/usr/bin:/bin", "CALLS": str(checkout.parent / "calls"), **job}
    script = subprocess.Popen(["bash", str(checkout / "launch" / "slurm.sbatch")], env=env, cwd=checkout)
    assert wait_for(lambda: (programs / "srun.pid").is_file() and (programs / "srun.pid").read_text())
    script.send_signal(signal.SIGUSR1)
    assert script.wait(60) == 75
    assert _calls(checkout)[1:] == ["-m scancel --full --signal=USR1 4711", "-m scontrol requeue 4711"]


def test_the_manifest_of_a_cluster_is_printed_and_nothing_is_sent(checkout: Path) -> None:
    from omegaconf import OmegaConf

    words = {"IMAGE": "registry/v:1", "RUN": "recipe=llama8b_muon name=mine", "NAME": "big", "NNODES": "4"}
    done = _bash(checkout, "launch/kubernetes.sh", **words)
    service, job = map(OmegaConf.create, done.stdout.split("\n---\n"))
    assert service.metadata.name == job.metadata.name == job.spec.template.spec.subdomain == "big"
    assert job.spec.completions == job.spec.parallelism == 4
    (container,) = job.spec.template.spec.containers
    run = "NODE_RANK=$JOB_COMPLETION_INDEX exec bash /vescale/launch/torchrun.sh recipe=llama8b_muon name=mine"
    assert container.image == "registry/v:1" and container.command == ["bash", "-c", run]
    assert {one.name: one.value for one in container.env} == {"NNODES": "4", "NPROC": "8", "MASTER_ADDR": "big-0.big"}
    assert _bash(checkout, "launch/kubernetes.sh").returncode != 0


def test_what_a_run_of_the_manifest_is_told_comes_to_its_shell_as_it_was_written(checkout: Path) -> None:
    from omegaconf import OmegaConf

    run = """name="a & b" data.path='/d/$NAME/$NPROC' tracking.notes="\\"\\\\\n--check"""
    done = _bash(checkout, "launch/kubernetes.sh", IMAGE="registry/v:1", RUN=run)
    text = done.stdout.split("\n---\n")[1]
    command = OmegaConf.to_container(OmegaConf.create(text))["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[2].endswith("/vescale/launch/torchrun.sh " + run.replace("\n", " "))
