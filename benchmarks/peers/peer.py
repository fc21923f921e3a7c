"""What the peers in Python share: their commands, and the notes of their tasks.

    python celery_peer.py fill noop|high COUNT     publishes, one by one, each confirmed; prints seconds
    python celery_peer.py arrive COUNT             publishes a critical task every 50 ms or so
    python celery_peer.py work drain|one|own       works until it is killed

AMQP_URL is the broker. Tasks write lines to the file NOTES: `noop TIME` for every hundredth,
`high` once, `critical SECONDS` with the time from publish to start.
"""

import os
import random
import subprocess
import sys
import time

NOTES_EVERY = 100


def note(line):
    with open(os.environ["NOTES"], "a", encoding="ascii") as notes:
        notes.write(f"{line}\n")


def noop(number):
    if number % NOTES_EVERY == 0:
        note(f"noop {time.time()}")


def high(number):
    if number == 100:
        note("high")
    time.sleep((10 + number * 7 % 21) / 1000)


def critical(sent):
    note(f"critical {time.time() - sent}")


def main(send, workers):
    """`send(task, argument)` publishes; `workers[layout]` are the arguments of Python's `-m`."""
    command = sys.argv[1]
    if command == "fill":
        task, count = sys.argv[2], int(sys.argv[3])
        send(task, -1)
        begin = time.monotonic()
        for number in range(count):
            send(task, number)
        print(time.monotonic() - begin)
    elif command == "arrive":
        pick = random.Random(7)
        for _ in range(int(sys.argv[2])):
            time.sleep(pick.randint(40, 60) / 1000)
            send("critical", time.time())
    elif command == "work":
        here = os.path.dirname(os.path.abspath(__file__))
        begun = [
            subprocess.Popen([sys.executable, "-m", *worker], cwd=here)
            for worker in workers[sys.argv[2]]
        ]
        for worker in begun:
            worker.wait()
