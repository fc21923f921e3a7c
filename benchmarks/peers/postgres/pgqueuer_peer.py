"""PgQueuer: `pgqueuer_peer.py drain COUNT BATCH` fills the database of DATABASE_URL, works it off, and prints the seconds
from the first task to the last."""

import asyncio
import os
import sys
import time

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.types import QueueExecutionMode


async def main(count: int, batch: int) -> None:
    pool = await asyncpg.create_pool(os.environ["DATABASE_URL"], min_size=4, max_size=8)
    queuer = PgQueuer.from_asyncpg_pool(pool)
    await queuer.queries.install()
    payload = b"x" * 256
    for filled in range(0, count, 1000):
        some = min(1000, count - filled)
        await queuer.queries.enqueue(["noop"] * some, [payload] * some, [0] * some)
    times: list[float] = []

    @queuer.entrypoint("noop")
    async def noop(_job) -> None:
        times.append(time.perf_counter())

    await queuer.run(batch_size=batch, mode=QueueExecutionMode.drain)
    assert len(times) == count, len(times)
    print(max(times) - min(times))


asyncio.run(main(int(sys.argv[2]), int(sys.argv[3])))
