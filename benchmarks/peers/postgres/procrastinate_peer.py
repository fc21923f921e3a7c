"""procrastinate: `procrastinate_peer.py drain COUNT BATCH` fills the database of DATABASE_URL, works it off, and prints the
seconds from the first task to the last. It fetches one task at a time: BATCH is its concurrency."""

import asyncio
import os
import sys
import time

import procrastinate

app = procrastinate.App(
    connector=procrastinate.PsycopgConnector(
        conninfo=os.environ["DATABASE_URL"], min_size=4, max_size=10
    )
)
times: list[float] = []


@app.task(name="noop")
async def noop(text: str) -> None:
    times.append(time.perf_counter())


async def main(count: int, concurrency: int) -> None:
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for filled in range(0, count, 1000):
            some = min(1000, count - filled)
            await noop.batch_defer_async(*[{"text": "x" * 240}] * some)
        await app.run_worker_async(wait=False, concurrency=concurrency)
    assert len(times) == count, len(times)
    print(max(times) - min(times))


asyncio.run(main(int(sys.argv[2]), int(sys.argv[3])))
