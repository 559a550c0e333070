"""Headless Chromium with software WebGL, driven by its own protocol (CDP) over a websocket."""

import base64
import itertools
import json
import subprocess
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--use-gl=angle",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-first-run",
    "--remote-debugging-port=0",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


class Browser:
    """One page; use as a context manager."""

    def __init__(self, chromium: str, profile: Path, width: int = 1200, height: int = 800) -> None:
        size = f"--window-size={width},{height}"
        self._process = subprocess.Popen(
            [chromium, *OPTIONS, size, f"--user-data-dir={profile}", "about:blank"],
            stderr=(profile.parent / "chromium.log").open("w"),
        )
        ready = profile / "DevToolsActivePort"
        wait(lambda: ready.exists() and len(ready.read_text().split()) == 2, 120.0)
        port, path = ready.read_text().split()
        self._socket = connect(f"ws://127.0.0.1:{port}{path}", max_size=None, open_timeout=60)
        self._numbers, self.said, self._loaded = itertools.count(1), [], False
        pages = self._ask("Target.getTargets", session=None)["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self._ask("Target.attachToTarget", session=None, targetId=target, flatten=True)["sessionId"]
        self._ask("Runtime.enable")
        self._ask("Page.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(30)

    def open(self, address: str) -> None:
        self._ask("Page.navigate", url=address)
        while not self._loaded:
            self._hear(json.loads(self._socket.recv(timeout=120)))

    def run(self, script: str) -> Any:
        """The value of a script in the page."""
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self) -> bytes:
        """A PNG of the page."""
        return base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"])

    def click(self, text: str) -> None:
        """Click the button with this text."""
        buttons = "[...document.querySelectorAll('button')]"
        wait(lambda: self.run(f"{buttons}.some((each) => each.innerText.trim() === {json.dumps(text)})"), 30.0)
        self.run(f"{buttons}.find((each) => each.innerText.trim() === {json.dumps(text)}).click()")

    def choose(self, label: str, value: int) -> None:
        """Type a number into the field of this label."""
        find = f"""(() => {{
            const named = [...document.querySelectorAll("label")].find((each) => each.innerText.trim() === {label!r});
            const field = document.getElementById(named.htmlFor) || named;
            let around = named;
            while (!around.querySelector("input[inputmode]")) around = around.parentElement;
            around.querySelector("input[inputmode]").focus();
            around.querySelector("input[inputmode]").select();
        }})()"""
        self.run(find)
        self._ask("Input.insertText", text=str(value))
        for kind in ("keyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13)

    def unfold(self, title: str) -> None:
        """Click the heading of a folder."""
        self.run(
            "[...document.querySelectorAll('*')].filter((each) => !each.children.length || each.children.length === 1)"
            f".filter((each) => each.innerText && each.innerText.trim() === {title!r}).pop().click()"
        )

    def text(self) -> str:
        return self.run("document.body.innerText")

    def _ask(self, method: str, session: str | None = "own", **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            heard = json.loads(self._socket.recv(timeout=120))
            if heard.get("id") == number:
                assert "error" not in heard, heard
                return heard["result"]
            self._hear(heard)

    def _hear(self, heard: dict[str, Any]) -> None:
        self._loaded = self._loaded or heard.get("method") == "Page.loadEventFired"
        if heard.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.said.append(heard["params"])


def wait(for_what, seconds: float, every: float = 0.1) -> None:
    """Until `for_what()` is true; AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not for_what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(every)
