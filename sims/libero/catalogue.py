"""LIBERO's object categories: their model files, and the joint positions at which they are open or turned on."""

from pathlib import Path

from sims.libero.assets import Assets

ARTICULATED = (
    "basin_faucet",
    "faucet",
    "flat_stove",
    "microwave",
    "short_cabinet",
    "short_fridge",
    "slide_cabinet",
    "white_cabinet",
    "window",
    "wooden_cabinet",
)
SCANNED = (
    "akita_black_bowl",
    "basket",
    "chefmate_8_frypan",
    "glazed_rim_porcelain_ramekin",
    "plate",
    "red_bowl",
    "simple_rack",
    "white_bowl",
)
HOPE = (
    "alphabet_soup",
    "bbq_sauce",
    "butter",
    "chocolate_pudding",
    "cookies",
    "cream_cheese",
    "ketchup",
    "macaroni_and_cheese",
    "milk",
    "new_salad_dressing",
    "orange_juice",
    "popcorn",
    "salad_dressing",
    "tomato_sauce",
)
TURBOSQUID = (
    "black_book",
    "bowl_drainer",
    "desk_caddy",
    "dining_set_group",
    "moka_pot",
    "porcelain_mug",
    "red_coffee_mug",
    "white_storage_box",
    "white_yellow_mug",
    "wine_bottle",
    "wine_rack",
    "wooden_shelf",
    "wooden_tray",
    "wooden_two_layer_shelf",
    "yellow_book",
)
CATEGORIES = {*ARTICULATED, *SCANNED, *HOPE, *TURBOSQUID}

JOINT_GOALS: dict[tuple[str, str], tuple[float, float]] = {
    ("open", "microwave"): (-1.0, -1.3),
    ("close", "microwave"): (1.0, -0.005),
    ("open", "short_cabinet"): (1.0, 0.10),
    ("close", "short_cabinet"): (-1.0, 0.0),
    ("open", "short_fridge"): (1.0, 2.0),
    ("close", "short_fridge"): (-1.0, 0.0),
    ("open", "wooden_cabinet"): (-1.0, -0.14),
    ("close", "wooden_cabinet"): (1.0, 0.0),
    ("open", "white_cabinet"): (-1.0, -0.14),
    ("close", "white_cabinet"): (1.0, 0.0),
    ("turnon", "flat_stove"): (1.0, 0.5),
    ("turnoff", "flat_stove"): (-1.0, 0.0),
}
"""(predicate, category) -> (sign, threshold in rad or m): it holds when sign * (position - threshold) > 0."""

INITIAL_JOINT: dict[tuple[str, str], tuple[float, float]] = {
    ("open", "microwave"): (-2.094, -1.3),
    ("close", "microwave"): (-0.005, 0.0),
    ("open", "short_cabinet"): (0.10, 0.16),
    ("close", "short_cabinet"): (-0.005, 0.0),
    ("open", "short_fridge"): (2.0, 2.7),
    ("close", "short_fridge"): (-0.005, 0.0),
    ("open", "wooden_cabinet"): (-0.16, -0.14),
    ("close", "wooden_cabinet"): (0.0, 0.005),
    ("open", "white_cabinet"): (-0.16, -0.14),
    ("close", "white_cabinet"): (0.0, 0.005),
    ("turnon", "flat_stove"): (0.5, 2.1),
    ("turnoff", "flat_stove"): (-0.005, 0.0),
}
"""(predicate in :init, category) -> range of joint positions, rad or m, that stock draws from at reset."""


def model_file(assets: Assets, category: str) -> Path:
    """The official MJCF file that describes `category`."""
    if category in ARTICULATED:
        return assets.root / "articulated_objects" / f"{category}.xml"
    folder = "turbosquid_objects"
    if category in SCANNED:
        folder = "stable_scanned_objects"
    elif category in HOPE:
        folder = "stable_hope_objects"
    return assets.root / folder / category / f"{category}.xml"
