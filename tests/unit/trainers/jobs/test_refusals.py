"""Which errors of a worker end a run at once, and what is told of them; as Ray Train's controller handles both."""

import pickle

import pytest
from ray.train import ControllerError, FailureConfig, WorkerGroupError
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision

from raytriever.errors import StorageError, UserError
from trainers.jobs.workers import EndAtMistakes, refusal_of

MISTAKE, FULL, LOST = UserError("row 3 has no negative"), StorageError("s3://full: no room"), RuntimeError("closed")


def test_a_mistake_is_raised_and_not_tried_again() -> None:
    with pytest.raises(UserError) as caught:
        EndAtMistakes().after_exception(None, {2: UserError("later"), 0: LOST, 1: MISTAKE})
    assert caught.value is MISTAKE
    policy = DefaultFailurePolicy(FailureConfig(max_failures=3))
    assert policy.make_decision(ControllerError(caught.value)) is FailureDecision.RAISE


def test_bad_luck_is_left_to_the_next_attempt() -> None:
    EndAtMistakes().after_exception(None, {0: LOST, 1: FULL})
    policy = DefaultFailurePolicy(FailureConfig(max_failures=1))
    decisions = [policy.make_decision(WorkerGroupError("", {0: LOST, 1: FULL})) for _ in range(2)]
    assert decisions == [FailureDecision.RETRY, FailureDecision.RAISE]


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ControllerError(MISTAKE), str(MISTAKE)),
        (ControllerError(LOST), None),
        (WorkerGroupError("", {0: LOST, 1: FULL}), str(FULL)),
        (WorkerGroupError("", {1: UserError("later"), 0: MISTAKE}), str(MISTAKE)),
        (WorkerGroupError("", {0: LOST}), None),
        (LOST, None),
        (None, None),
    ],
    ids=repr,
)
def test_a_refusal_is_found_in_what_comes_back(raised: Exception | None, said: str | None) -> None:
    found = refusal_of(pickle.loads(pickle.dumps(raised)))  # from the controller's process
    assert found is None if said is None else str(found) == said
