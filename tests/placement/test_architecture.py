"""Only what needs several processes knows of torch.distributed; a run in one process does not load it."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_only_the_placement_in_several_processes_imports_torch_distributed():
    found = {
        str(path.relative_to(ROOT))
        for package in ("embodied", "policies", "sims", "real_robot")
        for path in (ROOT / package).rglob("*.py")
        if any(name.startswith("torch.distributed") for name in imported(path))
    }
    assert found <= {"embodied/placement/torchrun.py", "embodied/saving/sharding.py"}


def test_a_run_in_one_process_loads_neither_ray_nor_what_runs_several():
    code = (
        "import sys, train; config, _ = train.composed(['task=quadrotor_hover']);"
        "placed = config.placement.start('cpu'); placed.__enter__();"
        "print(sorted({'ray', *('embodied.placement.' + name for name in ('torchrun', 'sharding', 'averaging'))}"
        " & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_one_file_alone_imports_ray():
    found = {
        str(path.relative_to(ROOT))
        for package in ("embodied", "policies", "sims", "real_robot")
        for path in (ROOT / package).rglob("*.py")
        if any(name.split(".")[0] == "ray" for name in imported(path)) or '"ray"' in path.read_text()
    }
    assert found <= {"embodied/placement/ray.py", "embodied/placement/registry.py"}
