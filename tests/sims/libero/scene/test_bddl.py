import pytest

from sims.libero.scene.bddl import parse
from sims.libero.suite import SUITES, load_tasks

EXAMPLE = """; a comment
(define (problem LIBERO_Floor_Manipulation)
  (:domain robosuite)
  (:language Put it there)
  (:regions
    (bin_region (:target floor) (:ranges ((-0.01 0.25 0.01 0.27))) (:yaw_rotation ((0.5 1.5))))
    (contain_region (:target basket_1)))
  (:fixtures floor - floor)
  (:objects milk_1 milk_2 - milk basket_1 - basket)
  (:obj_of_interest milk_1)
  (:init (On milk_1 floor_bin_region))
  (:goal (And (In milk_1 basket_1_contain_region) (Open basket_1))))
"""


def test_reads_every_section(tmp_path):
    path = tmp_path / "task.bddl"
    path.write_text(EXAMPLE)
    problem = parse(path)
    assert problem.name == "libero_floor_manipulation"
    assert problem.language == "put it there"
    assert problem.fixtures == {"floor": "floor"}
    assert list(problem.objects.items()) == [("milk_1", "milk"), ("milk_2", "milk"), ("basket_1", "basket")]
    assert problem.regions["floor_bin_region"].ranges == ((-0.01, 0.25, 0.01, 0.27),)
    assert problem.regions["floor_bin_region"].yaw == (0.5, 1.5)
    assert problem.regions["basket_1_contain_region"].ranges == ()
    assert problem.obj_of_interest == ["milk_1"]
    assert problem.init == [("on", "milk_1", "floor_bin_region")]
    assert problem.goal == [("in", "milk_1", "basket_1_contain_region"), ("open", "basket_1")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(define (problem x)", "balanced"),
        ("(define))", "too many"),
        ("(other)", "define"),
        ("(define (problem x))", ":goal"),
    ],
)
def test_a_file_that_is_no_problem_is_one_clear_error(tmp_path, text, words):
    path = tmp_path / "broken.bddl"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        parse(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_130_tasks_parse_and_name_only_what_they_declare():
    tasks = [task for suite in SUITES for task in load_tasks(suite)]
    assert len(tasks) == 130
    for task in tasks:
        known = task.problem.objects.keys() | task.problem.fixtures.keys() | task.problem.regions.keys()
        atoms = task.problem.goal + task.problem.init
        assert task.problem.goal
        assert {name for atom in atoms for name in atom[1:]} <= known, task.name
