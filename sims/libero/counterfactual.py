"""Counterfactual episodes: another object of the same scene is asked for.

A policy that always sees one object moved in a scene can ignore the instruction. In a share of training episodes the
instruction names another object, and goal and reward are that object's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from embodied.environments.engine import STARTS_PER_SEED
from embodied.errors import UserError
from sims.libero.language import PICK_AND_PLACE, Wordings
from sims.libero.scene.predicates import Predicate
from sims.libero.scene.scene import Scene
from sims.libero.suite import Task

BLOCK = 7
"""Number of starts within which their order is turned, by one more in each block.

Thus a regular choice of starts for another purpose (`placement`, every fifth at areas_share=0.2) coincides as often as
elsewhere.
"""


def with_other_objects(task: Task) -> list[Task]:
    """`task` with every other object of its scene in place of its own: instruction and goal are of that object.

    They are objects that can be named by their category alone. There are none for tasks other than to pick one such
    object and place it.
    """
    problem = task.problem
    parts = PICK_AND_PLACE.fullmatch(task.language)
    if parts is None or len(problem.goal) != 1 or len(problem.goal[0]) != 3:
        return []
    predicate, own, place = problem.goal[0]
    if _noun(task, own) != parts["object"]:
        return []
    target = problem.regions[place].target if place in problem.regions else place
    others = [name for name in problem.objects if name not in (own, target) and _noun(task, name)]
    variants = []
    for name in others:
        aim = replace(
            problem,
            language=problem.language.replace(parts["object"], _noun(task, name)),
            goal=[(predicate, name, place)],
            obj_of_interest=[name if each == own else each for each in problem.obj_of_interest],
        )
        language = task.language.replace(parts["object"], _noun(task, name))
        variants.append(replace(task, language=language, problem=aim))
    return variants


def _noun(task: Task, name: str) -> str:
    """Noun of the object `name`, "cream cheese" of cream_cheese_1; "" if the scene has two that are called so.

    LIBERO's instructions call new_salad_dressing_1 the salad dressing.
    """
    objects = task.problem.objects
    nouns = {each: category.removeprefix("new_").replace("_", " ") for each, category in objects.items()}
    noun = nouns.get(name, "")
    return noun if list(nouns.values()).count(noun) == 1 else ""


@dataclass(frozen=True)
class Aim:
    """Object that an episode asks for: the goal's predicates and the instructions by number."""

    task: Task
    goal: tuple[Predicate, ...]
    wordings: Wordings


class Aims:
    """Aims of the numbered episodes of one scene, in one of `language.WORDINGS`.

    In a `share` of them, evenly spread over the starts of a seed and over the other objects, another object is asked
    for; the first start is the task's own.

    Raises:
        UserError: if there should be such episodes, and the task has none.
    """

    def __init__(self, scene: Scene, wording: str, share: float = 0.0) -> None:
        self.share = share
        self.own = Aim(scene.task, scene.goal, Wordings(scene.task, wording))
        tasks = with_other_objects(scene.task) if share else []
        if share and not tasks:
            raise UserError(
                f"task.counterfactual_share={share:g}: {scene.task.name} asks for nothing that another object of its "
                "scene could replace; choose tasks of libero_object, or 0"
            )
        self.others = [Aim(task, (_aimed_at(scene, task),), Wordings(task, wording)) for task in tasks]

    def __call__(self, start: int) -> Aim:
        """Aim of the episode that begins at initial state number `start`."""
        block, place = divmod(start % STARTS_PER_SEED, BLOCK)
        number = block * BLOCK + (place + block) % BLOCK
        count = math.floor(number * self.share)
        if math.floor((number + 1) * self.share) == count:
            return self.own
        return self.others[count % len(self.others)]


def _aimed_at(scene: Scene, task: Task) -> Predicate:
    """The scene's only predicate, of the object of `task`'s goal."""
    (predicate,) = scene.goal
    name = task.problem.goal[0][1]
    body = int(scene.object_body[scene.objects.index(name)])
    return replace(predicate, a=body, owner_a=scene.instances.index(name) if predicate.owner_a >= 0 else -1)
