"""A part that measures something, starts a process in a session of its own as torchrun does, and then hangs."""

import subprocess
import sys
import time


def run(record, options):
    record.figure("before", 2)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = subprocess.Popen(sleep, start_new_session=True)
    record.figure("pid", process.pid)
    hang()


def hang():
    while True:
        time.sleep(0.1)
