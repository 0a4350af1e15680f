// A Redlock client of another language (npm `redlock` on `ioredis`), told by lines on stdin what to do:
//
//   acquire KEY.. TTL_MS   one attempt; answers `acquired` or `contended`
//   release                gives back what was acquired; answers `released`
//   count KEY TTL_MS N     N times: lock KEY, waiting for it, and raise the counter; answers `counted`
//   exit
//
// The arguments are the URLs of the nodes; the counter is a key on the first.

"use strict";

const readline = require("node:readline");
const { setTimeout: sleep } = require("node:timers/promises");

const Redis = require("ioredis");
const { default: Redlock, ResourceLockedError } = require("redlock");

const clients = process.argv.slice(2).map((url) => new Redis(url));
const redlock = new Redlock(clients, { retryCount: 0, retryDelay: 5, retryJitter: 5 });
let held = null;

async function acquire(keys, ttl) {
  try {
    held = await redlock.acquire(keys, ttl);
    return "acquired";
  } catch (error) {
    const attempts = await Promise.all(error.attempts ?? []);
    const votes = attempts.flatMap(({ votesAgainst }) => [...votesAgainst.values()]);
    const busy = votes.length > 0 && votes.every((vote) => vote instanceof ResourceLockedError);
    return busy ? "contended" : `failed: ${error} ${votes}`;
  }
}

async function count(key, ttl, times) {
  for (let i = 0; i < times; i += 1) {
    const lock = await redlock.acquire([key], ttl, { retryCount: -1 });
    // Read and write with a pause between them: without exclusion, updates would be lost.
    const before = Number(await clients[0].get("counter"));
    await sleep(1);
    await clients[0].set("counter", before + 1);
    await lock.release();
  }
  return "counted";
}

async function run(line) {
  const [command, ...args] = line.split(" ");
  switch (command) {
    case "acquire":
      return acquire(args.slice(0, -1), Number(args.at(-1)));
    case "release":
      await held.release();
      return "released";
    case "count":
      return count(args[0], Number(args[1]), Number(args[2]));
    case "exit":
      return process.exit(0);
    default:
      return `failed: no command ${command}`;
  }
}

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    console.log(await run(line).catch((error) => `failed: ${error}`));
  }
  process.exit(0);
}

main();
