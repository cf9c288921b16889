"""Checkpoints: step, trainable weights, optimizer state, and what they were trained from.

``<folder>/step-00000500/`` holds ``weights.safetensors``, ``optimizer.safetensors`` and ``checkpoint.json``.
The last is written last, atomically, with the hashes of the others, so its presence means complete.
Everything else that a run needs (order, learning rate, random draws) is a function of the step.
"""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from raytriever.retrieval.artifacts import Derivation
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.storage import Folder, sha256_of
from raytriever.trainers.optimization import trainable_parameters

ALGORITHM_VERSION = 1  # raise it when the same settings would train differently
_RECORD = "checkpoint.json"
_WEIGHTS = "weights.safetensors"
_OPTIMIZER = "optimizer.safetensors"


class Checkpoints:
    """The checkpoints of one run in one folder (local path or URI) that all ranks can read.

    ``config``: the resolved settings that the loop doesn't know (encoder, objective) as JSON values, part of
    what a checkpoint must agree with. ``keep``: complete checkpoints that are kept. ``say`` gets a line where
    a damaged checkpoint is passed over.
    """

    def __init__(
        self,
        uri: str,
        config: Mapping[str, Any],
        *,
        keep: int = 2,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        if keep < 1:
            raise UserError(f"{keep} checkpoints to keep leaves none to resume from; keep 1 or more.")
        self.folder = Folder(uri)
        self._derivation = Derivation("checkpoint", "train", ALGORITHM_VERSION, dict(config), {})
        self._keep = keep
        self._say = say

    def of_run(self, training: Mapping[str, Any], batches: str, world_size: int) -> "Checkpoints":
        """The same folder for one run: its settings, its batches' fingerprint and its number of ranks."""
        bound = copy.copy(self)
        config = {**self._derivation.config, "training": dict(training), "world_size": world_size}
        bound._derivation = replace(self._derivation, config=config, inputs={"batches": batches})
        return bound

    def save(self, steps: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Writes the state after ``steps`` steps, then removes what is older than the checkpoints to keep."""
        self.folder.delete_temporary()
        named = trainable_parameters(module)
        tensors: dict[str, dict[str, Tensor]] = {
            _WEIGHTS: {**named},
            _OPTIMIZER: _optimizer_tensors(optimizer, named),
        }
        hashes = {}
        with self.folder.scratch() as scratch:
            for name, state in tensors.items():
                save_file({key: value.detach().contiguous() for key, value in state.items()}, scratch / name)
                hashes[name] = sha256_of(scratch / name)
                self.folder.put(f"{_step_folder(steps)}/{name}", scratch / name)
        record = {"steps": steps, "files": hashes, "derivation": asdict(self._derivation)}
        self.folder.write_bytes(
            f"{_step_folder(steps)}/{_RECORD}", json.dumps(record, indent=1, sort_keys=True).encode()
        )
        self._prune()

    def restore(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Loads the newest checkpoint that is whole and returns its number of steps; 0 where there is none.

        Raises ``UserError`` where it was trained from other batches or settings, or by another number of
        ranks.
        """
        for steps in reversed(self._present()):
            record, problem = self._verified(steps)
            if record is None:
                self._say(
                    f"Checkpoint {self.folder.describe(_step_folder(steps))} {problem}; passed over for an older one."
                )
                continue
            differences = self._derivation.differences(record["derivation"])
            if differences:
                raise UserError(
                    f"{self.folder.uri} holds checkpoints of a different run: {'; '.join(differences)}. Going"
                    " on from them would be neither run. Give the settings back their values, or train into"
                    " another folder."
                )
            self._load(steps, record["files"], module, optimizer)
            return steps
        return 0

    def _present(self) -> list[int]:
        folders = {name.split("/")[0] for name in self.folder.files() if name.startswith("step-")}
        return sorted(int(name.removeprefix("step-")) for name in folders if name.removeprefix("step-").isdecimal())

    def _verified(self, steps: int) -> tuple[dict[str, Any] | None, str]:
        """The checkpoint's record, or None and what is wrong with it."""
        name = f"{_step_folder(steps)}/{_RECORD}"
        if not self.folder.exists(name):
            return None, f"is incomplete (no {_RECORD})"
        try:
            record: dict[str, Any] = json.loads(self.folder.read_bytes(name))
            for file, expected in record["files"].items():
                if sha256_of(self._path(steps, file, expected)) != expected:
                    return None, f"is damaged ({file} has another SHA-256 than its record says)"
            return {"files": record["files"], "derivation": record["derivation"]}, ""
        except (ValueError, KeyError, AttributeError, OSError, UserError) as error:
            return None, f"is damaged ({type(error).__name__}: {error})"

    def _path(self, steps: int, file: str, sha256: str) -> Path:
        return self.folder.local_path(f"{_step_folder(steps)}/{file}", sha256)

    def _load(self, steps: int, files: Mapping[str, str], module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        named = trainable_parameters(module)
        try:
            weights = load_file(self._path(steps, _WEIGHTS, files[_WEIGHTS]))
            states = load_file(self._path(steps, _OPTIMIZER, files[_OPTIMIZER]))
        except (SafetensorError, KeyError) as error:
            raise UserError(
                f"Checkpoint {self.folder.describe(_step_folder(steps))} can't be read: {error}."
            ) from error
        expected = {name: tuple(parameter.shape) for name, parameter in named.items()}
        found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        if expected != found:
            differing = sorted(name for name in expected | found if expected.get(name) != found.get(name))
            raise UserError(
                f"Checkpoint {self.folder.describe(_step_folder(steps))} doesn't fit the model:"
                f" {len(differing)} trainable weights differ in name or shape, the first {differing[0]}"
                f" ({found.get(differing[0])} there, {expected.get(differing[0])} now). Train into another"
                " folder."
            )
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(weights[name])
        _load_optimizer(optimizer, named, states)

    def _prune(self) -> None:
        present = self._present()
        complete = [steps for steps in present if self.folder.exists(f"{_step_folder(steps)}/{_RECORD}")]
        for steps in present:
            if steps < complete[-self._keep :][0]:
                self._delete(steps)
        self.folder.delete_empty_folders()

    def _delete(self, steps: int) -> None:
        for name in (_RECORD, _WEIGHTS, _OPTIMIZER):  # the record first: it must never vouch for absent files
            self.folder.delete(f"{_step_folder(steps)}/{name}")


def _step_folder(steps: int) -> str:
    return f"step-{steps:08d}"


def _optimizer_tensors(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state as tensors named ``<quantity>/<parameter>``."""
    return {
        f"{quantity}/{name}": torch.as_tensor(value)
        for name, parameter in named.items()
        for quantity, value in optimizer.state.get(parameter, {}).items()
    }


def _load_optimizer(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        quantity, _, name = key.partition("/")
        states.setdefault(name, {})[quantity] = tensor
    names = {parameter: name for name, parameter in named.items()}
    in_order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.load_state_dict(
        {
            "state": {place: states[name] for place, name in enumerate(in_order) if name in states},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )
