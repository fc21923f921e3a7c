"""Dramatiq, with confirms; it acknowledges late by itself. See peer.py."""

import os

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker

import peer

dramatiq.set_broker(RabbitmqBroker(url=os.environ["AMQP_URL"], confirm_delivery=True))


@dramatiq.actor(queue_name="noop")
def noop(number):
    peer.noop(number)


@dramatiq.actor(queue_name="high", priority=10)
def high(number):
    peer.high(number)


@dramatiq.actor(queue_name="critical", priority=0)
def critical(sent):
    peer.critical(sent)


def worker(processes, threads, *queues):
    command = ["dramatiq", "dramatiq_peer", f"--processes={processes}"]
    return [*command, f"--threads={threads}", "--queues", *queues]


if __name__ == "__main__":
    actors = {"noop": noop, "high": high, "critical": critical}
    peer.main(
        lambda task, argument: actors[task].send(argument),
        {
            # Its best for tasks that do nothing.
            "drain": [worker(2, 8, "noop")],
            "one": [worker(1, 8, "critical", "high")],
            "own": [worker(1, 2, "critical"), worker(1, 6, "high")],
        },
    )
