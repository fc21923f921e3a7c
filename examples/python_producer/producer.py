#!/usr/bin/env python3
"""Publishes a task from Python, for a Rust handler to run.

    tierline topology plan --json topology/minimal.toml > plan.json
    pip install -r requirements.txt
    python producer.py amqp://localhost plan.json email.send_receipt '{"order": 7}'

The plan says where each task goes; the message is as tierline's `message::wire` documents it. Prints
the task's id once the broker has stored it, and fails where it has not.
"""

import json
import secrets
import sys
import time

import pika

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def draw_id():
    """Draws a task's id: a UUID v7 behind a one bit, in Crockford's base32. It says when the task was enqueued."""
    number = 1
    number = number << 48 | time.time_ns() // 1_000_000
    number = number << 4 | 7
    number = number << 12 | secrets.randbits(12)
    number = number << 2 | 2
    number = number << 62 | secrets.randbits(62)
    return "".join(ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))


def publish(channel, plan, task, payload, headers=None):
    """Publishes one task; the channel is in confirm mode. Returns the task's id."""
    try:
        route = plan["tasks"][task]
    except KeyError:
        raise SystemExit(f"task {task!r} is not mapped to a tier: add it to [tasks] in the map")
    task_id = draw_id()
    channel.basic_publish(
        exchange=route["exchange"],
        routing_key=route["routing_key"],
        body=json.dumps(payload).encode(),
        # An id that was not drawn just now needs the header "tierline-enqueued-at" too, in milliseconds.
        properties=pika.BasicProperties(
            type=task,
            message_id=task_id,
            priority=route["priority"],
            delivery_mode=pika.DeliveryMode.Persistent,
            headers=headers,
        ),
        # What no queue takes comes back as an UnroutableError, not as silence.
        mandatory=True,
    )
    return task_id


def main():
    if len(sys.argv) != 5:
        raise SystemExit(__doc__)
    url, plan_file, task, payload = sys.argv[1:]
    with open(plan_file, encoding="utf-8") as file:
        plan = json.load(file)
    parameters = pika.URLParameters(url)
    # An alarm of the broker must not hold us up for ever.
    parameters.blocked_connection_timeout = 10
    connection = pika.BlockingConnection(parameters)
    channel = connection.channel()
    channel.confirm_delivery()
    print(publish(channel, plan, task, json.loads(payload), {"producer": "python"}))
    connection.close()


if __name__ == "__main__":
    main()
