"""Checkpoints: step, trainable weights, optimizer state, evaluations, and what they were trained from.

``<folder>/step-00000500/`` holds ``weights.safetensors``, ``optimizer.safetensors`` and ``checkpoint.json``.
The last is written last, atomically, with the hashes of the others, so its presence means complete.
Everything else that a run needs (order, learning rate, random draws) is a function of the step and of the evaluations.
Weights are stored whole however many ranks share them, so a run may go on with another number of ranks.
"""

import copy
import json
import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from raytriever.artifacts.artifact import Derivation
from raytriever.artifacts.storage import Folder, sha256_of
from raytriever.errors import StorageError, UserError
from raytriever.reports.log import log
from raytriever.reports.table import counted
from trainers.engine import collectives
from trainers.engine.early_stopping import Evaluation, State
from trainers.engine.optimization import trainable_parameters
from trainers.engine.sharding import like, whole

_RECORD = "checkpoint.json"
_WEIGHTS = "weights.safetensors"
_OPTIMIZER = "optimizer.safetensors"


class Checkpoints:
    """The checkpoints of one run in one folder (local path or URI) that all ranks can read.

    ``config``: the resolved settings that the loop doesn't know (encoder, objective) as JSON values, part of
    what a checkpoint must agree with. ``keep``: the newest complete checkpoints that are kept; the best one is kept
    besides.
    """

    algorithm_version = 3  # raise it when the same settings would train differently

    def __init__(self, uri: str, config: Mapping[str, Any], *, keep: int = 2) -> None:
        self.folder = Folder(uri)
        self._derivation = Derivation("checkpoint", "train", self.algorithm_version, dict(config), {})
        self._keep = keep
        self._pending: Future[None] | None = None
        self._passed_over = set[int]()

    def of_run(self, training: Mapping[str, Any], batches: str) -> Self:
        """The same folder for one run: its settings and its batches' fingerprint."""
        bound = copy.copy(self)
        config = {**self._derivation.config, "training": dict(training)}
        bound._derivation = replace(self._derivation, config=config, inputs={"batches": batches})
        return bound

    def save(self, state: State, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Copies the state and writes it in the background; then removes what is older than what is kept.

        Kept are the newest and ``state.best_step``. Those that ``restore`` passed over are removed too. All ranks call
        it; the first writes. At most one checkpoint is being written: a call waits for the one before, and raises what
        that raised.
        """
        self.wait()
        named = trainable_parameters(module)
        tensors = {_WEIGHTS: _copied(named), _OPTIMIZER: _copied(_optimizer_tensors(optimizer, named))}
        if collectives.rank() == 0:
            pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
            self._pending = pool.submit(self._write, state, tensors)
            pool.shutdown(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Leaves no checkpoint half-written behind, whatever ended the run."""
        self.wait()

    def wait(self) -> None:
        """Returns when the last checkpoint is complete; raises what writing it raised."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _write(self, state: State, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.folder.delete_temporary()
        hashes = {}
        with self.folder.scratch() as scratch:
            for name, content in tensors.items():
                save_file(dict(content), scratch / name)
                hashes[name] = sha256_of(scratch / name)
                self.folder.put(f"{_step_folder(state.steps)}/{name}", scratch / name)
        record = {**asdict(state), "files": hashes, "derivation": asdict(self._derivation)}
        # unsorted: measures come back in the order of an undisturbed run
        self.folder.write_bytes(f"{_step_folder(state.steps)}/{_RECORD}", json.dumps(record, indent=1).encode())
        # damaged ones have a record too: they would count as the newest, and good ones would go in their place
        for steps in self._passed_over - {state.steps}:  # that one is whole again
            self._delete(steps)
        self._passed_over = set()
        self._prune(state.best_step)

    def restore(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
        """Loads the newest checkpoint that is whole and returns its state; that of no step where there is none.

        Raises ``UserError`` where it was trained from other batches or settings.
        """
        present = self._present()
        for steps in reversed(present):
            record, problem = self._verified(steps)
            if record is None:
                log.info(f"Checkpoint {self.folder.describe(_step_folder(steps))} {problem}; an older one is used.")
                continue
            differences = self._derivation.differences(record["derivation"])
            if differences:
                raise UserError(
                    f"{self.folder.uri} holds checkpoints of a run with other settings: {'; '.join(differences)}."
                    " Resuming would mix both runs. Set these settings back, or train into another folder."
                )
            named = trainable_parameters(module)
            self._load_weights(steps, record["files"], named)
            _restore_optimizer(optimizer, named, self._read(steps, record["files"], _OPTIMIZER))
            evaluations = tuple(Evaluation(**evaluation) for evaluation in record["evaluations"])
            self._passed_over = {later for later in present if later > steps}
            log.info(f"  resumes from the checkpoint after {counted(steps, 'step')}")
            return State(steps, evaluations, record["best_step"])
        self._passed_over = set(present)
        return State(0)

    def restore_weights(self, steps: int, module: nn.Module) -> None:
        """Loads the weights after ``steps`` steps. Raises ``UserError`` where that checkpoint is gone or damaged."""
        self.wait()
        collectives.barrier()
        record, problem = self._verified(steps)
        if record is None:
            raise UserError(
                f"Checkpoint {self.folder.describe(_step_folder(steps))}, the best of the run, {problem}. Train again"
                " from an older checkpoint: remove the newer ones."
            )
        self._load_weights(steps, record["files"], trainable_parameters(module))

    def _present(self) -> list[int]:
        return sorted({int(steps) for name in self.folder.files() for steps in re.findall(r"^step-(\d+)/", name)})

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
            return {name: record[name] for name in ("files", "derivation", "evaluations", "best_step")}, ""
        except StorageError:  # says nothing of the checkpoint
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OSError, UserError) as error:
            return None, f"is damaged ({type(error).__name__}: {error})"

    def _path(self, steps: int, file: str, sha256: str) -> Path:
        return self.folder.local_path(f"{_step_folder(steps)}/{file}", sha256)

    def _load_weights(self, steps: int, files: Mapping[str, str], named: Mapping[str, nn.Parameter]) -> None:
        weights = self._read(steps, files, _WEIGHTS)
        expected = {name: tuple(parameter.shape) for name, parameter in named.items()}
        found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        if expected != found:
            differing = sorted({name for name, _ in expected.items() ^ found.items()})
            raise UserError(
                f"Checkpoint {self.folder.describe(_step_folder(steps))} doesn't fit the model:"
                f" {len(differing)} trainable weights differ in name or shape, the first {differing[0]}"
                f" ({found.get(differing[0])} there, {expected.get(differing[0])} now). Train into another"
                " folder."
            )
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(like(parameter, weights[name]))

    def _read(self, steps: int, files: Mapping[str, str], name: str) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = load_file(self._path(steps, name, files[name]))  # a file with the recorded hash
        return tensors

    def _prune(self, best_step: int | None) -> None:
        present = self._present()
        complete = [steps for steps in present if self.folder.exists(f"{_step_folder(steps)}/{_RECORD}")]
        for steps in present:
            if steps < complete[-self._keep :][0] and steps != best_step:
                self._delete(steps)
        self.folder.delete_empty_folders()

    def _delete(self, steps: int) -> None:
        for name in (_RECORD, _WEIGHTS, _OPTIMIZER):  # the record first: it must never vouch for absent files
            self.folder.delete(f"{_step_folder(steps)}/{name}")


def require_common_start(start: int, total_steps: int, device: torch.device) -> None:
    """Raises ``UserError`` where ranks begin at different steps, or beyond the run's last. All ranks call it."""
    starts = [each for (each,) in collectives.exchange([start], device)]
    if min(starts) != max(starts):
        raise UserError(
            f"The ranks found different checkpoints (steps {', '.join(map(str, starts))}). The checkpoints'"
            " folder must be one that all machines share: a network file system, s3:// or gs://."
        )
    if start > total_steps:
        raise UserError(
            f"The newest checkpoint was made after {start} steps, but this run has only {total_steps}. Raise the"
            " number of steps (epochs, max_steps), or give another folder of checkpoints."
        )


def _step_folder(steps: int) -> str:
    return f"step-{steps:08d}"


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU for the first rank, which the next step doesn't change; sharded tensors become whole."""
    copies = {}
    for name, tensor in tensors.items():
        complete = whole(tensor.detach())  # all ranks take part
        if collectives.rank() == 0:
            copies[name] = complete.to("cpu", copy=True).contiguous()
    return copies


def _optimizer_tensors(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state as tensors named ``<quantity>/<parameter>``."""
    return {
        f"{quantity}/{name}": torch.as_tensor(value)
        for name, parameter in named.items()
        for quantity, value in optimizer.state.get(parameter, {}).items()
    }


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    states: dict[str, dict[str, Tensor | float]] = {}
    for key, tensor in tensors.items():
        quantity, _, name = key.partition("/")
        parameter = named[name]
        # moments have the parameter's shape and are shared out as it is; step counts are single numbers
        fitted = like(parameter, tensor) if tensor.shape == parameter.shape else tensor
        is_integer = tensor.dtype == torch.int64  # a count that the optimizer keeps in Python, and computes with there
        states.setdefault(name, {})[quantity] = tensor.item() if is_integer else fitted
    names = {parameter: name for name, parameter in named.items()}
    in_order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.load_state_dict(
        {
            "state": {place: states[name] for place, name in enumerate(in_order) if name in states},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )
