"""The generator of faults, the record of what tests execute, and the scores of `make mutants`."""

import ast
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.mutants import __main__ as mutants
from benchmarks.mutants.__main__ import ROOT, by_package, package_of, sample, test_files, written_faults
from benchmarks.mutants.coverage import Coverage, Record
from benchmarks.mutants.operators import Fault, by_hand, generate
from benchmarks.mutants.report import is_enough, merge, row, table, wilson

test_files.__test__ = False


def changes(body: str, returns: str = "") -> set[str]:
    """Faults of a function with `body`, as `operator: new code`."""
    code = f"def f(x, y){returns}:\n    " + body.replace("\n", "\n    ") + "\n"
    return {f"{fault.operator}: {fault.after}" for fault in generate("a.py", code)}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("z = x < y", {"compare: (x > y)"}),
        ("z = x is y", {"compare: (x is not y)"}),
        ("z = x > 0", {"compare: (x < 0)", "constant: (1)"}),
        ("z = x > 1", {"compare: (x < 1)", "boundary: (x >= 1)", "constant: (2)"}),
        ("z = len(x) >= y", {"compare: (len(x) <= y)", "boundary: (len(x) > y)"}),
        ("z = x and y", {"boolean: (x or y)"}),
        ("z = x + y", {"arithmetic: (x - y)"}),
        ("z = x // y", {"arithmetic: (x * y)"}),
        ("z = -x", {"sign: (x)"}),
        ("z = not x", {"condition: (x)"}),
        ("z = 2", {"constant: (3)"}),
        ("z = True", {"constant: (False)"}),
        ("z = 0.5", {"constant: (1.0)"}),
        ("z = 0.0", {"constant: (1.0)"}),
        ("z = x[1]", {"index: (x[2])"}),
        ("z = x[-1]", {"index: (x[-2])"}),
        ("z = x[..., 0]", {"index: (x[..., 1])"}),
        ("z = min(x, y)", {"exchange: (max(x, y))"}),
        ("z = x.argmin()", {"exchange: (x.argmax())"}),
        ("z = max(0, x)", {"exchange: (min(0, x))", "constant: (1)"}),
        ("z = zeros(x)", {"exchange: (ones(x))"}),
        ("z = zeros(0)", {"constant: (1)"}),
        ("z = x(y, a=y)", {"argument: (x(y))"}),
        ("z = x(y, **y)", set()),
        ("z = range(x)", {"range: (range(x - 1))"}),
        ("z = range(x, y, y)", {"range: (range(x, y - 1, y))"}),
        ("x(y)", {"delete: pass"}),
        ("x.y = y", {"delete: pass"}),
        ("x += y", {"delete: pass"}),
        ("return x", {"return: return None"}),
        ("return x(y)", {"return: return None"}),
        ("return None", set()),
        ("if x:\n    return", {"condition: (not (x))"}),
        ("if x < y:\n    return", {"compare: (x > y)"}),
        ("z = x if y else 'a'", {"condition: ('a' if y else x)"}),
        ("z = [x for x in y if x]", {"condition: (not (x))"}),
        ("for z in x:\n    continue", {"delete: pass"}),
        ("for z in range(ROUNDS):\n    pass", {"range: (range(ROUNDS - 1))"}),
        ("for _ in range(ROUNDS):\n    z = 2", {"constant: (3)"}),
    ],
)
def test_operators(body: str, expected: set[str]) -> None:
    assert changes(body) == expected


def test_a_function_that_returns_a_bool_returns_the_opposite() -> None:
    assert changes("return x(y)", " -> bool") == {"return: return not (x(y))"}


@pytest.mark.parametrize(
    "body",
    [
        '"""A text of 2 lines."""',
        "z: Literal[1]",
        "assert x < 2",
        "print(x + 1)",
        "logger.info('%d', x + 1)",
        "z = f'{x + 1}'",
        "z = x + 'a'",
        "time.sleep(2 * x)",
        "os.kill(x + 1, 9)",
        "z = 1e-8",
        "z = x(device=y)",
        "import no_such_package\nz = x + 1",
        "if x.type == 'cuda':\n    x(y + 1)",
        "torch.cuda.f(x + 1)",
        "z = x.expand(-1, y)",
        "z = x.reshape(-1, y)",
        "raise NotImplementedError",
        "raise AssertionError(x + 1)",
        "for _ in range(ROUNDS):\n    pass",
    ],
)
def test_what_tests_cannot_notice_is_left_out(body: str) -> None:
    assert changes(body) == set()


def test_an_error_may_be_deleted_but_its_text_stays() -> None:
    assert changes("raise ValueError(x + 1)") == {"delete: pass"}


def test_whole_functions_and_files_are_left_out() -> None:
    assert not generate("a.py", "class A:\n    def __repr__(self):\n        return self.a\n")
    assert not generate("a.py", "@abstractmethod\ndef f(x):\n    return x\n")
    drawing = generate("sims/a/video/sky.py", "def f(x):\n    x(2 * y, -y, a=z[0])\n")
    assert [fault.operator for fault in drawing] == ["delete", "index"]
    assert not generate("a.py", "import no_such_package\ndef f(x):\n    return x\n")
    code = "def f(x):\n    return x\n\n\ndef g():\n    import nosuch\n"
    assert not generate("sims/no_such/environment.py", code)
    assert len(generate("sims/other/environment.py", code)) == 1


def test_names_count_within_a_function_and_do_not_depend_on_lines() -> None:
    code = "class A:\n    def f(self, x):\n        def g():\n            return x - 1\n        return x + 1 + g()\n"
    names = [str(fault) for fault in generate("a.py", code)]
    assert " ".join(name.removeprefix("a.py::A.") for name in names) == (
        "f::return 1 f::arithmetic 1 f::arithmetic 2 f::constant 1 "
        "f.<locals>.g::return 1 f.<locals>.g::arithmetic 1 f.<locals>.g::constant 1"
    )
    assert [str(fault) for fault in generate("a.py", "def h():\n    return z\n\n\n" + code)][1:] == names


def test_a_fault_replaces_its_own_code_after_characters_of_several_bytes() -> None:
    code = "def f(x):\n    return 'ä', x + 1  # ö\n"
    (fault,) = [fault for fault in generate("a.py", code) if fault.operator == "arithmetic"]
    assert fault.apply(code) == "def f(x):\n    return 'ä', (x - 1)  # ö\n"
    assert fault.change == "line 2: x + 1 -> (x - 1)"
    with pytest.raises(AssertionError, match="another text"):
        fault.apply("# moved\n" + code)


def test_kernels_are_covered_by_tests_that_import_them() -> None:
    (fault,) = generate("a.py", "@wp.kernel\ndef f(x: int):\n    x[x] += y\n")
    assert fault.covered_by == "a.py::<module>"


def test_faults_written_by_hand_can_be_put_in() -> None:
    faults = written_faults(ROOT)
    assert len(faults) >= 50
    assert all(by_package(faults).values())
    for fault in faults:
        text = fault.apply((ROOT / fault.file).read_text())
        if fault.file.endswith(".py"):
            ast.parse(text)


@pytest.mark.parametrize(
    "code", ["def f():\n    return 2\n", "def f():\n    x = 1\n    x = 1\n", "def g():\n    x = 1\n"]
)
def test_a_fault_that_is_not_there_once_is_refused(code: str) -> None:
    entry = {"function": "f", "fault": "wrong", "find": "x = 1", "replace": "x = 2"}
    with pytest.raises(ValueError, match=r"a\.py::f: wrong: expected 'x = 1' once"):
        by_hand("a.py", code, entry)


def test_a_fault_by_hand_lies_in_its_function() -> None:
    entry = {"function": "g", "fault": "wrong", "find": "x = 1", "replace": "x = 2"}
    code = "def f():\n    x = 1\n\n\ndef g():\n    x = 1\n"
    assert by_hand("a.py", code, entry).apply(code) == "def f():\n    x = 1\n\n\ndef g():\n    x = 2\n"


def test_packages_take_the_longest_path() -> None:
    assert package_of("sims/vehicle/race.py") == "sims/vehicle"
    assert package_of("sims/swarm/mdp.py") == "sims"
    assert package_of("real_robot/safety/axis.py") == "real_robot/safety"
    files = test_files(ROOT, ["tests/sims/vehicle", "tests/test_m*.py", "tests/test_serve.py"])
    assert files[0] == "tests/sims/vehicle/test_baselines.py"
    assert files[-1] == "tests/test_serve.py"
    assert all(file.startswith("tests/sims/vehicle/") for file in files[:-1])


def test_faults_are_selected_by_names_and_sampled_by_package(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def f(x):\n    return [x + 1, x + 2]\n\n\ndef g(x):\n    return x - 1\n"
    files = "sims/vehicle/a.py", "policies/b.py", "policies/c.py"
    faults = [fault for file in files for fault in generate(file, code)]
    hand = by_hand("policies/b.py", code, {"function": "f", "fault": "wrong", "find": "x + 1", "replace": "x"})
    monkeypatch.setattr(mutants, "generated_faults", lambda root: faults)
    monkeypatch.setattr(mutants, "written_faults", lambda root: [hand])

    def names(**options: object) -> list[str]:
        defaults = {"names": [], "package": ["sims/vehicle", "policies"], "count": None, "seed": 0}
        return [str(fault) for fault in mutants.selected(Namespace(**defaults | options))]

    assert len(faults) == 3 * 8
    assert sorted(names()) == sorted(map(str, [*faults, hand]))
    assert len(names(count=3)) == 1 + 2 * 3
    assert sorted(names(names=["b.py::f", "c.py::g"])) == sorted(
        str(fault) for fault in [*faults, hand] if "b.py::f" in str(fault) or "c.py::g" in str(fault)
    )
    assert {package_of(name) for name in names(package=["policies"])} == {"policies"}
    monkeypatch.setattr(mutants, "SAMPLE", 2)
    assert len(names()) == 1 + 2 * 2


def test_a_sample_depends_on_its_seed_and_hardly_on_other_faults() -> None:
    faults = generate("a.py", "def f(x):\n    return [x + 1, x + 2, x + 3, x + 4, x + 5]\n")
    assert sample(faults, 4, seed=0) == sample(faults[::-1], 4, seed=0) != sample(faults, 4, seed=1)
    kept = sample(faults, 4, seed=0)
    assert [fault for fault in kept if fault in faults[1:]] == sample(faults[1:], 4, seed=0)[
        : len(set(kept) & set(faults[1:]))
    ]


def test_tests_of_a_fault_are_those_of_its_file_first_then_short_ones_within_their_budget() -> None:
    other = Record(
        seconds={"test_b.py::a": 1.0, "test_b.py::b": 0.5}, calls={"a.py::f": ["test_b.py::a"], "a.py::g": []}
    )
    own = Record(seconds={"test_a.py::a": 3.0, "test_a.py::b": 2.0}, calls={"a.py::f": ["test_a.py::a"]})
    coverage = Coverage([other, own])
    every = ["test_a.py::a", "test_b.py::a", "test_a.py::b", "test_b.py::b"]
    assert coverage.tests("a.py::f", 9.0) == (every, 6.5)
    assert coverage.tests("a.py::f", 4.6) == (["test_a.py::a", "test_b.py::a", "test_b.py::b"], 4.5)
    assert coverage.tests("a.py::f", 0.1) == (["test_a.py::a"], 3.0)
    assert coverage.tests("a.py::h", 9.0) == ([], 0.0)


def test_tests_of_the_nearest_folder_come_before_short_ones() -> None:
    far, near = "tests/embodied/test_a.py::a", "tests/sims/gym/test_b.py::b"
    records = [
        Record(seconds={test: seconds}, calls={"sims/gym/c.py::f": [test]})
        for test, seconds in ((far, 1.0), (near, 2.0))
    ]
    assert Coverage(records).tests("sims/gym/c.py::f", 2.5) == ([near], 2.0)


def outcome(number: int | str, after: str = "2") -> Fault:
    return Fault("a.py", "f", "constant", number, 3, 0, 1, "1", after, "a.py::f")


def test_scores() -> None:
    # Wilson's interval of 8 of 10, as in Newcombe (1998) computed by hand: center 0.717, half width 0.227.
    assert wilson(8, 10) == (0.49, 0.943)
    outcomes = {outcome(1): "caught", outcome(2): "timed out", outcome(3): "survived", outcome(4): "not covered"}
    entry = row(outcomes | {outcome("wrong"): "caught"})
    assert [entry[name] for name in ("sample", "caught", "score", "timed_out")] == [4, 2, 0.5, 1]
    assert entry["survived"] == ["a.py::f::constant 3, line 3: 1 -> 2"]
    assert entry["not_covered"] == ["a.py::f::constant 4, line 3: 1 -> 2"]
    assert entry["by_hand"] == {"faults": 1, "caught": 1, "missed": []}
    assert not is_enough(entry)
    assert is_enough(row({outcome(number): "caught" for number in range(9)} | {outcome(9): "survived"}))
    assert not is_enough(row({outcome("wrong"): "not covered"}))
    assert "| a | 2/4 | 50% | 15% to 85% | 1 | 1/1 |" in table({"a": entry})


def test_the_table_keeps_the_packages_that_were_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "mutants.json"
    merge(path, {"vehicle": {"caught": 1}})
    merge(path, {"core": {"caught": 2}})
    merge(path, {"vehicle": {"caught": 3}})
    assert json.loads(path.read_text()) == {"packages": {"core": {"caught": 2}, "vehicle": {"caught": 3}}}


TOY = {
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
    "toy/ways.py": (
        "import functools\n\n\ndef add(x, y):\n    return x + y\n\n\ndef unread(x):\n    return x + 1\n\n\n"
        "def untested(x):\n    return x + 1\n\n\ndef count(n):\n    while n > 0:\n        n -= 1\n    return n\n\n\n"
        "def child(x):\n    print(x)\n    return x + 1\n\n\n@functools.cache\ndef cached():\n    return 1 + 1\n"
    ),
    "tests/test_wrong.py": "import no_such_module\n\n\ndef test_a(): ...\n",
    "tests/test_ways.py": (
        "import subprocess, sys\nfrom toy import ways\n\n\ndef test_add():\n    assert ways.add(2, 3) == 5\n\n\n"
        "def test_unread():\n    ways.unread(1)\n\n\ndef test_count():\n    assert ways.count(2) == 0\n\n\n"
        "def test_child():\n    code = 'from toy import ways; assert ways.child(1) == 2'\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n\n\n"
        "def test_cached_unread():\n    ways.cached()\n\n\ndef test_cached():\n    assert ways.cached() == 2\n\n\n"
        "def test_broken():\n    ways.untested(1)\n    raise ValueError\n"
    ),
}
MEASURE = """
import sys, json, time
from pathlib import Path
from benchmarks.mutants import trees
from benchmarks.mutants.coverage import Coverage
from benchmarks.mutants.operators import generate
from benchmarks.mutants.workers import Workers

trees.CPU_SLACK_S = 1.0
root, lines = Path(sys.argv[1]), []
faults = generate("toy/ways.py", (root / "toy/ways.py").read_text())
faults = [fault for fault in faults if str(fault).endswith(("::arithmetic 1", "count::delete 1"))]
workers = Workers(root, sys.argv[2], 2)
records = workers.records(["tests/test_ways.py", "tests/test_wrong.py"], ["toy"], lines.append)
outcomes = workers.outcomes(faults, Coverage(records), 60.0, time.monotonic() + 300.0)
print(json.dumps({"outcomes": {str(fault): outcome for fault, outcome in outcomes}, "lines": lines}))
"""


def test_faults_in_a_toy_package_are_caught_survive_or_hang(tmp_path: Path) -> None:
    root, copies = tmp_path / "root", tmp_path / "copies"
    copies.mkdir()
    for name, text in TOY.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MEASURE, str(root), str(copies)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    outcomes = {name.removeprefix("toy/ways.py::"): outcome for name, outcome in result["outcomes"].items()}
    assert outcomes["add::arithmetic 1"] == "caught"
    assert outcomes["unread::arithmetic 1"] == "survived"
    assert outcomes["untested::arithmetic 1"] == "not covered"
    assert outcomes["count::delete 1"] == "timed out"
    assert outcomes["child::arithmetic 1"] == "caught"
    # Only the first of two tests executes it, but the second one notices.
    assert outcomes["cached::arithmetic 1"] == "caught"
    ways, wrong = sorted(line.partition(" tests/")[2] for line in result["lines"])
    assert ways == "test_ways.py: 6 tests; without a fault 1 fail: ['tests/test_ways.py::test_broken']"
    assert wrong.startswith("test_wrong.py: 0 tests; without a fault 1 fail: ")
    assert "1 error during collection" in wrong
    assert (root / "toy/ways.py").read_text() == TOY["toy/ways.py"]
