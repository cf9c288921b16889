"""The report's section on where everything comes from: each artifact, what it was made from, with which settings."""

import json
from collections.abc import Mapping
from typing import Any

import yaml

from raytriever.retrieval.artifacts import RUN, Artifact
from raytriever.retrieval.progress import format_seconds
from raytriever.retrieval.report import Block, Details, Section, Table

_SHOWN = 12  # characters of a fingerprint


def provenance_section(artifacts: Mapping[str, Artifact]) -> Section:
    """``artifacts``: by the name each has in the report's settings."""
    by_fingerprint = {artifact.fingerprint: folder_name(artifact) for artifact in artifacts.values()}
    runs = {name: run_facts(artifact) for name, artifact in artifacts.items()}
    rows = []
    for name, artifact in artifacts.items():
        made_from = [
            f"{key}: {by_fingerprint.get(value, value[:_SHOWN])}" for key, value in artifact.manifest["inputs"].items()
        ]
        seconds = runs[name].get("seconds")
        rows.append(
            [
                folder_name(artifact),
                artifact.kind,
                artifact.fingerprint[:_SHOWN],
                "; ".join(made_from),
                f"{artifact.rows:,}",
                "" if seconds is None else format_seconds(float(seconds)),
            ]
        )
    header = ["artifact", "kind", "fingerprint", "made from", "rows", "time"]
    caption = f"Fingerprint: first {_SHOWN} digits of the manifest's SHA-256; inputs that are not listed show theirs."
    blocks: list[Block] = [Table(header, rows, caption, text_columns=4)]
    contracts = encoder_contracts(artifacts)
    if contracts:
        blocks.append(_contract_table({folder_name(artifacts[name]): item for name, item in contracts.items()}))
    blocks += [_settings(artifact) for artifact in artifacts.values()]
    return Section("Provenance", _lead(runs), blocks)


def folder_name(artifact: Artifact) -> str:
    """The last part of its path, which inside a run is the stage's name."""
    return artifact.uri.rstrip("/").rpartition("/")[2]


def run_facts(artifact: Artifact) -> dict[str, Any]:
    """Its run.json, empty where that is absent (an artifact can be copied without it)."""
    return dict(artifact.read_json(RUN)) if artifact.folder.exists(RUN) else {}


def encoder_contracts(artifacts: Mapping[str, Artifact]) -> dict[str, dict[str, Any]]:
    """By the artifact's name in ``artifacts``, the contract of the encoder behind it, where there is one."""
    contracts = {name: artifact.manifest["facts"].get("encoder") for name, artifact in artifacts.items()}
    return {name: contract for name, contract in contracts.items() if isinstance(contract, dict)}


def _lead(runs: Mapping[str, Mapping[str, Any]]) -> str:
    lead = "What each artifact is, what it was made from and with which settings."
    seconds = [float(run["seconds"]) for run in runs.values() if "seconds" in run]
    if seconds:
        lead += f" The {len(seconds)} stages listed took {format_seconds(sum(seconds))} together"
        machines = sorted({f"{run['machine']}, Python {run['python']}" for run in runs.values() if "machine" in run})
        lead += f" ({'; '.join(machines)})." if machines else "."
    finished = [str(run["finished"]) for run in runs.values() if "finished" in run]
    if finished:
        lead += f" The last of them was finished on {max(finished).replace('T', ' at ')}."
    return lead


def _contract_table(contracts: Mapping[str, Mapping[str, Any]]) -> Table:
    keys = sorted({key for contract in contracts.values() for key in contract})
    rows = [[key.replace("_", " "), *(_shown(key, contract) for contract in contracts.values())] for key in keys]
    caption = "What the encoder behind each artifact is; vectors may meet where all but the revision is the same."
    return Table(["encoder", *contracts], rows, caption, text_columns=1 + len(contracts))


def _shown(key: str, contract: Mapping[str, Any]) -> str:
    if key not in contract:
        return "(itself)" if key == "model" else ""  # the artifact of a trained model is its own fingerprint
    value = contract[key]
    if key == "model":
        return str(value)[:_SHOWN]
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _settings(artifact: Artifact) -> Details:
    config = yaml.safe_dump(artifact.config, sort_keys=False, allow_unicode=True).strip()
    command, version = artifact.manifest["stage"], artifact.manifest["algorithm_version"]
    return Details(f"Settings of {folder_name(artifact)} ({command}, algorithm version {version})", config)
