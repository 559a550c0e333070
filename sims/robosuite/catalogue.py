"""robosuite's tasks: instruction, step limit, number of arms, and whether there is a shaped reward."""

from __future__ import annotations

from dataclasses import dataclass

from embodied.errors import UserError


@dataclass(frozen=True)
class Entry:
    """One task.

    `step_limit` is robomimic's evaluation horizon for its data of proficient humans (arXiv 2108.03298, its dataset
    registry); for the other tasks it is the horizon of robosuite's benchmark, 500 (arXiv 2009.12293).
    """

    instruction: str
    step_limit: int = 500
    arms: int = 1
    shaped: bool = True


def _place(thing: str, step_limit: int = 500) -> Entry:
    return Entry(f"put the {thing} into its bin", step_limit)


CATALOGUE = {
    "Lift": Entry("lift the cube", 400),
    "Stack": Entry("put the red cube on the green one"),
    "PickPlace": Entry("put each object into its bin"),
    "PickPlaceSingle": Entry("put the object into its bin"),
    "PickPlaceMilk": _place("milk"),
    "PickPlaceBread": _place("bread"),
    "PickPlaceCereal": _place("cereal"),
    "PickPlaceCan": _place("can", 400),
    "NutAssembly": Entry("put each nut on its peg"),
    "NutAssemblySingle": Entry("put the nut on its peg"),
    "NutAssemblySquare": Entry("put the square nut on the square peg", 400),
    "NutAssemblyRound": Entry("put the round nut on the round peg"),
    "Door": Entry("open the door"),
    "TwoArmLift": Entry("lift the pot level with both arms", arms=2),
    "TwoArmPegInHole": Entry("put the peg into the hole", arms=2),
    "TwoArmHandover": Entry("hand the hammer over to the other arm", arms=2),
    "TwoArmTransport": Entry("bring the hammer across and the rubbish into the bin", 700, arms=2, shaped=False),
}


def entry(task: str) -> Entry:
    """The catalogue entry of `task`.

    Raises:
        UserError: for an unknown name.
    """
    if task not in CATALOGUE:
        raise UserError(f"unknown robosuite task {task!r}; expected one of {', '.join(CATALOGUE)}")
    return CATALOGUE[task]
