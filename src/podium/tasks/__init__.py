"""What is asked, how an answer is verified, and which problems may be learned from."""

from podium.config import TaskConfig
from podium.tasks.base import Problem, Split, Task, check_disjoint, score
from podium.tasks.reasoning_gym import ReasoningGymTask
from podium.tasks.supervised import draw_targets

__all__ = ["Problem", "Split", "Task", "build_task", "check_disjoint", "draw_targets", "score"]


def build_task(config: TaskConfig) -> Task:
    """The task that a config names. TaskError for an unknown name, unfit params or too few distinct problems."""
    return ReasoningGymTask(config)
