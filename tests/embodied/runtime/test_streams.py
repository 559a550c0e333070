"""A run does not depend on who reads its output, nor on the locale."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]
TASK = ("task=quadrotor_hover", "threads=1", "num_envs=4", "evaluation_envs=4", "evaluation_starts=4", "video=false")
TASK += ("task.step_limit=20",)
SHORT = (*TASK, "env_steps=400", "evaluate_every_steps=null", "policy.hidden=[8]")
LONG = (*TASK, "env_steps=100_000_000", "evaluate_every_steps=null", "policy.hidden=[8]")


def start(*arguments: str, **options) -> subprocess.Popen:
    # Under nohup the tests ignore SIGHUP, and so would the run.
    code = "import signal, sys, runpy; signal.signal(signal.SIGHUP, signal.SIG_DFL); sys.argv[0] = 'train.py'; "
    command = [sys.executable, "-c", code + "runpy.run_path('train.py', run_name='__main__')", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **options)


@contextmanager
def broken_pipe() -> Iterator[int]:
    """The end to write of a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


def test_a_run_goes_on_without_a_reader(tmp_path: Path):
    with broken_pipe() as stdout:
        run = start(*SHORT, f"output={tmp_path}/run", stdout=stdout, stderr=subprocess.PIPE, text=True)
    _, stderr = run.communicate()
    assert (run.returncode, stderr) == (0, "")
    assert (tmp_path / "run" / "report.json").exists()
    assert "Report: " in (tmp_path / "run" / "run.log").read_text(encoding="utf-8")


def test_a_stopped_run_saves_and_has_the_status_of_the_signal(tmp_path: Path):
    run = start(*LONG, f"output={tmp_path}/run", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while run.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.1)
    run.send_signal(signal.SIGHUP)
    try:
        told, _ = run.communicate(timeout=120.0)
    finally:
        run.kill()
    assert run.returncode == 128 + signal.SIGHUP, told
    assert "Stopped and saved. Continue with: " in told
    assert list((tmp_path / "run" / "checkpoint").iterdir())


def test_without_any_reader_a_home_directory_and_with_another_locale_reports_are_utf8(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME", "USER")}
    environment |= {"OMP_NUM_THREADS": "1", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    code = (
        "import os, pwd, runpy, sys\n"
        "def nobody(_): raise KeyError('no such user')\n"
        "pwd.getpwuid = nobody\n"
        f"sys.argv = ['train.py', *{(*SHORT, f'output={tmp_path}/run')!r}]\n"
        "runpy.run_path('train.py', run_name='__main__')"
    )
    with broken_pipe() as pipe:
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe)
    log = (tmp_path / "run" / "run.log").read_text(encoding="utf-8")
    assert run.returncode == 0, log
    assert "Report: " in log
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert any(ord(character) > 127 for character in page)
