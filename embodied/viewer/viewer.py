"""Page in the browser: viser's server draws the selected environment, at the selected speed.

While no browser is connected nothing is drawn, waited for or paused. Errors here end the view, never the run.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from embodied.errors import UserError
from embodied.extras import needs_extra
from embodied.runtime.interrupt import STOPPING
from embodied.scene.shapes import glb
from embodied.scene.viewable import Array, Scene
from embodied.viewer.origin import own_pages_only
from embodied.viewer.panel import Panel
from embodied.viewer.watching import Push, Screen, WatchedEnvironment

if TYPE_CHECKING:
    import viser  # pyright: ignore[reportMissingImports]

log = logging.getLogger(__name__)
T = TypeVar("T")
HOST = "127.0.0.1"
FRAME_S = 0.04
TEXT_S = 0.2
"""Periods of pictures and of texts, s."""


class Viewer(Screen):
    """Server of the page on `port` of this machine.

    Raises:
        UserError: without viser, and for a port that is taken.
    """

    def __init__(self, port: int) -> None:
        with needs_extra("viewer"):
            import viser  # pyright: ignore[reportMissingImports]
        logging.getLogger("websockets").setLevel(logging.WARNING)  # it logs every connection
        with contextlib.redirect_stdout(io.StringIO()), own_pages_only():  # viser's banner
            self._server = viser.ViserServer(HOST, port, verbose=False)
        self.port = self._server.get_port()
        self.row = 0
        self.broken = False
        if port and self.port != port:
            self.close()
            raise UserError(
                f"port {port} is taken, which viewer=true needs; {self.port} is free: viewer_port={self.port}"
            )
        self._panel = Panel(self._server)
        self._handles: list[viser.GlbHandle] = []
        self._watched: WatchedEnvironment | None = None
        self._scene: Scene | None = None
        self._poses: Array | None = None
        self._last_frame_s = self._text_s = self._due = 0.0
        self._server.scene.configure_default_lights(cast_shadow=True)

    @property
    def address(self) -> str:
        """Address to open in a browser."""
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop serving."""
        self.close()

    def close(self) -> None:
        """Stop serving, and free the port."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._server.stop()

    def before(self, watched: WatchedEnvironment) -> list[Push]:
        """See `Screen.before`."""
        return self._guarded(lambda: self._before(watched)) or []

    def after(self, watched: WatchedEnvironment, seconds: float) -> None:
        """See `Screen.after`."""
        self._guarded(lambda: self._after(watched, seconds))

    def _guarded(self, show: Callable[[], T]) -> T | None:
        """Run `show` and return its result; None without a browser, or if it failed now or earlier."""
        if self.broken or not self._server.get_clients():
            return None
        try:
            return show()
        except Exception:
            log.exception("the viewer has stopped, the run goes on")
            self.broken = True
            return None

    def _before(self, watched: WatchedEnvironment) -> list[Push]:
        self._focus(watched)
        if self._panel.speed or self._panel.paused or time.monotonic() - self._text_s >= TEXT_S:
            self._tell(watched)
        while self._panel.should_wait() and self._server.get_clients() and not STOPPING.is_set():
            if self._focus(watched):
                self._tell(watched)
            time.sleep(FRAME_S)
        return self._panel.pushes()

    def _after(self, watched: WatchedEnvironment, seconds: float) -> None:
        if watched is not self._watched or watched.fresh:  # a browser has connected since `before`
            return
        poses = watched.env_view.poses(self.row)
        speed = self._panel.speed
        if speed is None:
            if time.monotonic() - self._last_frame_s >= FRAME_S or self._panel.paused:
                self._draw(poses)
        elif seconds > 0.0:
            self._play(poses, seconds / speed)

    def _focus(self, watched: WatchedEnvironment) -> bool:
        """Show the selected environment; return whether it has changed, or its episode has begun."""
        row = self._panel.watch(watched.num_envs)
        if watched is self._watched and row == self.row and not watched.fresh:
            return False
        scene = watched.env_view.scene(row)
        self.row = row
        if scene is not self._scene:
            self._build(scene)
        self._watched = watched
        watched.fresh = False
        self._draw(watched.env_view.poses(row))
        return True

    def _tell(self, watched: WatchedEnvironment) -> None:
        self._panel.tell(watched, self.row)
        self._text_s = time.monotonic()

    def _build(self, scene: Scene) -> None:
        """Replace the bodies on the page by those of `scene`, and point the camera at them."""
        page = self._server.scene
        before = self._scene
        with self._server.atomic():
            for handle in self._handles:
                handle.remove()
            self._handles = [
                page.add_glb(f"/world/{number} {body.name}".replace("//", "/"), glb(body.mesh))
                for number, body in enumerate(scene.bodies)
            ]
            size = 2.0 * scene.reach_m
            page.add_grid(
                "/floor",
                size,
                size,
                cell_size=size / 40,
                section_size=size / 8,
                cell_color=(222, 225, 230),
                section_color=(190, 195, 203),
                position=(*scene.target[:2], scene.floor_m),
                shadow_opacity=0.2,
                plane_color=(246, 247, 249),
                plane_opacity=1.0,
            )
            if before is None or (before.eye, before.target) != (scene.eye, scene.target):
                self._look(scene)
        self._panel.offer(scene.pushable)
        self._scene = scene
        self._poses = None

    def _look(self, scene: Scene) -> None:
        cameras = [self._server.initial_camera, *(client.camera for client in self._server.get_clients().values())]
        for camera in cameras:
            camera.position, camera.look_at, camera.fov = np.array(scene.eye), np.array(scene.target), np.deg2rad(45.0)

    def _play(self, poses: Array, real_s: float) -> None:
        """Animate the motion to `poses` [B, 7] in `real_s` since the last step, interpolated linearly."""
        start = max(self._due, time.monotonic() - real_s)
        before = self._poses
        self._due = start + real_s
        while (remaining_s := self._due - time.monotonic()) > 0.0 and self._panel.speed and self._server.get_clients():
            if before is not None:
                self._draw(between(before, poses, 1.0 - remaining_s / real_s), final=False)
            time.sleep(min(FRAME_S, remaining_s))
        self._draw(poses)

    def _draw(self, poses: Array, final: bool = True) -> None:
        """Show the bodies at `poses` [B, 7]; `final` is False for interpolated ones."""
        with self._server.atomic():
            for handle, pose in zip(self._handles, poses, strict=True):
                if not np.array_equal(handle.position, pose[:3]):
                    handle.position = pose[:3]
                if not np.array_equal(handle.wxyz, pose[3:]):
                    handle.wxyz = pose[3:]
        if final:
            self._poses, self._last_frame_s = poses, time.monotonic()


def between(before: Array, after: Array, share: float) -> Array:
    """Interpolate poses [B, 7] at a `share` of the way from `before` to `after`."""
    same_side = np.where((before[:, 3:] * after[:, 3:]).sum(1, keepdims=True) < 0.0, -1.0, 1.0)
    # normalised linear interpolation; q and -q are the same rotation
    quaternion = (1.0 - share) * before[:, 3:] * same_side + share * after[:, 3:]
    quaternion /= np.maximum(np.linalg.norm(quaternion, axis=1, keepdims=True), 1e-9)
    return np.concatenate(((1.0 - share) * before[:, :3] + share * after[:, :3], quaternion), 1)
