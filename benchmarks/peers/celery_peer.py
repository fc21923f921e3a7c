"""Celery, with confirms and late acknowledgements. See peer.py."""

import os

from celery import Celery

import peer

app = Celery("celery_peer", broker=os.environ["AMQP_URL"])
app.conf.update(
    broker_transport_options={"confirm_publish": True},
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    task_routes=lambda name, *_, **__: {"queue": name},
)


@app.task(name="noop")
def noop(number):
    peer.noop(number)


@app.task(name="high")
def high(number):
    peer.high(number)


@app.task(name="critical")
def critical(sent):
    peer.critical(sent)


def worker(name, pool, slots, multiplier, *queues):
    command = ["celery", "--app=celery_peer", "worker", f"--hostname={name}@%h"]
    command += [f"--pool={pool}", f"--concurrency={slots}", f"--queues={','.join(queues)}"]
    command += [f"--prefetch-multiplier={multiplier}", "--loglevel=ERROR"]
    return [*command, "--without-gossip", "--without-mingle"]


if __name__ == "__main__":
    tasks = {"noop": noop, "high": high, "critical": critical}
    peer.main(
        lambda task, argument: tasks[task].delay(argument),
        {
            # Its best for tasks that do nothing.
            "drain": [worker("drain", "solo", 1, 64, "noop")],
            # What its documentation advises where tasks must not wait behind others.
            "one": [worker("all", "threads", 8, 1, "critical", "high")],
            "own": [
                worker("critical", "threads", 2, 1, "critical"),
                worker("high", "threads", 6, 1, "high"),
            ],
        },
    )
