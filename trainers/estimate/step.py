"""What one step of a training run takes, counted on the run's own code: encoders, objective, order, gradients, update.

Counted on one rank of as many as the run has, whose collectives go nowhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

from retrieval.encoders.pretrained import named_models
from trainers.engine import collectives, sharding
from trainers.engine.gradient_cache import Chunks
from trainers.engine.optimization import build_optimizer
from trainers.engine.reading import Reader, run_order
from trainers.engine.step import compute_gradients
from trainers.estimate.counting import Counting, attention_of_gpus
from trainers.estimate.made_up import MadeUpBatches, Shape, made_up_lookups
from trainers.estimate.outlines import outline, without_weights
from trainers.objective import Objective, map_nest
from trainers.objectives.revela.cross_attention import Readers, find_readers
from trainers.objectives.revela.language_model import InBatchLanguageModel
from trainers.run_settings import RunSettings
from trainers.training_run import objective_to_train

_CHUNKS_COUNTED = 2  # of a side, and twice as many, where a batch is cut into more: a step is linear in them


@dataclass(frozen=True)
class StepCost:
    """Of one rank and one step. Bytes: what is held all along, the batch and what the forward pass leaves, the most.

    ``launches``: of kernels; ``sent``: bytes that this rank gives to collectives; ``tokens``: of all its texts.
    """

    weights: float
    gradients: float
    optimizer: float
    kept: float
    peak: float
    flops: float
    launches: float
    sent: float
    tokens: float
    parameters: float
    trained: float


class _OneRank(Counting):  # type: ignore[no-untyped-call]
    """Counts on the first of several ranks, of which the others hold rows like its own, but for keys of texts."""

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = super()._computed(func, args, kwargs)
        if func.namespace == "c10d" and "gather" in func._schema.name:
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            sent = min(tensors, key=Tensor.numel)
            for gathered in tensors:
                if gathered is not sent and gathered.dtype == torch.int64 and not isinstance(sent, FakeTensor):
                    for number, rows in enumerate(gathered.view(-1, *sent.shape)):
                        rows.copy_(torch.where(sent.abs() > 1 << 32, sent + number, sent))
        return out


@contextmanager
def _ranks(count: int) -> Iterator[None]:
    """A process group whose collectives go nowhere; none for a single rank."""
    if count == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    mesh = init_device_mesh("cpu", (count,))
    try:
        with patch.object(sharding, "init_device_mesh", lambda *_: mesh):
            yield
    finally:
        dist.destroy_process_group()


def _every_other(attention_mask: Tensor, similarity: Tensor) -> Readers:
    """Each document reads every other: the most that Revela may compute, whatever the similarities are."""
    return find_readers(attention_mask, torch.ones(similarity.shape, dtype=torch.int64))


def outlined_objective(settings: RunSettings, shape: Shape, fake: FakeTensorMode) -> Objective[Any]:
    """The run's objective as its settings and its models' configurations describe it, in the state to be counted in."""
    models = {key: outline(each.model, each.revision) for key, each in named_models(settings).items()}
    with without_weights(fake), made_up_lookups(shape):
        objective = objective_to_train(settings, models, torch.device("cpu"))
    for module in objective.modules():
        if isinstance(module, InBatchLanguageModel):
            module.find_readers = _every_other
    return objective


def step_cost(settings: RunSettings, shape: Shape, workers: int = 1) -> StepCost:
    """What a step takes on each of so many GPUs, ``training.bf16`` being resolved.

    A batch of many chunks is counted at two smaller sizes, and several pieces of a rank as one that comes after others.
    Raises ``UserError`` as training does, and for models of which no configuration is at hand.
    """
    rows = shape.rows
    unit = (settings.objective.chunk_size or rows) * max(1, workers // settings.training.batches_per_step)
    few, more = _CHUNKS_COUNTED * unit, 2 * _CHUNKS_COUNTED * unit
    if rows <= 1.5 * more or settings.objective.trains == "contextual":
        return _counted(settings, shape, workers)
    less, greater = (astuple(_counted(settings, replace(shape, rows=size), workers)) for size in (few, more))
    times = (rows - few) / (more - few)
    return StepCost(*(each + (other - each) * times for each, other in zip(less, greater, strict=True)))


def _counted(settings: RunSettings, shape: Shape, workers: int) -> StepCost:
    fake, training, pieces = FakeTensorMode(allow_non_fake_inputs=True), settings.training, 1
    with _ranks(workers), attention_of_gpus():
        objective = outlined_objective(settings, shape, fake)
        if not objective.joins_step and (pieces := max(1, training.batches_per_step // workers)) > 1:
            training = training.model_copy(update={"batches_per_step": workers})
        few = settings.model_copy(update={"training": training})
        cost = count_step(objective, few, shape, _OneRank(fake), after_others=pieces > 1)
    times = {name: getattr(cost, name) * pieces for name in ("flops", "launches", "tokens")}
    return replace(cost, **times, sent=cost.sent * (1 if settings.sharding == "replicated" else pieces))


def count_step(
    objective: Objective[Any], settings: RunSettings, shape: Shape, counting: Counting, after_others: bool = False
) -> StepCost:
    """One step of ``objective``, fake or real, on this rank: its second one, when the optimizer has its states.

    ``after_others``: gradients of earlier pieces are there.
    """
    training, states_in_bytes = settings.training, settings.training.optimizer.kind == "adamw_8bit"
    batches = MadeUpBatches(shape, training.batches_per_step, settings.objective)
    order = run_order(objective, batches, training.model_copy(update={"epochs": 1}))
    objective.batch_group = collectives.neighbours(order.ranks_per_loss)
    step = next(iter(order.steps(0)))
    collated = Reader(batches, objective, training.seed, training.hard_negatives).read_step(step)
    kind = "adamw" if states_in_bytes else training.optimizer.kind  # which no CPU has
    optimizer = build_optimizer(objective, training.optimizer.model_copy(update={"kind": kind}))
    objective.train()
    trained = [each for each in objective.parameters() if each.requires_grad]
    marks: list[int] = []
    objective.register_forward_hook(lambda *_: marks.append(counting.alive))
    for tensor in [*objective.parameters(), *objective.buffers()]:
        counting.hold(_local(tensor.detach()))
    weights, gradients = counting.alive, sum(_local(each).nbytes for each in trained)
    map_nest(collated, Tensor, counting.hold)
    before = counting.alive
    with counting:
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        states = counting.alive - before - gradients
        if after_others:
            vars(objective)["zero_grad"] = lambda **_: None
        objective.zero_grad(set_to_none=True)
        if states_in_bytes:  # each of the two moments
            states, counting.alive = states // 4, counting.alive - states + states // 4
        counting.mark()
        counting.flops = counting.launches = counting.sent = 0
        compute_gradients(objective, step, collated, order, training, batches.uri)
        backward = counting.mark()
        optimizer.step()
    tokens: list[int] = []
    map_nest(collated, Chunks, lambda chunks: tokens.extend(int(c["attention_mask"].sum()) for c in chunks.chunks))
    return StepCost(
        weights,
        gradients,
        states,
        kept=max(marks) - weights - states - gradients * after_others,
        peak=max(backward, counting.mark()),
        flops=counting.flops,
        launches=counting.launches,
        sent=counting.sent,
        tokens=sum(tokens),
        parameters=sum(each.numel() for each in objective.parameters()),
        trained=sum(each.numel() for each in trained),
    )


def _local(tensor: Any) -> Tensor:
    """This rank's part of a tensor that is shared out."""
    return cast(Tensor, tensor.to_local() if hasattr(tensor, "to_local") else tensor)
