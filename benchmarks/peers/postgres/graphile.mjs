// graphile-worker: `graphile.mjs drain COUNT BATCH` fills the database of DATABASE_URL, works it off, and prints the
// seconds from the first task to the last. BATCH is the size of its local queue; 0: none.
import { run, runMigrations, makeWorkerUtils, Logger } from "graphile-worker";

const [, , , count, batch] = process.argv.map((word, index) => (index > 2 ? Number(word) : word));
const connectionString = process.env.DATABASE_URL;
const logger = new Logger(() => () => {});
await runMigrations({ connectionString, logger });
const utils = await makeWorkerUtils({ connectionString, logger });
const payload = { text: "x".repeat(240) };
for (let filled = 0; filled < count; filled += 1000) {
  const specs = Array.from({ length: Math.min(1000, count - filled) }, () => ({ identifier: "noop", payload }));
  await utils.addJobs(specs);
}
await utils.release();

let done = 0;
let first = 0;
let finished;
const last = new Promise((resolve) => (finished = resolve));
const runner = await run({
  logger,
  noHandleSignals: true,
  preset: {
    worker: {
      connectionString,
      concurrentJobs: 8,
      maxPoolSize: 10,
      pollInterval: 2000,
      ...(batch > 0 ? { localQueue: { size: batch }, completeJobBatchDelay: 0, failJobBatchDelay: 0 } : {}),
    },
  },
  taskList: {
    noop: () => {
      first ||= performance.now();
      done += 1;
      if (done === count) finished(performance.now());
    },
  },
});
console.log(((await last) - first) / 1000);
await Promise.race([runner.stop(), new Promise((resolve) => setTimeout(resolve, 5000))]);
process.exit(0);
