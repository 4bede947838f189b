"""The driver's loops, and what a run leaves behind."""

from podium.trainers.base import Trainer, TrainerContext
from podium.trainers.launch import Scores, evaluate_model, run
from podium.trainers.ppo import PPOTrainer
from podium.trainers.run_directory import RunDirectory
from podium.trainers.session import Session
from podium.trainers.sft import SFTTrainer

__all__ = ["PPOTrainer", "RunDirectory", "SFTTrainer", "Scores", "Session", "Trainer", "TrainerContext", "evaluate_model", "run"]
