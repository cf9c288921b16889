"""Behind ``raytriever doctor``: asks every node of the cluster what jobs will need, before a long run finds it out."""

import os
import secrets
import time
from typing import TYPE_CHECKING, Any

from raytriever.artifacts.storage import Folder, absolute
from raytriever.cluster import checks as node_facts
from raytriever.cluster.checks import Check, Cluster, Node, check_cluster

if TYPE_CHECKING:
    from raytriever.stages.ray_session import RaySession

_ANSWER_SECONDS = 400
_CLOCK_ROUNDS = 3
_CLOCK_SECONDS = 30  # for one answer of a process that has answered before


def diagnose(storage: str | None) -> list[Check]:
    """Examines the cluster of RAY_ADDRESS, or this machine, and the folder or URI ``storage`` as each node sees it."""
    from raytriever.stages.ray_session import RaySession, refuse_copied_folder

    if storage is not None:
        refuse_copied_folder(storage)
        Folder(storage)  # refuses what is no place to store anything
        storage = absolute(storage)  # as a run's stages do: a node's current folder is another one
    with RaySession() as session:
        return check_cluster(examine(session, storage))


def report(checks: list[Check]) -> list[str]:
    """The checks as aligned lines, what to do below each that is not ok."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state:4}  {check.name:{width}}  {check.found}")
        if check.remedy and check.state != "ok":
            lines.append(f"{'':6}{'':{width}}  {check.remedy}")
    return lines


class _Witness:
    """An actor on one node, which answers for it."""

    def facts(self) -> node_facts.NodeFacts:
        import ray

        return node_facts.node_facts(ray._private.worker.global_worker.node.get_session_dir_path())

    def now(self) -> float:
        return time.time()

    def storage(self, step: str, *arguments: Any) -> str | None:
        act = {"write": node_facts.write_probe, "read": node_facts.read_probes, "delete": node_facts.delete_probe}
        return act[step](*arguments)


def examine(session: "RaySession", storage: str | None) -> Cluster:
    """Asks all living nodes at a time; a node that doesn't answer is a finding, not an error."""
    session.start()
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    listed = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeManagerAddress"]))
    witness = ray.remote(_Witness)
    actors = {
        node["NodeID"]: witness.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in listed
    }
    facts = _answers({name: actor.facts.remote() for name, actor in actors.items()})
    answering = _only_answers(actors, facts)
    differences = {name: _clock_difference(actor) for name, actor in answering.items()}
    answering = _only_answers(answering, differences)  # a node may be lost while it is examined
    problems = {} if storage is None else _try_storage(answering, storage)
    nodes = []
    for node in listed:
        name = node["NodeID"]
        difference = differences.get(name, 0.0)
        failed = next((said for said in (facts[name], difference) if isinstance(said, Exception)), None)
        nodes.append(
            Node(
                address=node["NodeManagerAddress"],
                gpus=node["Resources"].get("GPU", 0),
                object_store=node["Resources"].get("object_store_memory", 0),
                facts=facts[name] if failed is None else None,
                problem=None if failed is None else f"does not answer ({(str(failed).splitlines() or [''])[0]})",
                clock_difference=0.0 if isinstance(difference, Exception) else difference,
                storage_problem=problems.get(name),
            )
        )
    address, is_open = _dashboard()
    on = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    return Cluster(tuple(nodes), on, is_open, address, storage)


def _only_answers(actors: dict[str, Any], answers: dict[str, Any]) -> dict[str, Any]:
    """The actors that answered with something else than an exception."""
    return {name: actor for name, actor in actors.items() if not isinstance(answers[name], Exception)}


def _answers(asked: dict[str, Any], seconds: float = _ANSWER_SECONDS) -> dict[str, Any]:
    """Each node's answer, or the exception that came instead; all of them within ``seconds``, more or less."""
    import ray

    deadline = time.monotonic() + seconds
    found: dict[str, Any] = {}
    for name, answer in asked.items():
        try:
            found[name] = ray.get(answer, timeout=max(1.0, deadline - time.monotonic()))
        except Exception as error:  # whatever happened to that node is what is looked for
            found[name] = error
    return found


def _clock_difference(actor: Any) -> float | Exception:
    """Seconds by which the node's clock surely differs from this one's: the difference less half the round trip.

    The exception instead, where the node doesn't say its time.
    """
    certain = []
    for _ in range(_CLOCK_ROUNDS):
        sent = time.time()
        there = _answers({"now": actor.now.remote()}, _CLOCK_SECONDS)["now"]
        received = time.time()
        if isinstance(there, Exception):
            return there
        difference, doubt = there - (sent + received) / 2, (received - sent) / 2
        certain.append(
            0.0 if abs(difference) <= doubt else difference - doubt if difference > 0 else difference + doubt
        )
    return min(certain, key=abs)


def _try_storage(actors: dict[str, Any], storage: str) -> dict[str, str]:
    """What each node could not do: write a file, read those of all nodes, delete its own."""
    folder = f"{storage.rstrip('/')}/.raytriever-doctor-{secrets.token_hex(4)}"
    problems: dict[str, str] = {}
    for step in ("write", "read", "delete"):
        names = [name for name in actors if step == "read" and name not in problems]
        asked = {
            name: actor.storage.remote(step, folder, names if step == "read" else name)
            for name, actor in actors.items()
        }
        for name, said in _answers(asked).items():
            if said is not None:
                problems.setdefault(name, f"can't {step}: {said}")
    return problems


def _dashboard() -> tuple[str | None, bool | None]:
    """Its address, and whether it shows jobs without a token; None where there is none or it can't be reached."""
    import ray
    import requests

    address = ray._private.worker.get_dashboard_url()
    if not address:
        return None, None
    try:
        return address, requests.get(f"http://{address}/api/jobs/", timeout=30).status_code == requests.codes.ok
    except requests.exceptions.RequestException:
        return address, None
