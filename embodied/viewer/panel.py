"""Panel next to the picture: environment, speed, pushes, observations, actions, and progress of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from embodied.viewer import telling
from embodied.viewer.watching import RECENT, Push, Score, WatchedEnvironment

if TYPE_CHECKING:
    import viser  # pyright: ignore[reportMissingImports]

SPEEDS: dict[str, float | None] = {
    "as fast as possible": None,
    "real time": 1.0,
    "1/2 of real time": 0.5,
    "1/4 of real time": 0.25,
    "1/10 of real time": 0.1,
}
NO_PUSH = "This simulator takes no pushes."
GREEN = "#2f9e44"
BLUE = "#1c7ed6"


class Panel:
    """Panel of controls and texts on `server`'s page; controls change in threads of the server."""

    def __init__(self, server: viser.ViserServer) -> None:
        gui = server.gui
        gui.configure_theme(control_width="large", show_logo=False, show_share_button=False)
        gui.main_panel.dock_right()
        gui.set_panel_label("embodied")
        self._head = gui.add_html(telling.line("waiting for the first episode"))
        with gui.add_folder("Watch"):
            self.row = gui.add_slider("environment", 0, 1, 1, 0, disabled=True)
            self._speed = gui.add_dropdown("speed", tuple(SPEEDS))
            self._hold = gui.add_button("Pause")
            self._single = gui.add_button("One step", visible=False)
        with gui.add_folder("Push", expand_by_default=False):
            self._no_push = gui.add_html(telling.line(NO_PUSH))
            self._body = gui.add_dropdown("body", tuple[str, ...]([""]), visible=False)
            self._change = gui.add_vector3("change of velocity, m/s", (0.5, 0.0, 0.0), step=0.05, visible=False)
            self._push = gui.add_button("Push", visible=False)
        with gui.add_folder("Observation of the policy"):
            self._observation_text = gui.add_html("")
            self._pictures: dict[str, viser.GuiImageHandle] = {}
        with gui.add_folder("Actions of the policy"):
            self._answered = gui.add_html("")
        with gui.add_folder("So far"):
            self._score = gui.add_html("")
            empty = np.zeros(2)
            self._won, self._earned = (
                gui.add_uplot(
                    (empty, empty),
                    ({"label": "episodes"}, {"label": name, "stroke": colour, "width": 2}),
                    height=150,
                    scales={"x": {"time": False}},
                    legend={"show": False},
                    visible=False,
                    title=f"{name}, last {RECENT} episodes",
                )
                for name, colour in (("success rate", GREEN), ("mean return", BLUE))
            )
        self._gui = gui
        self.paused = False
        self._steps = 0
        self._pushes = list[Push]()
        self._hold.on_click(lambda _: self._toggle())
        self._single.on_click(lambda _: self._count())
        self._push.on_click(lambda _: self._add())

    @property
    def speed(self) -> float | None:
        """Ratio of simulated to real time; None: as fast as possible."""
        return SPEEDS[self._speed.value]

    def should_wait(self) -> bool:
        """Whether the run is paused; consumes one requested step, if any."""
        if self.paused and self._steps:
            self._steps -= 1
            return False
        return self.paused

    def pushes(self) -> list[Push]:
        """Pushes requested since the last call."""
        requested = self._pushes
        self._pushes = []
        return requested

    def watch(self, rows: int) -> int:
        """Offer `rows` environments, and return the index of the selected one."""
        if self.row.max != rows - 1 and rows > 1:
            chosen = min(int(self.row.value), rows - 1)
            self.row.max = rows - 1
            self.row.value = chosen
        self.row.disabled = rows == 1
        return min(int(self.row.value), rows - 1)

    def offer(self, pushable: tuple[str, ...]) -> None:
        """Offer pushes of the bodies `pushable`."""
        self._no_push.visible = not pushable
        for control in (self._body, self._change, self._push):
            control.visible = bool(pushable)
        if pushable and pushable != tuple(self._body.options):
            self._body.options = pushable

    def tell(self, watched: WatchedEnvironment, row: int) -> None:
        """Show the observation and the actions of the policy in environment `row`."""
        task = int(watched.task_index[row])
        step = int(watched.steps[row])
        earned = float(watched.returns[row])
        head_rows = [
            (watched.label, f"environment {row} of {watched.num_envs}: {watched.task_names[task]}"),
            (watched.instructions[task], f"step {step}, reward so far {earned:.4g}"),
        ]
        self._head.content = telling.table(head_rows)
        if watched.observation is not None:
            observation = watched.observation[row]
            self._observation_text.content = telling.observation_text(watched.contract, observation)
            for name, picture in telling.pictures(watched.contract, observation).items():
                if name in self._pictures:
                    self._pictures[name].image = picture
                else:
                    self._pictures[name] = self._gui.add_image(picture, label=name)
        if watched.actions is None:
            self._answered.content = telling.line("The simulator runs the policy itself: many steps at once.")
        else:
            value = None if watched.value is None else float(watched.value[row])
            chunk = watched.actions[row].cpu().numpy()
            self._answered.content = telling.answered(watched.contract.action, chunk, value)
        self._tell_score(watched.score)

    def _tell_score(self, score: Score) -> None:
        if not score.curve:
            self._score.content = telling.line("no episode has ended")
            self._won.visible = self._earned.visible = False
            return
        episodes, won, earned = (np.array(column, dtype=float) for column in zip(*score.curve, strict=True))
        rows = [("episodes", f"{score.episodes:,}"), (f"mean return, last {RECENT}", f"{earned[-1]:.4g}")]
        if score.has_success:
            rate = f"{score.successes / score.episodes:.1%}, of the last {RECENT} {won[-1]:.1%}"
            rows.insert(1, ("success rate", rate))
        self._score.content = telling.table(rows)
        for plot, values, visible in ((self._won, won, score.has_success), (self._earned, earned, True)):
            plot.visible = visible and len(values) > 1
            if plot.visible:
                plot.data = (episodes, values)

    def _toggle(self) -> None:
        self.paused = not self.paused
        self._steps = 0
        self._hold.label, self._single.visible = "Go on" if self.paused else "Pause", self.paused

    def _count(self) -> None:
        self._steps += 1

    def _add(self) -> None:
        self._pushes.append(Push(self._body.value, np.array(self._change.value, dtype=float)))
