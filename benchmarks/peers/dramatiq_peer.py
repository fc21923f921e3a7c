"""Urgent tasks among slow ones, with Dramatiq: from publish to start, in seconds.

    python dramatiq_peer.py AMQP_URL ARRIVALS one|own

The load is that of `arrival.rs`: slow tasks of 10 to 30 ms wait, and a
critical one comes every 50 ms or so. `one`: one worker of 8 threads, ordered by the actors'
priorities. `own`: a worker of 2 threads for the critical tasks, and one of 6 for the others.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker

if __name__ == "__main__":
    # Its workers find it there.
    os.environ["AMQP_URL"] = sys.argv[1]
dramatiq.set_broker(RabbitmqBroker(url=os.environ["AMQP_URL"], confirm_delivery=True))

LIMIT = 120


def note(name, line):
    path = os.path.join(os.environ["NOTES"], name)
    with open(path, "a", encoding="ascii") as notes:
        notes.write(f"{line}\n")


def noted(name):
    try:
        with open(os.path.join(os.environ["NOTES"], name), encoding="ascii") as notes:
            return notes.read().split()
    except FileNotFoundError:
        return []


@dramatiq.actor(queue_name="high", priority=10)
def high(seconds, is_first):
    if is_first:
        note("high", "started")
    time.sleep(seconds)


@dramatiq.actor(queue_name="critical", priority=0)
def critical(sent):
    note("critical", time.time() - sent)


def until(name, count):
    begin = time.monotonic()
    while len(noted(name)) < count:
        if time.monotonic() - begin > LIMIT:
            sys.exit(f"{len(noted(name))} of {count} {name} tasks started")
        time.sleep(0.01)


def worker(threads, *queues):
    command = [sys.executable, "-m", "dramatiq", "dramatiq_peer", "--processes=1"]
    command += [f"--threads={threads}", "--queues", *queues]
    here = os.path.dirname(os.path.abspath(__file__))
    # Its processes are a group of their own, so that all of them can be ended.
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=here, start_new_session=True, **quiet)


def main():
    arrivals, layout = int(sys.argv[2]), sys.argv[3]
    pick = random.Random(7)
    with tempfile.TemporaryDirectory() as notes:
        os.environ["NOTES"] = notes
        for number in range(max(5_000, arrivals * 30)):
            high.send(pick.randint(10, 30) / 1000, number == 100)
        workers = {
            "one": [(8, "critical", "high")],
            "own": [(2, "critical"), (6, "high")],
        }[layout]
        workers = [worker(*each) for each in workers]
        try:
            until("high", 1)
            for _ in range(arrivals):
                time.sleep(pick.randint(40, 60) / 1000)
                critical.send(time.time())
            until("critical", arrivals)
            print(json.dumps([float(wait) for wait in noted("critical")]))
        finally:
            for each in workers:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()


if __name__ == "__main__":
    main()
