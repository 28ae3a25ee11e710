"""A brain of Thalia's document learns a curriculum in a run, each stage in a process of its own."""

from __future__ import annotations

from holdfast import Checkpoint, Run, register_adapter
from holdfast.registry.face.registry import Registry
from tests.systems.brain import SEED, STAGES, STEPS, Brain, RegionState, grow
from tests.systems.places import Place

RUN = "brain"

# Under the name of the class, by which Thalia's programs find it in a file.
register_adapter(
    f"{RegionState.__module__}.RegionState",
    RegionState,
    to_plain=vars,
    from_plain=lambda d: RegionState(**d),
)


class CurriculumTrainer:
    """The document's trainer: stages, each saved at its end."""

    def __init__(self, run: Run, brain: Brain) -> None:
        self.run, self.brain = run, brain

    def train_stage(self, stage: str) -> Checkpoint:
        """Train for one stage, save at each step and at its boundary."""
        for _ in range(STEPS):
            loss = self.brain.train()
            saved = self.save(stage, loss)
        return saved

    def save(self, stage: str, loss: float) -> Checkpoint:
        """Save the brain, with its metadata."""
        return self.run.save(
            self.brain.get_full_state(),
            step=self.brain.steps,
            phase=stage,
            metrics={"loss": loss, "neurons": self.brain.neurons},
            meta={
                "growth_history": self.brain.growth_history,
                "training_info": {"curriculum_stage": stage, "best_loss": loss},
            },
        )

    def load_checkpoint(self, stage: str) -> None:
        """Go back to the end of a stage; the next save supersedes all after it."""
        restored = self.run.restore(at=self.run.latest(phase=stage))
        self.brain.load_full_state(restored.state)
        self.brain.growth_history = list(restored.checkpoint.meta["growth_history"])


class Story:
    """What the chapters share.

    Attributes:
        place: Where the registry is.
    """

    def __init__(self, place: Place) -> None:
        self.place = place


def resumed(reg: Registry) -> CurriculumTrainer:
    """Return a trainer that goes on where the run is, in a new process."""
    run = reg.run(RUN, create=True, preset="thalia", seed=SEED)
    trainer, restored = CurriculumTrainer(run, Brain()), run.restore()
    if restored is not None:
        trainer.brain.load_full_state(restored.state)
        trainer.brain.growth_history = list(restored.checkpoint.meta["growth_history"])
    return trainer


def curriculum(story: Story) -> None:
    """Train all stages, each in a process of its own."""
    for stage in STAGES:
        with story.place.open() as reg:
            trainer = resumed(reg)
            grow(trainer.brain, stage)
            trainer.train_stage(stage)


CHAPTERS = [curriculum]
