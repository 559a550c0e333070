"""The page in a real browser: it shows what is chosen, pauses, pushes, and never stands in a run's way."""

import io
import os
import shutil
import socket
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

from embodied.errors import UserError
from embodied.viewer.viewer import Viewer, between
from embodied.viewer.watching import WatchedEnvironment
from tests.embodied.viewer.browser import Browser, wait
from tests.embodied.viewer.rail import Rail

pytest.importorskip("viser", reason="needs the extra viewer")
CHROMIUM = shutil.which("chromium")
REQUIRED = os.environ.get("CI_CHROMIUM") == "required"
browsed = pytest.mark.skipif(not CHROMIUM and not REQUIRED, reason="needs chromium")


class Run:
    """Steps an environment in a thread of its own, as a run does, until it is stopped."""

    def __init__(self, viewer: Viewer) -> None:
        rail = Rail(4, step_limit=1000)
        self.env, self.steps, self.pushed, self.on = WatchedEnvironment(rail, rail.view(), viewer, "train"), 0, 0, True
        self._thread = threading.Thread(target=self._go)

    def _go(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.env.reset()
        while self.on:
            chunk = 0.02 * torch.rand(4, 2, 1, generator=generator) - 0.01
            self.env.show_values(torch.full((4,), 0.25), None)
            transition = self.env.step(chunk)
            self.steps += 1
            self.pushed += int(transition.events["pushed"].sum())
            if bool(transition.done.any()):
                self.env.reset(transition.done)
            time.sleep(0.005)

    def __enter__(self) -> "Run":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.on = False
        self._thread.join(30.0)
        assert not self._thread.is_alive()

    def goes_on(self, seconds: float = 1.0) -> bool:
        before = self.steps
        time.sleep(seconds)
        return self.steps > before


def red_and_blue(browser: Browser) -> tuple[int, int]:
    """Pixels that are rather red, and rather blue, left of the panel."""
    pixels = np.asarray(Image.open(io.BytesIO(browser.picture())).convert("RGB"), dtype=int)[:, :600]
    red, _, blue = np.moveaxis(pixels, -1, 0)
    return int((red - blue > 60).sum()), int((blue - red > 60).sum())


@browsed
def test_a_person_watches_pauses_chooses_and_pushes(tmp_path):
    assert CHROMIUM, "CI_CHROMIUM=required, but there is no chromium"
    with Viewer(0) as viewer, Run(viewer) as run:
        assert run.goes_on(0.2)
        with Browser(CHROMIUM, tmp_path / "profile") as browser:
            browser.open(viewer.address)
            wait(lambda: red_and_blue(browser)[0] > 500, 90.0, 0.5)  # environment 0 is red
            wait(lambda: "environment 0 of 4: task 0" in browser.text(), 30.0)
            for told in ("position, m", "value\n0.25", "reward so far"):
                assert told in browser.text()
            browser.click("Pause")
            wait(lambda: not run.goes_on(), 30.0)
            number = run.steps
            browser.click("One step")
            wait(lambda: run.steps == number + 1, 30.0)
            assert not run.goes_on()
            assert red_and_blue(browser)[1] < 100
            browser.choose("environment", 1)
            wait(lambda: red_and_blue(browser)[1] > 500, 60.0, 0.5)  # while it is paused
            assert "environment 1 of 4: task 1" in browser.text()
            assert run.steps == number + 1
            browser.click("Go on")
            wait(run.goes_on, 30.0)
            assert run.pushed == 0
            browser.unfold("Push")
            browser.click("Push")
            wait(lambda: run.pushed, 30.0)
            viewer._panel._speed.value = "1/10 of real time"  # a step of 0.2 s takes 2 s
            time.sleep(0.5)
            before = run.steps
            time.sleep(3.0)
            assert 1 <= run.steps - before <= 2
            viewer._panel._speed.value = "real time"
            browser.click("Pause")
            wait(lambda: not run.goes_on(), 30.0)
        wait(run.goes_on, 60.0)  # who left does not hold it
        assert not viewer.broken
        errors = [said for said in browser.said if "exceptionDetails" in said or said.get("type") == "error"]
        assert not errors


def test_what_breaks_in_the_view_does_not_break_the_run(caplog):
    with Viewer(0) as viewer:
        viewer._server.get_clients = lambda: {0: None}
        rail = Rail(2)
        view = rail.view()
        view.scene = None
        env = WatchedEnvironment(rail, view, viewer, "train")
        env.reset()
        env.step(torch.zeros(2, 2, 1))
        assert viewer.broken
        assert caplog.text.count("the viewer has stopped, the run goes on") == 1
        env.step(torch.zeros(2, 2, 1))
        assert caplog.text.count("the viewer has stopped, the run goes on") == 1


def test_the_port_is_this_machines_own_and_free_again_after(capfd):
    with Viewer(0) as viewer:
        port = viewer.port
        assert viewer.address == f"http://127.0.0.1:{port}"
        assert viewer._server.get_host() == "127.0.0.1"
        with pytest.raises(
            UserError, match=rf"port {port} is taken, which viewer=true needs; (\d+) is free: viewer_port=\1$"
        ):
            Viewer(port)
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))
    assert capfd.readouterr().out == ""


def test_between_two_poses_bodies_move_straight_and_turn_the_short_way():
    before = np.array([[0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
    after = np.array([[1.0, 2.0, 0.0, -np.cos(0.2), 0.0, 0.0, -np.sin(0.2)]])  # 0.4 rad about z
    found = between(before, after, 0.5)[0]
    assert found[:3] == pytest.approx([0.5, 1.0, 0.0])
    assert np.abs(found[3:]) == pytest.approx([np.cos(0.1), 0.0, 0.0, np.sin(0.1)])
    assert between(before, after, 0.0)[0, :3] == pytest.approx(before[0, :3])


@pytest.mark.parametrize(
    ("origin", "host", "accepted"),
    [
        (None, None, True),
        ("http://127.0.0.1:{port}", None, True),
        ("http://localhost:9999", "localhost:9999", True),  # through a tunnel
        ("http://evil.example", None, False),
        ("http://127.0.0.1:1", None, False),  # another program's page on this machine
        ("null", None, False),
        ("http://evil.example", "evil.example", False),  # whose name was changed to this address
    ],
)
def test_only_its_own_pages_open_a_websocket(origin: str | None, host: str | None, accepted: bool):
    import viser
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    with Viewer(0) as viewer:
        headers = {"Origin": origin.format(port=viewer.port)} if origin else {}
        uri = f"ws://{host}/" if host else f"ws://127.0.0.1:{viewer.port}/"
        plain = socket.create_connection(("127.0.0.1", viewer.port))
        options = {"subprotocols": [f"viser-v{viser.__version__}"], "additional_headers": headers, "sock": plain}
        if accepted:
            with connect(uri, **options, max_size=None) as connection:
                assert connection.recv(timeout=30)
        else:
            with pytest.raises(InvalidStatus, match="403"):
                connect(uri, **options)
