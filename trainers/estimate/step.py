"""What one step of a training run takes, counted on the run's own code: encoders, objective, order, gradients, update.

One rank is counted, of as many as the run has. Its collectives go nowhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trainers.engine import collectives
from trainers.engine.gradient_cache import Chunks
from trainers.engine.optimization import build_optimizer
from trainers.engine.reading import Reader, run_order
from trainers.engine.step import compute_gradients
from trainers.estimate.counting import Counting, attention_of_gpus
from trainers.estimate.made_up import MadeUpBatches, Shape, outlined_objective
from trainers.estimate.outlines import make_fake
from trainers.objective import Objective, map_nest
from trainers.run_settings import RunSettings
from trainers.training_run import place

_CHUNKS_COUNTED = 2  # of a side, and twice as many, where a batch is cut into more: a step is linear in them


@dataclass(frozen=True)
class StepCost:
    """Of one rank and one step. Bytes: what is held all along, and the most.

    ``launches``: of kernels; ``sent``: bytes that this rank gives to collectives; ``tokens``: of all its texts.
    """

    weights: float
    gradients: float
    optimizer: float
    peak: float
    flops: float
    launches: float
    sent: float
    tokens: float
    parameters: float
    trained: float

    @property
    def parts(self) -> str:
        """What the peak consists of, for the user."""
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer states": self.optimizer}
        parts["activations"] = max(0, self.peak - sum(parts.values()))
        return ", ".join(f"{part} {size / 2**30:.1f}" for part, size in parts.items())


@contextmanager
def _ranks(count: int) -> Iterator[None]:
    """A process group whose collectives go nowhere; none for a single rank."""
    if count == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def step_cost(settings: RunSettings, shape: Shape, workers: int = 1) -> StepCost:
    """What a step takes on each of so many GPUs, ``training.bf16`` being resolved.

    A batch of many chunks is counted at two smaller sizes, and several pieces of a rank as one that comes after others.
    Raises ``UserError`` as training does, and for models without a configuration here.
    """
    rows = shape.rows
    unit = (settings.objective.chunk_size or rows) * max(1, workers // settings.training.batches_per_step)
    few, more = _CHUNKS_COUNTED * unit, 2 * _CHUNKS_COUNTED * unit
    if rows <= 1.5 * more or settings.objective.trains == "contextual":
        return _counted(settings, shape, workers)
    less, greater = (astuple(_counted(settings, replace(shape, rows=size), workers)) for size in (few, more))
    times = (rows - few) / (more - few)
    return StepCost(*(each + (other - each) * times for each, other in zip(less, greater, strict=True)))


def fake_objective(settings: RunSettings, shape: Shape, fake: FakeTensorMode) -> Objective[Any]:
    """The run's objective with fake weights, in the state to be counted in."""
    objective = outlined_objective(settings, shape, "meta")
    make_fake(objective, fake)
    return place(objective, settings, None)


def _counted(settings: RunSettings, shape: Shape, workers: int) -> StepCost:
    fake, training, pieces = FakeTensorMode(allow_non_fake_inputs=True), settings.training, 1
    with _ranks(workers), attention_of_gpus():
        objective = fake_objective(settings, shape, fake)
        if not objective.joins_step and (pieces := max(1, training.batches_per_step // workers)) > 1:
            training = training.model_copy(update={"batches_per_step": workers})
            vars(objective)["zero_grad"] = lambda **_: None  # gradients of earlier pieces are there
        cost = count_step(objective, settings.model_copy(update={"training": training}), shape, Counting(fake))
    times = {name: getattr(cost, name) * pieces for name in ("flops", "launches", "tokens")}
    return replace(cost, **times, sent=cost.sent * (1 if settings.sharding == "replicated" else pieces))


def count_step(objective: Objective[Any], settings: RunSettings, shape: Shape, counting: Counting) -> StepCost:
    """One step of ``objective``, fake or real, on this rank: its second one, when the optimizer has its states."""
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
        objective.zero_grad(set_to_none=True)
        if states_in_bytes:  # each of the two moments
            states, counting.alive = states // 4, counting.alive - states + states // 4
        counting.mark()
        counting.flops = counting.launches = counting.sent = 0
        compute_gradients(objective, step, collated, order, training, batches.uri)
        optimizer.step()
    tokens: list[int] = []
    map_nest(collated, Chunks, lambda chunks: tokens.extend(int(c["attention_mask"].sum()) for c in chunks.chunks))
    return StepCost(
        weights,
        gradients,
        states,
        peak=counting.mark(),
        flops=counting.flops,
        launches=counting.launches,
        sent=counting.sent,
        tokens=sum(tokens),
        parameters=sum(each.numel() for each in objective.parameters()),
        trained=sum(each.numel() for each in trained),
    )


def _local(tensor: Any) -> Any:
    """This rank's part of a tensor that is shared out."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
