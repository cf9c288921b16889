"""The files in cluster_configs: valid for Ray and Kubernetes, pinned, closed to strangers."""

import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "cluster_configs"
LAUNCHER = sorted([*FOLDER.glob("aws-*.yaml"), *FOLDER.glob("gcp-*.yaml")])
KUBERNETES = [FOLDER / "kuberay-cluster.yaml", FOLDER / "kuberay-job.yaml"]
POLICY = FOLDER / "kuberay-network-policy.yaml"
SCRIPTS = sorted(FOLDER.glob("*.sh"))

# CPUs and GPUs of each machine type
MACHINES = {
    "p4d.24xlarge": (96, 8), "p5.48xlarge": (192, 8), "a2-ultragpu-8g": (96, 8), "a3-highgpu-8g": (208, 8),
    "m7i.16xlarge": (64, 0), "n2-standard-64": (64, 0),
}  # fmt: skip

# What KubeRay's and Kubernetes' types know, of what these files use; a key that is not here is a mistake
CLUSTER_KEYS = {
    "rayVersion", "authOptions", "enableInTreeAutoscaling", "autoscalerOptions", "headGroupSpec", "workerGroupSpecs"
}  # fmt: skip
JOB_KEYS = {
    "entrypoint", "submissionMode", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished",
    "activeDeadlineSeconds", "rayClusterSpec",
}  # fmt: skip
HEAD_KEYS = {"serviceType", "rayStartParams", "template"}
WORKER_KEYS = {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"}
POD_KEYS = {
    "serviceAccountName", "automountServiceAccountToken", "securityContext", "nodeSelector", "tolerations",
    "containers", "volumes",
}  # fmt: skip
CONTAINER_KEYS = {"name", "image", "securityContext", "resources", "env", "volumeMounts"}

each_launcher_file = pytest.mark.parametrize("path", LAUNCHER, ids=lambda path: path.name)
each_kubernetes_file = pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)


def read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(path.read_text())
    return values


def test_nothing_is_left_unchecked() -> None:
    known = {path.name for path in [*LAUNCHER, POLICY, *KUBERNETES, *SCRIPTS]}
    others = {path.name for path in FOLDER.iterdir()} - known
    assert others == {"README.md", "Dockerfile", "runtime_env.yaml", "grafana"}
    assert len(LAUNCHER) == 4
    readme = (FOLDER / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in known)


@each_launcher_file
def test_ray_accepts_the_file(path: Path) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(read(path)))
    mistaken = read(path)
    mistaken["available_node_types"]["gpu"]["min_worker"] = 1
    with pytest.raises(Exception, match="min_worker"):
        validate_config(prepare_config(mistaken))


@each_launcher_file
def test_groups_of_nodes_are_what_their_machines_are(path: Path) -> None:
    types = read(path)["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 0}
    for name in ("cpu", "gpu"):
        node = types[name]["node_config"]
        cpus, gpus = MACHINES[node.get("InstanceType") or node["machineType"]]
        assert types[name]["resources"] == {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    cpu = types["cpu"]["node_config"]
    spot = cpu.get("InstanceMarketOptions", {}).get("MarketType") or cpu["scheduling"]["provisioningModel"]
    assert spot.lower() == "spot"
    assert "InstanceMarketOptions" not in types["head"]["node_config"]
    assert "SPOT" not in str(types["head"]["node_config"])
    provider = read(path)["provider"]
    for kind in types.values():  # no disk is a hard disk
        node = kind["node_config"]
        if provider["type"] == "gcp":
            disks = {disk["initializeParams"]["diskType"] for disk in node["disks"]}
            assert disks == {f"zones/{provider['availability_zone']}/diskTypes/pd-ssd"}
        else:
            assert {disk["Ebs"]["VolumeType"] for disk in node["BlockDeviceMappings"]} == {"gp3"}


@each_launcher_file
def test_a_launched_cluster_is_closed(path: Path) -> None:
    values = read(path)
    head, workers = (" ".join(values[f"{part}_start_ray_commands"]) for part in ("head", "worker"))
    assert all("RAY_TMPDIR=$(raytriever session-folder) && export" in commands for commands in (head, workers))
    assert "RAY_AUTH_MODE=token" in head
    assert "RAY_AUTH_MODE=token" in workers
    assert "--dashboard-host=127.0.0.1" in head
    assert "~/.ray/auth_token" in values["file_mounts"]
    assert "chmod 600 ~/.ray/auth_token" in values["setup_commands"]
    assert values["provider"]["use_internal_ips"] is True
    for kind in values["available_node_types"].values():
        node = kind["node_config"]
        assert "accessConfigs" not in str(node)  # no public address
        if values["provider"]["type"] == "aws":
            assert node["SecurityGroupIds"]  # else Ray makes a group that takes SSH from everywhere
            assert node["MetadataOptions"]["HttpTokens"] == "required"
            assert all(disk["Ebs"]["Encrypted"] for disk in node["BlockDeviceMappings"])
    assert "0.0.0.0" not in path.read_text()


def cluster_of(path: Path) -> dict[str, Any]:
    values = read(path)  # one document: what stays is not created anew with every run
    assert values["apiVersion"] == "ray.io/v1"
    spec: dict[str, Any] = values["spec"]
    if values["kind"] == "RayCluster":
        assert values["metadata"] == {"name": "raytriever"}
        return spec
    assert values["kind"] == "RayJob"
    assert values["metadata"] == {"generateName": "raytriever-"}
    assert set(spec) == JOB_KEYS
    assert spec["submissionMode"] in ("K8sJobMode", "HTTPMode")
    assert spec["entrypoint"].startswith("raytriever run ")
    cluster: dict[str, Any] = spec["rayClusterSpec"]
    return cluster


def parts_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The head, and each group of workers."""
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


@each_kubernetes_file
def test_kuberay_knows_every_key(path: Path) -> None:
    spec = cluster_of(path)
    assert set(spec) == CLUSTER_KEYS
    assert set(spec["headGroupSpec"]) == HEAD_KEYS
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    assert set(groups) == {"cpu", "gpu"}
    for group in groups.values():
        assert set(group) == WORKER_KEYS
        assert group["minReplicas"] <= group["maxReplicas"]
    for part in parts_of(spec):
        assert all(isinstance(value, str) for value in part["rayStartParams"].values())
        pod = part["template"]["spec"]
        assert set(pod) <= POD_KEYS
        (container,) = pod["containers"]
        assert set(container) == CONTAINER_KEYS
        assert container["resources"]["requests"] == container["resources"]["limits"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    (gpu,) = groups["gpu"]["template"]["spec"]["containers"]
    assert gpu["resources"]["limits"]["nvidia.com/gpu"] == "8"


@each_kubernetes_file
def test_a_cluster_on_kubernetes_is_closed(path: Path) -> None:
    spec, policy = cluster_of(path), read(POLICY)
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    chosen = policy["spec"]["podSelector"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    own, operator = policy["spec"]["ingress"]
    assert own == {"from": [{"podSelector": chosen}]}
    assert operator["ports"] == [{"protocol": "TCP", "port": 8265}]
    assert set(operator["from"][0]) == {"namespaceSelector"}
    for part in parts_of(spec):
        template = part["template"]
        assert template["metadata"]["labels"].items() >= chosen["matchLabels"].items()
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in template["spec"]["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert not any("secret" in str(variable).lower() for variable in container["env"])


@each_kubernetes_file
def test_pods_write_to_their_volume_and_ray_where_kuberay_looks(path: Path) -> None:
    spec = cluster_of(path)
    for part in parts_of(spec):
        (container,) = part["template"]["spec"]["containers"]
        variables = {variable["name"]: variable["value"] for variable in container["env"]}
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {variables["RAYTRIEVER_CACHE"], variables["TMPDIR"]} <= mounted
        # Ray would take TMPDIR for its session, which the autoscaler's container looks for below /tmp
        assert part is not spec["headGroupSpec"] or variables["RAY_TMPDIR"] == "/tmp"


@each_kubernetes_file
def test_pods_start_closed_and_as_their_account(path: Path) -> None:
    text = path.read_text()
    created = re.findall(r"kubectl (?:apply|create) -f (\S+)", text)
    assert created == [str(file.relative_to(ROOT)) for file in (POLICY, path)]
    pods = [part["template"]["spec"] for part in parts_of(cluster_of(path))]
    (account,) = {pod["serviceAccountName"] for pod in pods}  # KubeRay makes none of a name that is given
    made = text.index(f"kubectl create serviceaccount {account} ")
    assert made < text.index(f"-f cluster_configs/{path.name}")
    assert [pod["automountServiceAccountToken"] for pod in pods] == [True, False, False]  # the autoscaler's alone


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(path: Path) -> None:
    assert path.stat().st_mode & 0o111
    text = path.read_text()
    assert "set -euo pipefail" in text
    assert "RAY_AUTH_MODE=token" in text
    assert subprocess.run(["bash", "-n", path], capture_output=True).returncode == 0
    used = subprocess.run([path], capture_output=True, text=True)
    assert used.returncode == 2
    assert "usage:" in used.stderr


def pins(text: str) -> dict[str, str]:
    found = re.findall(r"^\s*(?:- )?([A-Za-z0-9_.-]+)==([^\s#]+)", text, re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


def test_versions_are_those_that_the_tests_pass_with() -> None:
    constraints = pins((ROOT / "constraints.txt").read_text())
    asked = pins((FOLDER / "runtime_env.yaml").read_text())
    assert {name: constraints[name] for name in asked} == asked
    needed = {
        re.split(r"[\[<>=]", requirement)[0].lower().replace("_", "-")
        for requirement in metadata.requires("raytriever") or []
        if "extra ==" not in requirement or "extra == 'all'" in requirement.replace('"', "'")
    }
    assert needed - set(asked) - {"ray"} == set()
    for path in (FOLDER / "Dockerfile", *KUBERNETES):
        assert constraints["ray"] in path.read_text(), path.name


def test_what_must_be_changed_is_marked() -> None:
    for path in [*LAUNCHER, POLICY, *KUBERNETES]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split(" #")[0]
            if re.search(r"ACCOUNT|PROJECT|REGISTRY|BUCKET|CHANGE", code) and not line.lstrip().startswith("#"):
                near = path.read_text().splitlines()[max(0, number - 4) : number]
                assert any("CHANGE" in text for text in near), f"{path.name}, line {number}"
