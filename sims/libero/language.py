"""Instructions: LIBERO's two wordings for each task, and paraphrases.

LIBERO's evaluation uses the task's name ("pick up the milk and place it in the basket"), its BDDL files have another
wording ("pick the milk ..."). Paraphrases come from a small grammar, and measure generalisation to other wordings where
training never has them. Some are held out by sentence: verbs or orders of clauses do not occur in training, but
objects have their names. Others are held out by words: neither do the nouns and prepositions ("deliver the vinaigrette
within the hamper"), so that only a policy with words from elsewhere can follow.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from itertools import product

from embodied.errors import UserError
from sims.libero.suite import Task

INSTRUCTION_BYTES = 128
"""Bytes; the longest wording of the 130 tasks has 109."""

WORDINGS = ("name", "bddl", "held_out", "held_out_words", "training")
"""The task's name, the BDDL file's text, paraphrases held out by sentence and by words, and training's (LIBERO's two
and paraphrases)."""

SPLITS = {"training": 0, "held_out": 1, "held_out_words": 2}
"""Column of the grammar by wording."""
LIFT = (
    ("pick up", "pick", "take", "get", "lift up"),
    ("grab", "grasp", "fetch", "collect"),
    ("retrieve", "seize"),
)
PUT = (("place", "put", "set", "leave"), ("drop", "deposit", "lay"), ("transfer", "deliver", "bring"))
ORDERS = (
    (
        "{lift} {object} and {put} it {place}",
        "{lift} {object} then {put} it {place}",
        "{put} {object} {place}",
        "{place} {put} {object}",
    ),
    (
        "{lift} {object} and {put} it {place}",
        "{object} should be {place}",
        "{place} goes {object}",
        "after you {lift} {object} {put} it {place}",
    ),
    (
        "{lift} {object} and {put} it {place}",
        "{put} {object} {place}",
        "{object} belongs {place}",
        "i want {object} {place}",
    ),
)
COURTESIES = (("", "please"), ("", "kindly"), ("", "quickly"))
ARTICLES = (("the", ""), ("the", "that"), ("the", "this"))
PREPOSITIONS = {
    "in": (("in", "into"), ("in", "inside"), ("within",)),
    "on": (("on", "onto"), ("on", "upon"), ("atop",)),
}
CONTAINERS = {
    "alphabet soup": ("can", "tin"),
    "bbq sauce": ("bottle", "flask"),
    "butter": ("box", "pack"),
    "chocolate pudding": ("box", "pack"),
    "cream cheese": ("box", "pack"),
    "ketchup": ("bottle", "flask"),
    "milk": ("carton", "pack"),
    "orange juice": ("carton", "pack"),
    "salad dressing": ("bottle", "flask"),
    "tomato sauce": ("can", "tin"),
}
SYNONYMS = {
    "alphabet soup": "letter noodle broth",
    "bbq sauce": "barbecue marinade",
    "butter": "margarine",
    "chocolate pudding": "cocoa dessert",
    "cream cheese": "mascarpone",
    "ketchup": "catsup",
    "milk": "dairy drink",
    "orange juice": "citrus drink",
    "salad dressing": "vinaigrette",
    "tomato sauce": "marinara",
    "basket": "hamper",
    "book": "novel",
    "bowl": "dish",
    "cabinet": "cupboard",
    "caddy": "organizer",
    "cookie": "biscuit",
    "frying pan": "skillet",
    "microwave": "oven",
    "mug": "cup",
    "plate": "platter",
    "stove": "cooker",
    "tray": "salver",
    "wine bottle": "carafe",
}
"""Other nouns, which no text of training has; nouns that are missing here keep their names in all paraphrases."""
VERBS = {
    "put": PUT,
    "place": PUT,
    "open": (("open", "pull open"), ("slide open",), ("unseal",)),
    "close": (("close", "shut"), ("push shut",), ("fasten",)),
    "turn on": (("turn on", "switch on"), ("activate",), ("ignite",)),
    "turn off": (("turn off", "switch off"), ("deactivate",), ("extinguish",)),
    "push": (("push", "move"), ("shove",), ("nudge",)),
    "stack": (("stack", "pile"), ("heap",), ("superimpose",)),
}
NOUN = re.compile(rf"\b({'|'.join(SYNONYMS)})\b")
THE = re.compile(r"\bthe\b")
VERB = re.compile(rf"\b({'|'.join(VERBS)})\b")
PICK_AND_PLACE = re.compile(r"pick up the (?P<object>.+) and (?:place|put) it (?P<preposition>\w+) (?P<place>.+)")


def check_wording(wording: str) -> None:
    """Raise UserError for an unknown wording."""
    if wording not in WORDINGS:
        raise UserError(f"unknown wording {wording!r}; expected one of {', '.join(WORDINGS)}")


class Wordings:
    """The instructions of one task in one of `WORDINGS`, by number; the same in every run."""

    def __init__(self, task: Task, wording: str) -> None:
        check_wording(wording)
        wordings = {"name": [task.language], "bddl": [task.problem.language]}
        self._texts: Sequence[Sequence[str]] = (
            [wordings[wording]] if wording in wordings else [paraphrases(task, wording)]
        )
        if wording == "training":
            self._texts = [wordings["name"], wordings["bddl"], *2 * self._texts]
        self._key = f"{task.suite}/{task.name}"

    def __call__(self, number: int) -> str:
        """Instruction `number`; in training, a quarter each are the name and the BDDL file's text."""
        draw = zlib.crc32(f"{self._key}/{number}".encode())
        draw, kind = divmod(draw, len(self._texts))
        return self._texts[kind][draw % len(self._texts[kind])]


def paraphrases(task: Task, wording: str) -> list[str]:
    """All paraphrases of `task` in a wording of `SPLITS`; those held out are disjoint from training's."""
    texts = dict.fromkeys(_paraphrases(task.language, SPLITS[wording]))
    if wording != "training":
        training_texts = {task.language, task.problem.language, *_paraphrases(task.language, SPLITS["training"])}
        texts = {text: None for text in texts if text not in training_texts}
    return list(texts)


def _paraphrases(text: str, split: int) -> list[str]:
    parts = PICK_AND_PLACE.fullmatch(text)
    bodies = _verbs(text, split) if parts is None else _clauses(parts.groupdict(), split)
    if split == SPLITS["held_out_words"]:
        bodies = [NOUN.sub(lambda match: SYNONYMS[match[0]], body) for body in bodies]
    choices = product(bodies, COURTESIES[split], ARTICLES[split])
    return [" ".join([courtesy, *THE.sub(article, body).split()]).strip() for body, courtesy, article in choices]


def _clauses(parts: dict[str, str], split: int) -> list[str]:
    """Pick-and-place: varies verbs, preposition, container and order of clauses."""
    thing = parts["object"]
    preposition = parts["preposition"]
    things = [thing]
    prepositions = PREPOSITIONS.get(preposition, ((preposition,),) * len(SPLITS))[split]
    if thing in CONTAINERS and split != SPLITS["held_out_words"]:
        container = CONTAINERS[thing][split]
        things.append((f"{container} of {thing}", f"{thing} {container}")[split])
    return [
        order.format(lift=lift, put=put, object=f"the {thing}", place=f"{preposition} {parts['place']}")
        for order, lift, put, thing, preposition in product(
            ORDERS[split], LIFT[split], PUT[split], things, prepositions
        )
    ]


def _verbs(text: str, split: int) -> list[str]:
    """Other instructions: varies the verbs."""
    verbs = list(dict.fromkeys(VERB.findall(text)))
    choices = [dict(zip(verbs, chosen, strict=True)) for chosen in product(*(VERBS[verb][split] for verb in verbs))]
    return [VERB.sub(lambda match, replacements=replacements: replacements[match[0]], text) for replacements in choices]
