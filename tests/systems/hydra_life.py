"""The chapters of Hydra's life: what its trainers, evaluators and operators do, and when they die.

Every act is that of a new process, which remembers nothing and comes back by `restore`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast import Checkpoint, Registry, Run, sync
from holdfast.registry.curation.pool.selection import Matchup
from holdfast.registry.deriving.transitions import Transitioned
from holdfast.registry.saving.restoring import Attempt
from holdfast.registry.upkeep.verifying import Finding
from tests.systems.hydra import (
    CHANNELS,
    PRESET,
    SEED,
    TILES,
    Student,
    Teacher,
    Training,
    seeds_of,
)
from tests.systems.places import Place

#: Steps between two saves of phase 1, and PPO updates between two of the others.
CLONE_EVERY, PPO_EVERY = 10_000, 500
CLONED, DISTILLED, PLAYED = 23, 22, 32
#: The best checkpoints come early, so that their rank alone protects them from going first.
BEST_CLONE, BEST_DISTILLED, BEST_PLAYED = 4, 3, 20
#: From this save of phase 1 on processes die, each at the next write of a save.
FIRST_DEATH = 6
#: So many saves late come the ratings of a checkpoint.
LAG = 2
#: What phase 1 must have reached before it may end.
READY = {"discard_accuracy": 0.66, "average_placement": 2.5, "deal_in_rate": 0.12}
#: What the first transition does besides the document's own table.
SWITCHED = ("readiness", "new_value_head")
#: The part of the student that the first transition resets.
VALUE_HEAD = "model_record/*value*"


class Hydra:
    """What the chapters share.

    Attributes:
        place: Where the registry is.
        mirror: An empty registry that it is copied to in the end.
        run_id: Of the run.
        added: Bytes by which the registry grew for something, by what it was.
        deaths: Writes before and after which a process died in a save.
        left: What was wrong with the registry after one of them.
        transition_deaths: The same in a transition.
        passed_over: What the restore after the divergence reported.
        drawn: Opponents of the first 500 games as the trainer drew them in the end.
        findings: What was wrong with the registry in the end.
        entered: What the transitions into phases 2 and 3 gave.
        copies: Copies of the registry as it was at some time.
    """

    def __init__(self, place: Place, mirror: Place) -> None:
        self.place = place
        self.mirror = mirror
        self.run_id = ""
        self.added: dict[str, int] = {}
        self.deaths: list[tuple[int, bool]] = []
        self.left: list[Finding] = []
        self.transition_deaths: list[tuple[int, bool]] = []
        self.entered: dict[int, Transitioned] = {}
        self.copies: dict[str, Place] = {}
        self.drawn: list[Matchup] = []
        self.findings: tuple[Finding, ...] | None = None
        self.passed_over: tuple[Attempt, ...] = ()

    def keep(self, name: str) -> None:
        """Keep a copy of the registry as it is; of a folder only, where that is quick."""
        if not self.place.url.startswith("s3://"):
            self.copies[name] = self.place.copy()

    def weigh(self, what: str, act: Callable[[], Any]) -> None:
        """Do something and note how much bigger the registry is for it."""
        before = self.place.size_bytes()
        act()
        self.added[what] = self.place.size_bytes() - before


def resume(run: Run) -> Training:
    """Restore the run, as a new process."""
    restored = run.restore()
    phase = 1 if restored is None else restored.state["phase"]
    training = Training(phase, seeds_of(phase))
    if restored is not None:
        training.load_state_dict(restored.state)
    return training


def without_time(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without the one thing in it that no resume can repeat."""
    return {key: value for key, value in state.items() if key != "timestamp"}


# Before training


def birth(hydra: Hydra) -> None:
    """Begin the run; keep what never changes and what evaluations need."""
    with hydra.place.open() as reg:
        run = reg.create_run(preset=PRESET, seed=SEED, config={"blocks": 3, "channels": 32})
        hydra.run_id = run.id
        run.pins.artifacts.set("grp", grp_network())
        run.pins.artifacts.set("eval_seeds", {"bank": torch.arange(0x2000, 0x2000 + 1000)})


def grp_network() -> dict[str, Any]:
    """Return the network that is trained before everything else, and never again."""
    generator = torch.Generator().manual_seed(99)
    return {"grp": {"gru": torch.randn(64, 7, generator=generator), "layers": 2}}


# Phase 1: behavioural cloning


def cloning(hydra: Hydra) -> None:
    """Save 23 times; from the sixth save on, processes die in it at one write after the other."""
    deaths = next_deaths()
    death = next(deaths)
    for number in range(1, CLONED + 1):
        if number >= FIRST_DEATH and death is not None:
            died = hydra.place.dies(
                lambda reg, number=number: clone(reg, hydra.run_id, number), *death
            )
            if died:
                hydra.deaths.append(death)
                with hydra.place.open() as reg:
                    hydra.left += reg.verify().findings
            death = deaths.send(died)
        with hydra.place.open() as reg:
            clone(reg, hydra.run_id, number)


def next_deaths() -> Iterator[tuple[int, bool] | None]:
    """Yield writes to die at: before the first, the second, ..., then after; told who died."""
    for after in (False, True):
        write, died = 1, True
        while died:
            died = yield write, after
            write += 1
    while True:
        yield None


def clone(reg: Registry, run_id: str, number: int) -> Checkpoint:
    """Train to the next save, unless that was done, and save."""
    run = reg.run(run_id)
    training = resume(run)
    step = number * CLONE_EVERY
    if training.global_step < step:
        training.train(CLONE_EVERY)
    training.metrics = {"heldout_ce": heldout_ce(number)}
    return run.save(training, step=step, metrics=training.metrics)


def heldout_ce(number: int) -> float:
    """Return the held-out loss of the checkpoint of this number: it falls, then it rises."""
    return 0.40 + 0.01 * abs(number - BEST_CLONE)


def divergence(hydra: Hydra) -> None:
    """Save weights with a NaN in them; then come back behind that and save what is sound."""
    with hydra.place.open() as reg:
        run = reg.run(hydra.run_id)
        training = resume(run)
        training.train(CLONE_EVERY)
        with torch.no_grad():
            training.student.policy_head.bias[7] = float("nan")
        training.metrics = {"heldout_ce": 0.0}
        run.save(training, step=training.global_step)
    with hydra.place.open() as reg:
        run = reg.run(hydra.run_id)
        hydra.passed_over = run.restore().report
        clone(reg, hydra.run_id, CLONED + 1)


def first_gate(hydra: Hydra) -> None:
    """Save again what is saved; make the best clone a gate, and a fork of the newest."""
    with hydra.place.open() as reg:
        run = reg.run(hydra.run_id)
        training = resume(run)
        training.metrics = {"heldout_ce": 0.5}
        hydra.weigh("the same step again", lambda: run.save(training, step=training.global_step))
        training.global_step += CLONE_EVERY
        hydra.weigh("the same weights", lambda: run.save(training, step=training.global_step))
        hydra.weigh("gate", lambda: run.pins.gates.set("bc_best"))
        latest = run.latest(phase=1)
        hydra.weigh("fork", lambda: reg.fork(latest, f"{run.id}-side"))


# Phase 2: distillation


def first_transition(hydra: Hydra) -> None:
    """Go over to phase 2; processes die at each write of it, and no two do it differently."""
    hydra.keep("phase 1")
    deaths = next_deaths()
    death = next(deaths)
    while death is not None:
        died = hydra.place.dies(lambda reg: enter(reg.run(hydra.run_id), 2), *death)
        if died:
            hydra.transition_deaths.append(death)
        death = deaths.send(died)
    with hydra.place.open() as reg:
        run = reg.run(hydra.run_id)
        hydra.entered[2] = enter(run, 2)
        training = begin(hydra.entered[2], 2)
        run.save(training, step=training.global_step)


def enter(run: Run, to: int, **options: Any) -> Transitioned:
    """Carry a transition out as Hydra's trainer does."""
    return run.phases.transition(
        to,
        targets={"model_record": Student()},
        metrics=READY,
        initialise={VALUE_HEAD: fresh_value_head} if to == 2 else {},
        **{"enable": SWITCHED if to == 2 else (), **options},
    )


def fresh_value_head() -> dict[str, torch.Tensor]:
    """Make a new value head: orthogonal, gain 1."""
    head = torch.nn.Linear(CHANNELS * TILES, 1)
    torch.nn.init.orthogonal_(head.weight, 1.0, generator=torch.Generator().manual_seed(5))
    torch.nn.init.zeros_(head.bias)
    made = head.to(torch.bfloat16).state_dict()
    return {f"value_head.{name}": value for name, value in made.items()}


def begin(entered: Transitioned, phase: int) -> Training:
    """Return the training of a phase from what its transition left."""
    training = Training(phase, seeds_of(phase))
    training.global_step = entered.state["global_step"]
    training.student.load_state_dict(entered.state["model_record"])
    training.fresh_optimizer()
    if phase == 2:
        training.teacher = Teacher()  # its stem and its masks are new, the rest is the student's
        training.teacher.load_state_dict(entered.state["teacher_state_dict"], strict=False)
        training.teacher.eval().requires_grad_(False)
    return training


def distillation(hydra: Hydra) -> None:
    """Save 22 times; ratings come two saves late, from a process that is not the trainer's."""
    with hydra.place.open() as reg, hydra.place.open() as elsewhere:
        run, evaluator = reg.run(hydra.run_id), elsewhere.run(hydra.run_id)
        training = resume(run)
        for number in range(2, DISTILLED + 1):
            training.train(PPO_EVERY)
            training.teacher.fade(min(1.0, number / BEST_DISTILLED))
            run.save(training, step=training.global_step)
            evaluate(evaluator, 2, number - LAG, BEST_DISTILLED)
        for late in range(DISTILLED - LAG + 1, DISTILLED + 1):
            evaluate(evaluator, 2, late, BEST_DISTILLED)


def evaluate(run: Run, phase: int, number: int, best: int) -> None:
    """Report the rating of a checkpoint by its number in its phase: higher towards the best one."""
    if number < 1:
        return
    step = first_step(run, phase) + (number - 1) * PPO_EVERY
    (checkpoint,) = (one for one in run.checkpoints(phase) if one.step == step)
    checkpoint.report(rating(number, best))


def rating(number: int, best: int) -> dict[str, float]:
    """Return a rating whose mu alone would choose another checkpoint than mu - 3 sigma."""
    return {"mu": 25 + 0.1 * number, "sigma": 2.0 + 0.2 * abs(number - best)}


def first_step(run: Run, phase: int) -> int:
    """Return the step of a phase's first checkpoint, kept or not."""
    return min(one.step for one in run.history.manifest().checkpoints if one.phase == str(phase))


def second_gate(hydra: Hydra) -> None:
    """Make the best distilled student a gate."""
    with hydra.place.open() as reg:
        reg.run(hydra.run_id).pins.gates.set("distill_best")
    hydra.keep("phase 2")


# Phase 3: the league


def second_transition(hydra: Hydra) -> None:
    """Go over to phase 3: no teacher, two anchors in the pool."""
    with hydra.place.open() as reg:
        run = reg.run(hydra.run_id)
        hydra.entered[3] = enter(run, 3)
        training = begin(hydra.entered[3], 3)
        save_played(run, training, 1)


def league(hydra: Hydra) -> None:
    """Save 32 times, play after each save; halfway the trainer is another process."""
    for numbers in (range(2, 20), range(20, PLAYED + 1)):
        with hydra.place.open() as reg, hydra.place.open() as elsewhere:
            run, evaluator = reg.run(hydra.run_id), elsewhere.run(hydra.run_id)
            training = resume(run)
            for number in numbers:
                training.train(PPO_EVERY)
                save_played(run, training, number)
                play(run, number)
                evaluate(evaluator.refresh(), 3, number - LAG, BEST_PLAYED)


def save_played(run: Run, training: Training, number: int) -> None:
    """Save, which promotes the model."""
    training.pool = {
        "next_version": run.manifest.next_version,
        "roster": [entry.version for entry in run.pool.roster()],
    }
    run.save(training, step=training.global_step)


def play(run: Run, number: int) -> None:
    """Play a game against what is drawn, and record it."""
    opponent = run.pool.draw(number).version
    newest = run.pool.roster()[-1].version
    others = [entry.version for entry in run.pool.roster()[:3]]
    seats = list(dict.fromkeys([newest, *([] if opponent is None else [opponent]), *others]))
    run.pool.load(seats[-1])
    run.pool.record_match(seats[:4], range(len(seats[:4])), match=f"game-{number}")


def aftermath(hydra: Hydra) -> None:
    """Promote a checkpoint of phase 2 by hand; keep what was evaluated; copy all to a mirror."""
    with hydra.place.open() as reg:
        run = reg.run(hydra.run_id)
        older = run.checkpoints(2)[5]
        hydra.weigh("promotion", lambda: run.pool.promote(older, mu=30.0, sigma=1.0))
        run.pins.artifacts.set(
            "eval_full", {"games": 200_000, "points": torch.linspace(-135, 90, 50)}
        )
        hydra.drawn = run.pool.draws(0, 500)
    with hydra.place.open() as reg, hydra.mirror.open() as target:
        sync(reg, target, [hydra.run_id])
    hydra.keep("phase 3")


def ending(hydra: Hydra) -> None:
    """Look at every byte; then release everything."""
    with hydra.place.open() as reg:
        hydra.findings = reg.verify(deep=True).findings
        reg.run(hydra.run_id).retention.drop("the league is over", now=True)


CHAPTERS = [
    birth,
    cloning,
    divergence,
    first_gate,
    first_transition,
    distillation,
    second_gate,
    second_transition,
    league,
    aftermath,
    ending,
]


#: Opens a run, lived to the end of a chapter at least, for reading.
Reader = Callable[[Callable[[Hydra], None]], Run]
