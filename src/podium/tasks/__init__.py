"""What is asked, how an answer is scored, and which problems may be learned from."""

from podium.config import TaskConfig
from podium.errors import TaskError
from podium.parts import TASKS
from podium.tasks.base import Message, Problem, Prompt, RewardInputs, Split, Task, check_disjoint, task_fingerprint
from podium.tasks.context import CountTokens, TaskContext
from podium.tasks.outcomes import Failed, Outcome, Score
from podium.tasks.scoring import Rewards, Scorer, check_reward
from podium.tasks.supervised import draw_targets

__all__ = [
    "CountTokens",
    "Failed",
    "Message",
    "Outcome",
    "Problem",
    "Prompt",
    "RewardInputs",
    "Rewards",
    "Score",
    "Scorer",
    "Split",
    "Task",
    "TaskContext",
    "build_task",
    "check_disjoint",
    "check_reward",
    "draw_targets",
    "task_fingerprint",
]


def build_task(config: TaskConfig, *, exact_match: bool = True, count_tokens: CountTokens | None = None) -> Task:
    """The task that a config names; the keywords are those of `TaskContext`.

    TaskError for an unknown name, unfit params, unfit rows or too few distinct problems; ConfigError for missing files.
    """
    task = TASKS.resolve(config.name, config.source)(TaskContext(config, exact_match, count_tokens))
    if not isinstance(task, Task):
        raise TaskError(f"task.name: {config.name} must give a podium.tasks.Task, got {task!r}")
    return task
