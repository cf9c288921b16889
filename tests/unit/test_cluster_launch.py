"""What the files in cluster_configs do in use: who may start nodes, who pulls the image, which node is the head."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_cluster_configs import FOLDER, ROOT, each_launcher_file, read

Slurm = Callable[..., tuple[int, str, str]]  # exit code, address given to Ray, what it said


def identity(node: dict[str, Any]) -> str:
    """The profile (AWS) or service account (Google Cloud) that a node runs as."""
    if "IamInstanceProfile" in node:
        return str(node["IamInstanceProfile"]["Name"])
    (account,) = node["serviceAccounts"]
    assert account["scopes"] == ["https://www.googleapis.com/auth/cloud-platform"]  # its roles are the limit
    return str(account["email"])


@each_launcher_file
def test_the_head_alone_may_start_nodes(path: Path) -> None:
    from ray.autoscaler._private.util import prepare_config

    identities, prepared = (
        {name: identity(kind["node_config"]) for name, kind in values["available_node_types"].items()}
        for values in (read(path), prepare_config(read(path)))
    )
    assert prepared == identities  # Ray starts the nodes as the file says
    assert identities.keys() == {"head", "cpu", "gpu"}
    assert "head" in identities["head"]
    assert identities["cpu"] == identities["gpu"] != identities["head"]
    text = path.read_text()
    rights = ("RunInstances", "iam:PassRole") if "aws" in path.name else ("instanceAdmin", "iam.serviceAccountUser")
    assert all(right in text for right in rights)  # what to give, where the name is to be changed


@each_launcher_file
def test_every_node_logs_in_to_the_registry_of_its_image(path: Path) -> None:
    values = read(path)
    registry = values["docker"]["image"].split("/")[0]
    (command,) = values["initialization_commands"]
    assert command.split()[-1 if "aws" in path.name else -2] == registry
    if "aws" in path.name:
        assert f" --region {registry.split('.')[3]} " in command
        assert registry.split(".")[3] == values["provider"]["region"]
        assert command.startswith("aws ecr get-login-password ")
        assert " | docker login --username AWS --password-stdin " in command  # never on a command line
    assert all("initialization_commands" not in kind for kind in values["available_node_types"].values())
    assert ("ContainerRegistryReadOnly" if "aws" in path.name else "artifactregistry.reader") in path.read_text()


def test_the_log_of_a_job_on_kubernetes_is_found() -> None:
    """In HTTPMode the operator submits the job itself: there is no submitter's pod whose log kubectl could show."""
    path = FOLDER / "kuberay-job.yaml"
    assert read(path)["spec"]["submissionMode"] == "HTTPMode"
    comments = " ".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    assert "kubectl logs" not in comments
    assert re.search(r"kubectl port-forward service/\S+-head-svc 8265:8265\b", comments)
    assert "ray job logs --address http://localhost:8265 JOB --follow" in comments


# stands in for Slurm: what is asked of the head's node, then what all of them run
STAND_INS = {
    "scontrol": 'printf "node1\\nnode2\\n"',
    "hostname": '[ "$1" = -I ] && echo "$ADDRESSES" || echo 127.0.1.1',
    "srun": """
        echo "$@" >> "$ASKED.srun"
        while [ "${1#-}" != "$1" ]; do shift; done
        "$@"
        code=$?
        exit "${SRUN_CODE:-$code}"
    """,
    "ray": """
        echo "$@" > "$ASKED"
        [ "$RAY_TMPDIR" = /private ] && [ -z "$RAY_ADDRESS" ] || exit 99
        [ -e "$MARK" ] && echo "a mark that is left over" >&2
        umask > "$ASKED.umask"
        stat --format=%a "$RAY_AUTH_TOKEN_PATH" > "$ASKED.mode"
        while [ "$1" != -- ]; do shift; done
        shift
        [ -z "$BROKEN" ] && "$@"
    """,
    "raytriever": '[ "$1" = session-folder ] && echo /private || exit "${CODE:-0}"',
}


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """Runs slurm.sh on a node that has these addresses."""
    programs = tmp_path / "environment" / "bin"
    programs.mkdir(parents=True)
    for name, body in STAND_INS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)
    asked = tmp_path / "asked"

    def run(addresses: str, **variables: str) -> tuple[int, str, str]:
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(tmp_path), "RAYTRIEVER_ENVIRONMENT": str(programs.parent),
            "SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "4",
            "ADDRESSES": addresses, "ASKED": str(asked),
        }  # fmt: skip
        command = [FOLDER / "slurm.sh", "run", "quickstart"]
        done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=60)
        given = re.search(r"--address (\S+):\d+ ", asked.read_text()) if asked.exists() else None
        return done.returncode, given.group(1) if given else "", done.stderr

    return run


@pytest.mark.parametrize(("addresses", "address"), [
    ("10.1.2.3 172.17.0.1", "10.1.2.3"),
    ("127.0.1.1 10.1.2.3", "10.1.2.3"),
    ("fd00::2 10.1.2.3 10.1.2.4", "10.1.2.3"),  # HOST:PORT has no room for an IPv6 address
])  # fmt: skip
def test_the_head_on_slurm_is_an_address_that_other_nodes_reach(
    slurm: Slurm, tmp_path: Path, addresses: str, address: str
) -> None:
    assert slurm(addresses)[:2] == (0, address)
    options = (tmp_path / "asked.srun").read_text().splitlines()[-1].split(" bash ")[0].split()
    assert {"--cpus-per-task=4", "--no-kill"} <= set(options)  # Ray has all CPUs and outlives a node
    assert "#SBATCH --no-kill" in (FOLDER / "slurm.sh").read_text().splitlines()


@pytest.mark.parametrize("code", [0, 2, 130])
def test_the_code_of_a_job_on_slurm_is_the_commands(slurm: Slurm, code: int) -> None:
    for of_srun in (str(code), "1"):  # where a node was lost srun has another
        assert slurm("10.1.2.3", CODE=str(code), SRUN_CODE=of_srun)[0] == code


def test_a_mark_of_an_earlier_run_is_not_believed(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "slurm-123.done").write_text("0\n")
    code, _, said = slurm("10.1.2.3", BROKEN="1")
    assert code == 1
    assert "left no exit code" in said
    assert "left over" not in said


@pytest.mark.parametrize("before", ["0002", "0022"])
def test_the_token_alone_is_closed_to_others(slurm: Slurm, tmp_path: Path, before: str) -> None:
    mask = os.umask(int(before, 8))
    try:
        assert slurm("10.1.2.3")[0] == 0
        environment = {"PATH": f"{tmp_path}/environment/bin:{os.environ['PATH']}", "HOME": str(tmp_path)}
        environment |= {"ASKED": str(tmp_path / "single"), "MARK": "", "BROKEN": "1"}
        started = [FOLDER / "single-node.sh", "start", "--"]
        subprocess.run(started, env=environment, check=False, capture_output=True, timeout=60)
    finally:
        os.umask(mask)
    for name in ("asked", "single"):
        assert (tmp_path / f"{name}.umask").read_text().strip() == before
        assert (tmp_path / f"{name}.mode").read_text().strip() == "600"
    assert not list((tmp_path / ".ray").glob("slurm-*"))  # the job's own token is gone with it


@pytest.mark.parametrize("addresses", ["", "127.0.0.1", "127.0.1.1 ::1"])
def test_a_head_without_such_an_address_is_refused_with_what_to_set(slurm: Slurm, addresses: str) -> None:
    code, given, said = slurm(addresses)
    assert (code, given) == (2, "")
    assert "node1" in said
    assert "Set RAYTRIEVER_HEAD_IP" in said
    assert slurm(addresses, RAYTRIEVER_HEAD_IP="10.1.2.3")[:2] == (0, "10.1.2.3")
    assert slurm("10.1.2.3", RAYTRIEVER_HEAD_IP="127.0.0.2")[0] == 2


def test_cleaning_up_keeps_what_recipes_have_computed() -> None:
    shown = subprocess.run(["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    removed = {word.rstrip("/") for line in shown.splitlines() for word in line.split()[2:]}
    assert ".venv" in removed
    outputs = {read(path)["output"].split("/")[0] for path in (ROOT / "recipes").rglob("*.yaml")}
    assert removed.isdisjoint(outputs)
