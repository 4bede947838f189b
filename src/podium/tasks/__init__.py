"""What is asked, how an answer is scored, and which problems may be learned from."""

from podium.config import TaskConfig
from podium.tasks.base import Message, Problem, Prompt, RewardInputs, Split, Task, check_disjoint, task_fingerprint
from podium.tasks.files import CountTokens, FileTask
from podium.tasks.outcomes import Failed, Outcome, Score
from podium.tasks.reasoning_gym import ReasoningGymTask
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
    "build_task",
    "check_disjoint",
    "check_reward",
    "draw_targets",
    "task_fingerprint",
]


def build_task(config: TaskConfig, *, exact_match: bool = True, count_tokens: CountTokens | None = None) -> Task:
    """The task that a config names; `exact_match`: no reward function is set. `count_tokens` is `FileTask`'s.

    TaskError for an unknown name, unfit params, unfit rows or too few distinct problems; ConfigError for missing files.
    """
    if config.has_files:
        return FileTask(config, exact_match=exact_match, count_tokens=count_tokens)
    return ReasoningGymTask(config, exact_match=exact_match)
